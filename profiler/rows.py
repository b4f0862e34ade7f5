"""What a recording writes down: one row for each op, storage and saved slot. Numbers and names, never tensors.

The garbage collector does not look at rows, which hold nothing that could be garbage: for a hundred thousand of them it would run all the time.
"""

from __future__ import annotations

from msgspec import Struct

from memopt.instrument.ops import OpKind
from memopt.value_facts import ValueFacts

FORWARD, BACKWARD, OPTIMIZER, OTHER = range(4)


class OpRow(Struct, gc=False):
    kind: OpKind
    module: str
    ordinal: int
    phase: int
    line: str
    forward_op: int
    reads: tuple[int, ...]
    writes: tuple[int, ...] = ()
    shape: str = ""
    other_bits: bool = False
    """Run again, it may give other bits."""
    compiled: bool = False
    """It ran inside a region of torch.compile, whose other kernels nobody sees: never to be made again."""
    in_place: bool = False
    """In backward: what it makes could be written into the gradient that it uses up."""
    copies: bool = False
    """Its result is a copy of what it reads, byte for byte."""


class StorageRow(Struct, gc=False):
    size_bytes: int
    birth: int
    value: int
    """Its current version."""
    device: str = ""
    """Its type."""
    death: int | None = None
    only_saved_from: int = -1
    left_before: tuple[int, ...] = ()
    """Ops from which on that was so until a backward that made a graph saved it again."""
    meta: str = ""
    label_op: int = -1
    name: str = ""
    found: bool = False
    """No op of the recording made it: it was there when op `birth` came (from numpy, a list, a DataLoader's worker)."""
    unseen: bool = False
    """It changed without an op that was seen: its owner (FSDP) freed or refilled it, a kernel wrote it. What reads it runs once."""
    version: int = 0
    """What its tensors' version counter says after the writes that were seen."""
    lent: bool = False
    """Its bytes are somebody else's, who may change them unseen."""
    category: str = ""
    """Set where it is known for sure (parameter, gradient, ...); else worked out at the end."""
    facts: ValueFacts | None = None
    """What was found of its values when nobody but autograd held it any more."""


class SlotRow(Struct, gc=False):
    storage: int
    value: int
    frame: str
    ordinal: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    plain: bool
    packed_before: int
    unpacks: tuple[int, ...] = ()
    unpack_order: int = -1
    node: str = ""
    slot: str = ""
    consumer: int = -1
    attributes: str = ""
    """As JSON."""
