"""What autograd does in place on real tensors, and not on subclasses of them or while a dispatch mode watches (InputBuffer::accumulate)."""

from __future__ import annotations

from typing import Any

import torch


def adds_in_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a backward pass that adds two tensors adds the second into the first, as autograd's input buffer does when
    nobody else holds it."""
    if kwargs or len(args) != 2 or torch.is_grad_enabled():
        return False
    old, new = args
    if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
        return False
    if old.shape != new.shape or old.dtype != new.dtype or old.layout is not torch.strided or not _dense(old):
        return False
    return _only_holder(old)


def _dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


_HOLDERS = 4
"""Of a gradient in one input buffer only, while a mode looks at the sum: the buffer, the op's stack, Python and whoever counts."""


def _only_holder(tensor: torch.Tensor) -> bool:
    """Two input buffers may hold one gradient (`AddBackward` gives both the same), and a view its base."""
    storage = tensor.untyped_storage()
    count = getattr(tensor, "_use_count", None)
    return count is not None and count() <= _HOLDERS and torch._C._storage_Use_Count(storage._cdata) <= 2
