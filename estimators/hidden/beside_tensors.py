"""Budgets, and what a process holds on its GPU beside the bytes that its tensors ask for, so that a budget can be told in what nvidia-smi shows.

Two parts: the CUDA context with its kernels, measured when the profile was made, and what the caching allocator needs on top of the
tensors (blocks rounded up, segments not filled): the least memory that the recorded iteration runs in, by the simulated allocator,
less its tensors' peak. Without memory pressure the allocator keeps more than that, and gives it back when it has to.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from memopt.errors import BudgetInfeasible, MemoptError
from memopt.estimators.elsewhere.from_profile import estimate_trace
from memopt.plan import Plan
from memopt.trace import Trace
from memopt.units import format_bytes, parse_bytes


@dataclass(frozen=True, slots=True)
class BesideTensors:
    """Bytes of a process on a GPU that no plan moves; none on a CPU."""

    context_bytes: int = 0
    allocator_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.context_bytes + self.allocator_bytes

    def words(self, budget_bytes: int) -> str:
        """What of a budget for the whole process is left to tensors."""
        left = max(0, budget_bytes - self.total_bytes)
        return (
            f"of {format_bytes(budget_bytes)} on the device {format_bytes(self.context_bytes)} go to the CUDA context and kernels, "
            f"{format_bytes(self.allocator_bytes)} to the allocator's rounding and gaps, and {format_bytes(left)} are left to tensors"
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget as typed: a share (`60%`) of the tensors' own peak, or bytes, which on a GPU are those of the whole process."""

    tensors_bytes: int
    """What a plan's tensors may have, at least 1."""
    whole_bytes: int = 0
    """What was asked for, where that is more than tensors."""
    beside: BesideTensors = BesideTensors()

    @property
    def notes(self) -> tuple[str, ...]:
        """How the one comes of the other."""
        return (self.beside.words(self.whole_bytes),) if self.whole_bytes else ()

    def noted(self, plan: Plan) -> Plan:
        """`plan` with what was asked for."""
        if not self.whole_bytes:
            return plan
        return msgspec.structs.replace(
            plan, whole_budget_bytes=self.whole_bytes, notes=[*plan.notes, *self.notes]
        )

    def told(self, error: BudgetInfeasible) -> BudgetInfeasible:
        """`error` in the bytes that were asked for."""
        if not self.whole_bytes:
            return error
        return BudgetInfeasible(
            self.whole_bytes,
            error.min_peak_bytes + self.beside.total_bytes,
            (*error.blockers, *self.notes),
            reached=error.reached,
        )


def parse_budget(text: str, trace: Trace, *, unplanned_bytes: int) -> Budget:
    """The budget `text` for a run like `trace`, whose tensors peak at `unplanned_bytes` without a plan. Raises `UsageError`."""
    asked_bytes = parse_bytes(text, of_bytes=unplanned_bytes)
    beside = BesideTensors() if text.strip().endswith("%") else beside_tensors(trace)
    if not beside.total_bytes:
        return Budget(asked_bytes)
    return Budget(max(1, asked_bytes - beside.total_bytes), asked_bytes, beside)


def beside_tensors(trace: Trace) -> BesideTensors:
    """Of the process that `trace` was recorded in, or is modelled for."""
    if trace.device.kind != "cuda":
        return BesideTensors()
    try:
        found = estimate_trace(trace)
    except MemoptError:  # a GPU that is not in the table
        return BesideTensors(context_bytes=trace.device.context_bytes)
    needed = found.smallest_bytes or found.reserved_bytes
    return BesideTensors(found.context_bytes, max(0, needed - trace.peak_bytes))
