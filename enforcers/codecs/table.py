"""The codecs by name, and what they look like: a module with `encode` and `decode`, pure and exact.

A new codec is one file (copy `two_valued.py`), one line in `CODECS`, its sizes in `codec_sizes.py`, and, if it serves
only certain readers, rows in `slot_needs.py`. Two kinds:

* *per reader* (`nothing`, `predicate`, `pool_index`): encode the tensor that was saved, with the parameters of its `Need`;
* *of values* (`two_valued`, `narrow_int`, `exact_cast`, `zero_bitmap`): any reader; encode `flat_storage(tensor)` once for all
  views of the storage, or a single tensor. They look at the data, so the profile proposes and `encode` may still decline.

They hold when backward is differentiated too (`create_graph=True`): what it reads then was proven by `tests/enforcers/test_breaker_enforce.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from memopt.enforcers.codecs import exact_cast as _exact_cast
from memopt.enforcers.codecs import narrow_int as _narrow_int
from memopt.enforcers.codecs import nothing as _nothing
from memopt.enforcers.codecs import pool_index as _pool_index
from memopt.enforcers.codecs import predicate as _predicate
from memopt.enforcers.codecs import two_valued as _two_valued
from memopt.enforcers.codecs import zero_bitmap as _zero_bitmap
from memopt.enforcers.codecs.encoded import Encoded
from memopt.estimators.simulator.slot_needs import Need


class Codec(Protocol):
    """What a module of a codec offers."""

    name: str
    of_values: bool

    def encode(self, tensor: torch.Tensor, params: Mapping[str, object], /) -> Encoded | None:
        """The encoded tensor, or None: keep it. Never changes `tensor`."""

    def decode(self, encoded: Encoded, /) -> torch.Tensor:
        """A fresh tensor with the size, strides, offset, dtype and device of the original. May be called again."""


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (_nothing, _predicate, _pool_index, _two_valued, _narrow_int, _exact_cast, _zero_bitmap)
}


@torch.no_grad()
def encode(name: str, tensor: torch.Tensor, params: Mapping[str, object] | None = None) -> Encoded | None:
    """`tensor` under codec `name`, or None where it does not apply to this tensor or these data: keep it then."""
    return CODECS[name].encode(tensor.detach(), params or {})


@torch.no_grad()
def encode_for(need: Need, tensor: torch.Tensor) -> Encoded | None:
    """`tensor` encoded for one reader with a lesser need than its values."""
    return None if need.kind == "values" else encode(need.kind, tensor, need.parameters)


@torch.no_grad()
def decode(encoded: Encoded) -> torch.Tensor:
    """What backward may be given in place of the tensor."""
    return CODECS[encoded.codec].decode(encoded)


def measure_value_codecs(tensor: torch.Tensor) -> tuple[tuple[str, int], ...]:
    """(codec, bytes) for every value codec that takes these data, smallest first: what a profile should offer a planner."""
    found = [(name, _measure(codec, tensor.detach())) for name, codec in CODECS.items() if codec.of_values]
    return tuple(sorted(((name, held) for name, held in found if held is not None), key=lambda pair: pair[1]))


@torch.no_grad()
def _measure(codec: Codec, tensor: torch.Tensor) -> int | None:
    if codec is CODECS["zero_bitmap"]:
        return _zero_bitmap.measure(tensor, {})
    encoded = codec.encode(tensor, {})
    return None if encoded is None else encoded.encoded_bytes


def attributes_of(node: Any) -> dict[str, object]:
    """What `slot_needs.needs_of` wants to know of an autograd node: its plain saved attributes, `<slot>.size` of its saved
    tensors, and `needs_input_grad`. Reading a saved tensor runs its unpack hook."""
    found: dict[str, object] = {
        "needs_input_grad": tuple(following is not None for following, _ in node.next_functions)
    }
    for attribute in dir(type(node)) or dir(node):
        if not attribute.startswith("_saved_"):
            continue
        try:
            value = getattr(node, attribute)
        except RuntimeError:  # freed, or modified in place since
            continue
        slot = attribute.removeprefix("_saved_")
        if isinstance(value, torch.Tensor):
            found[f"{slot}.size"] = tuple(value.size())
        elif value is None or isinstance(value, bool | int | float | str | tuple):
            found[slot] = value
    return found
