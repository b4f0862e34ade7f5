"""`apply --hold`: the caching allocator of a GPU gets no more than the plan's budget, so a run that would pass it fails there."""

from __future__ import annotations

from memopt.errors import NotPossibleHere
from memopt.plan import Plan


def limit_of(plan: Plan) -> int:
    """Bytes that the allocator may reserve under `plan`. Raises `NotPossibleHere` where the plan does not say."""
    if plan.device.kind != "cuda":
        raise NotPossibleHere(
            "--hold is for a GPU",
            why="no allocator of a CPU can be told a limit",
            try_="memopt apply without --hold, or ulimit -v",
        )
    if not plan.whole_budget_bytes:
        raise NotPossibleHere(
            "this plan cannot be held",
            why="its budget is a share of the tensors' own peak, and says nothing of the allocator's gaps",
            try_="memopt advise --budget 16GB, in bytes",
        )
    return plan.whole_budget_bytes - plan.device.context_bytes


def hold(limit_bytes: int) -> None:
    """Limit the allocator, as soon as the script uses CUDA: asking for it sooner would make a context that nobody wanted."""
    import torch

    from memopt.instrument.torch_internals import cuda_lazy_call

    def limit() -> None:
        for index in range(torch.cuda.device_count()):
            total_bytes = torch.cuda.get_device_properties(index).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), index)

    cuda_lazy_call(limit)
