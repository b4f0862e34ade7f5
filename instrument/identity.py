"""Which storages a tensor's bytes are in: the same rule for a run that is recorded and for one that is pretended.

A storage is known by its address (`untyped_storage()._cdata`) while it lives.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from memopt.instrument.torch_internals import is_wrapper

NO_STORAGE = (NotImplementedError, RuntimeError, AttributeError, ValueError)
"""What sparse, wrapped and lazy tensors raise when they are asked for their storage."""


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the bytes: itself, or, of a tensor made of tensors (DTensor, a quantized weight), those inside."""
    if not is_wrapper(tensor):
        yield tensor
        return
    try:
        held = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    except NO_STORAGE:
        return  # half made
    for each in held:
        if isinstance(each, Tensor):  # a DTensor holds its mesh too
            yield from parts_of(each)
