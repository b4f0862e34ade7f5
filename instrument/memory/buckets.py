"""Memory that `DistributedDataParallel` holds beside its gradients: buckets, in C++, into which they are copied to be reduced."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

BUCKET = "gradients being reduced (a bucket of DistributedDataParallel)"


def bucket_sizes(modules: Iterable[nn.Module], device: str) -> list[int]:
    """Bytes of each bucket on `device` that is no gradient's own memory, as the modules' reducers have them now."""
    if not torch.distributed.is_available():
        return []
    found: list[int] = []
    for module in modules:
        if isinstance(module, nn.parallel.DistributedDataParallel) and module.device_type == device:
            told = module._get_ddp_logging_data()
            if not told.get("gradient_as_bucket_view"):
                sizes = told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes") or ""
                found += [int(size) for size in str(sizes).replace(",", " ").split() if size.isdecimal()]
    return found


def just_rebuilt(modules: Iterable[nn.Module]) -> bool:
    """Has a module of these new buckets since its last forward, in which its sizes were told? Together the new ones are as large."""
    return any(
        isinstance(each, nn.parallel.DistributedDataParallel)
        and getattr(each, "_has_rebuilt_buckets", False)
        and not each._get_ddp_logging_data().get("rebuilt_bucket_sizes")
        for each in modules
    )
