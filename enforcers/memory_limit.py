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


class MemoryLimit:
    """On the GPU that the script trains on.

    To limit another would make a context there, and torch leaves the device that it limits as the current one. So where there are
    several, a rank's own is limited when its training begins; where there is one, as soon as the script uses CUDA.
    """

    def __init__(self, limit_bytes: int) -> None:
        """0: none."""
        self._limit_bytes = limit_bytes
        self._held: set[int] = set()

    def begin(self) -> None:
        """Be there when the script first uses CUDA: asking for it sooner would make a context that nobody wanted."""
        from memopt.instrument.torch_internals import cuda_lazy_call

        if self._limit_bytes:
            cuda_lazy_call(self._hold_the_only_one)

    def training_begins(self) -> None:
        """From here on the current GPU is the one. Called again and again, it costs nothing."""
        if not self._limit_bytes or self._held:
            return
        import torch

        if torch.cuda.is_initialized():
            self._hold(torch.cuda.current_device())

    def _hold_the_only_one(self) -> None:
        import torch

        if torch.cuda.device_count() == 1:
            self._hold(0)

    def _hold(self, index: int) -> None:
        import torch

        self._held.add(index)
        total_bytes = torch.cuda.get_device_properties(index).total_memory
        with torch.cuda.device(index):
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._limit_bytes / total_bytes), index)
