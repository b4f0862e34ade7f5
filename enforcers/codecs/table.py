"""Encode and decode by a codec's name. Its row is in `memopt.codecs.table`, its module here has `encode` and `decode`, pure and exact.

Two kinds (`Codec.of_values`):

* *of readers* (`nothing`, `predicate`, `pool_index`): encode the tensor that was saved, with the parameters of its `Need`;
* *of values* (`two_valued`, `narrow_int`, `exact_cast`, `zero_bitmap`): any reader; encode `flat_storage(tensor)` once for all
  views of the storage, or a single tensor. They look at the data: the profile proposes, and `encode` may still decline.

They hold when backward is differentiated too (`create_graph=True`): what it reads then was proven by `tests/enforcers/test_breaker_enforce.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol, cast

import torch

from memopt.codecs.table import CODECS
from memopt.enforcers.codecs.encoded import Encoded, meta_of
from memopt.estimators.simulator.slot_needs import Need


class CodecModule(Protocol):
    """What a module of a codec offers."""

    def encode(self, tensor: torch.Tensor, params: Mapping[str, object], /) -> Encoded | None:
        """The encoded tensor, or None: keep it. Never changes `tensor`."""

    def decode(self, encoded: Encoded, /) -> torch.Tensor:
        """A fresh tensor with the size, strides, offset, dtype and device of the original. May be called again."""


MODULES: dict[str, CodecModule] = {
    name: cast(CodecModule, import_module(f"memopt.enforcers.codecs.{name}")) for name in CODECS
}
"""Imported at once: no script should meet an import in the middle of its forward."""


@torch.no_grad()
def encode(name: str, tensor: torch.Tensor, params: Mapping[str, object] | None = None) -> Encoded | None:
    """`tensor` under codec `name`, or None where it does not apply to this tensor or these data: keep it then."""
    return MODULES[name].encode(tensor.detach(), params or {})


@torch.no_grad()
def encode_for(need: Need, tensor: torch.Tensor) -> Encoded | None:
    """`tensor` encoded for one reader with a lesser need than its values."""
    return None if need.kind == "values" else encode(need.kind, tensor, need.parameters)


@torch.no_grad()
def decode(encoded: Encoded) -> torch.Tensor:
    """What backward may be given in place of the tensor."""
    return MODULES[encoded.codec].decode(encoded)


def bytes_beyond(
    name: str, tensor: torch.Tensor, params: Mapping[str, object], encoded: Encoded | None
) -> int:
    """By how much what is held of `tensor` (`encoded`, or the tensor itself) passes what was planned for, with `params`."""
    held = tensor.nbytes if encoded is None else encoded.encoded_bytes
    return max(0, held - CODECS[name].held_bytes(meta_of(tensor), params))
