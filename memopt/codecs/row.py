"""What is told of a codec: its row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from memopt.codecs.meta import TensorMeta, chunk_cells
from memopt.value_facts import ValueFacts

Params: TypeAlias = Mapping[str, object]
"""What a codec must know besides the tensor: of its reader, or of what was planned."""

Bytes: TypeAlias = Callable[[TensorMeta, Params], int]


def no_bytes(meta: TensorMeta, params: Params) -> int:
    return 0


def per_cell(*, cpu: int, gpu: int) -> Bytes:
    """So many bytes for each cell that is handled at a time. numpy, which works on a CPU, takes none of torch's memory."""
    return lambda meta, params: min(meta.cells, chunk_cells(meta)) * (cpu if meta.is_on_cpu else gpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """How long encoding and decoding take on one type of device, in copies of the tensor."""

    encode: float
    decode: float
    encode_launches: int = 0
    """Kernels to encode a piece of a tensor, on a GPU."""
    decode_launches: int = 0
    least_encoded_item: int = 1
    """An element takes as long as one of so many bytes, if it is smaller."""
    least_decoded_item: int = 1
    quick: Mapping[str, float] = field(default_factory=dict)
    """`encode` for readers whose `test` is one of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """One exact form of a saved tensor that is smaller than itself. `enforcers/codecs/NAME.py` encodes and decodes."""

    name: str
    words: str
    """Why it is enough, for a person who reads the plan."""
    effect: str
    """What it does to a tensor, in a list: `to 1 bit`."""
    held_bytes: Bytes
    """Between forward and backward."""
    of_values: bool = False
    """It holds a whole storage, for any reader; the others serve readers with the need of their name (`simulator/slot_needs.py`)."""
    encode_bytes: Bytes = no_bytes
    """Needed for a moment while encoding, beside the tensor and what is held afterwards."""
    decode_bytes: Bytes = no_bytes
    """Needed for a moment while decoding, beside what is held and what is given back."""
    decoded_bytes: Bytes = lambda meta, params: meta.rebuilt_bytes
    """Alive while the reader runs."""
    piece_cells: Callable[[TensorMeta], int] = chunk_cells
    """Handled at a time."""
    passes: Mapping[str, Passes] = field(default_factory=dict)
    """By type of device. Nobody plans for it on another."""
    planned: Callable[[ValueFacts, TensorMeta], Params | None] = lambda facts, meta: None
    """Of a codec of values, on a storage of which a profile found `facts`: its parameters, with a margin for other iterations; None: not there."""

    def pieces(self, meta: TensorMeta) -> int:
        """How many times its kernels run for one tensor."""
        return -(-meta.cells // max(1, self.piece_cells(meta)))

    def encoding_ms(self, meta: TensorMeta, on: Passes, copy_ms: float, launch_ms: float, test: str) -> float:
        """What it takes to encode a tensor where copying a byte takes `copy_ms` and launching a kernel `launch_ms`."""
        took = (
            on.quick.get(test, on.encode) * meta.cells * max(on.least_encoded_item, meta.itemsize) * copy_ms
        )
        return max(took, launch_ms * on.encode_launches * self.pieces(meta))

    def decoding_ms(self, meta: TensorMeta, on: Passes, copy_ms: float, launch_ms: float) -> float:
        """The same of decoding."""
        took = on.decode * meta.cells * max(on.least_decoded_item, meta.itemsize) * copy_ms
        return max(took, launch_ms * on.decode_launches * self.pieces(meta))
