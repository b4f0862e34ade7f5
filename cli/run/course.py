"""What a run was asked for, and how it went."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from memopt.enforcers.guarding.guard import Guard
    from memopt.enforcers.measurements import Peaks
    from memopt.outcome import Outcome
    from memopt.plan import Plan
    from memopt.profiler.offload import OpenTier


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the run was asked for."""

    budget: str | None
    """None: what the device has free."""
    device: str
    swap_dir: Path
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    time_limit_s: float | None = None
    measure: bool = True
    offload: OpenTier | None = None
    online: bool = False
    """No plan: guarded from the first iteration to the last."""


@dataclass(slots=True)
class Course:
    """How the run went."""

    budget: str = ""
    plan: Plan | None = None
    outcome: Outcome | None = None
    problem: str = ""
    """Why nothing is enforced."""
    from_cache: bool = False
    grows_in_vain: bool = False
    """Has a plan for larger iterations than the recorded one not lowered the peak of a run before?"""
    iterations: int = 0
    recorded: list[int] = field(default_factory=list)
    most_while_recorded: int = 0
    """Bytes, in iterations that were recorded with their saved tensors out of the way."""
    recorded_again: bool = False
    """Was another iteration recorded, after the first?"""
    most_recorded_again: int = 0
    """Bytes, in iterations that were recorded after another one had been."""
    enforced_after: int | None = None
    """Iterations that had ended when the plan took effect."""
    planning_ms: float = 0.0
    better_after: int | None = None
    """Iterations that had ended when a better plan took over from the first."""
    elsewhere: int = 0
    """Backward calls in other threads than the one that is watched."""
    phase: int = 0
    """How many times the script has gone over to another phase, for which there is a plan of its own."""
    grew: bool = False
    """Did one of these save more than the one before?"""
    phases_after: list[int] = field(default_factory=list)
    """Iterations that had ended when the plan for each of these took effect."""
    notes: list[str] = field(default_factory=list)
    """On the phases that are over."""
    peak_bytes: int = 0
    """The most that was measured under any plan, or that the guard beside it saw."""
    last_peak_bytes: int = 0
    """The same under the last one."""
    last_peaks: Peaks | None = None
    """Of that, by what the iterations saved."""
    ended_by_plan: bool = False
    """The script wanted a gradient that the plan had let go of, and ended with that."""
    most_at_looks: int = 0
    """Most that was live where the script looked at optimizer state or gradients that the plan has away."""
    most_after: int = 0
    """Most that was live after the last iteration, where that was more than in any."""
    still_planning: bool = False
    no_plan_until: int = 0
    """Iterations, which backward calls end, before which nothing is planned, as the script may yet make an optimizer; 0 elsewhere."""
    spent_ms: float = 0.0
    """Between iterations: what starting and ending the stages took."""
    times_ms: dict[int, float] = field(default_factory=dict)
    """Iteration -> how long it took."""
    guards: list[Guard] = field(default_factory=list)
    """Those that have watched, one after the other."""
    online: bool = False
    budget_bytes: int | None = None
    larger_at: int = 0
    """The iteration under the last plan that saved the most, where it saved tensors that the plan knows nothing of; 0: none did."""
    next_recorded: int = 0
    """That iteration, where the next run of the command records it."""
    most_saved: float = 1.0
    """How many times as many elements as the recorded iteration the largest one under the plan saved."""
    state_away_bytes: int = 0
    """Optimizer state that is in a tier between steps without the plan's doing."""

    def tell_as_in(self, before: Course) -> None:
        """Of the plan of then: the one after it came with the script's last iteration."""
        for each in ("plan", "outcome", "better_after", "phases_after", "last_peak_bytes", "last_peaks", "most_saved", "larger_at"):  # fmt: skip
            setattr(self, each, getattr(before, each))

    @property
    def is_share(self) -> bool:
        """Is the budget a share of the plain peak, and so for tensors alone?"""
        return self.budget.strip().endswith("%")

    @property
    def extra_ms(self) -> float:
        """What recording, waiting and changing stages took beyond plain steps."""
        if self.plan is None:
            return self.spent_ms
        plain = self.plan.plain_step_ms
        return self.spent_ms + sum(max(0.0, self.times_ms[n] - plain) for n in self.recorded if n > 1)


def facts(course: Course) -> dict[str, Any]:
    """The course for programs, as plain data."""
    return {
        "schema": "memopt.run/1",
        "budget_bytes": course.budget_bytes,
        "guards": [
            {
                "most_bytes": guard.most_bytes,
                "moved": guard.moved,
                "moved_bytes": guard.moved_bytes,
                "over_bytes": guard.passed.most_bytes,
                "stuck": guard.passed.words,
            }
            for guard in course.guards
        ],
        "outcome": msgspec.to_builtins(course.outcome) if course.outcome is not None else None,
        "problem": course.problem,
        "most_while_recorded": course.most_while_recorded or None,
        "most_recorded_again": course.most_recorded_again or None,
        "from_cache": course.from_cache,
        "iterations": course.iterations,
        "enforced_after": course.enforced_after,
        "better_after": course.better_after,
        "phases_after": course.phases_after,
        "peak_bytes": course.peak_bytes or None,
        "looked_at_bytes": course.most_at_looks or None,
        "after_bytes": course.most_after or None,
        "state_away_bytes": course.state_away_bytes,
        "planning_ms": course.planning_ms,
        "extra_ms": course.extra_ms,
        "spent_ms": course.spent_ms,
        "plain_step_ms": course.plan.plain_step_ms if course.plan is not None else None,
        "times_ms": [course.times_ms[each] for each in sorted(course.times_ms)],
    }
