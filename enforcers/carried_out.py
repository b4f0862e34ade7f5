"""How much of a plan was carried out, and why the rest was not: in figures, and in words for the outcome's notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from memopt.outcome import ActionCounts, Outcome
from memopt.plan import OPTIMIZER_IN_PIECES, OPTIMIZER_STATE_AWAY, Plan
from memopt.units import format_bytes

if TYPE_CHECKING:
    from memopt.enforcers.gradients_in_place import GradientsInPlace
    from memopt.enforcers.measurements import Measurements
    from memopt.enforcers.optimizer.in_pieces import OptimizerInPieces
    from memopt.enforcers.optimizer.planned_steps import PlannedSteps
    from memopt.enforcers.tiers.swapped import Swapper
    from memopt.enforcers.weights.streamed import StreamedWeights
    from memopt.instrument.saved import SavedTensorHooks


@dataclass(slots=True)
class Account:
    """What was done of a plan's actions on tensors, by their numbers."""

    done: Counter[int] = field(default_factory=Counter)
    """Slots on which an action was taken in this iteration."""
    ever: Counter[int] = field(default_factory=Counter)
    """Iterations in which an action was taken whole. The first one, which may come to its ops in another way, counts if it is the only one."""
    in_like: Counter[int] = field(default_factory=Counter)
    """Those of them that saved as many tensors as the profiled one."""
    iterations: int = 0
    like: int = 0
    """Of the iterations, those that saved as many tensors as the profiled one."""
    alone: int = 0
    """Of the iterations, those in which the guard beside the plan held the budget, and no action was taken."""
    declined: dict[int, str] = field(default_factory=dict)
    """Why an action was not taken, the first reason of the run."""
    beyond: Counter[int] = field(default_factory=Counter)
    """Most bytes that a codec held above what was planned: the values were others than in the profile."""
    other_bits: set[str] = field(default_factory=set)
    """Ops that were to be run again, and may give other bits then."""

    def decline(self, action: int, why: str) -> None:
        """It is not taken."""
        self.declined.setdefault(action, why)

    def iteration_ended(self, taken_whole: Iterable[int], *, is_like: bool) -> None:
        """`taken_whole`: actions that were taken on all their slots; `is_like`: it saved as many tensors as the profiled iteration."""
        whole = list(taken_whole)
        if self.iterations == 1:
            self.ever.clear()
            self.in_like.clear()
            self.like = 0
        self.iterations += 1
        self.ever.update(whole)
        if is_like:
            self.like += 1
            self.in_like.update(whole)

    @property
    def usual(self) -> set[int]:
        """Actions that were taken whole in a third of the iterations, or more: of those like the profiled one, where there were any. A
        script may evaluate, or draw samples, in every other one."""
        taken, of = (self.in_like, self.like) if self.like else (self.ever, self.iterations - 1)
        return {action for action, times in taken.items() if 3 * times >= of}


class Enforcer(Protocol):
    """What carries out one decision about the run as a whole."""

    @property
    def most_used(self) -> int:
        """How often, in the iteration in which it was most often done."""

    @property
    def why_not_all(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Decision:
    """One about the run as a whole, and how far it was carried out."""

    what: str
    planned: int
    enforcer: Enforcer | None
    """None where nothing was set up: that is told by itself."""

    @property
    def used(self) -> int:
        return self.enforcer.most_used if self.enforcer is not None else 0

    @property
    def words(self) -> str:
        """Why it was not carried out to the end; empty where it was."""
        if self.enforcer is None or self.used >= self.planned:
            return ""
        return f"{self.used} of {self.planned} {self.what}: {self.enforcer.why_not_all}"


_STEPPED = {
    OPTIMIZER_IN_PIECES: "parameters were stepped in pieces",
    OPTIMIZER_STATE_AWAY: "tensors of optimizer state were away between steps",
}


def decisions_about_the_run(
    plan: Plan,
    steps: PlannedSteps | None,
    in_place: GradientsInPlace | None,
    streamed: StreamedWeights | None,
) -> list[Decision]:
    """Those that `plan` makes, with what carries them out."""
    in_backward, in_pieces = (steps.in_backward, steps.in_pieces) if steps is not None else (None, None)
    found = [
        Decision("parameters were stepped inside backward", plan.in_backward.parameters, in_backward) if plan.in_backward else None,
        Decision(_STEPPED[plan.in_pieces.what], plan.in_pieces.parameters, in_pieces) if plan.in_pieces else None,
        Decision("ops of backward wrote over the gradient that they use up", plan.in_place.ops, in_place) if plan.in_place else None,
        Decision("frozen weights were streamed", plan.streamed.parameters, streamed) if plan.streamed else None,
    ]  # fmt: skip
    return [each for each in found if each is not None and each.planned > 0]


def notes_on_tensors(account: Account, swapper: Swapper | None) -> list[str]:
    """What to say of the actions on tensors."""
    done = account.usual
    notes = [*_declined(account, done), *_in_few(account, done), *_beyond(account, done)]
    if account.other_bits:
        names = ", ".join(sorted(account.other_bits))
        notes.append(f"kept what {names} made: run again, it may give other bits on this device and with these settings")  # fmt: skip
    if swapper is None:
        return notes
    failures = swapper.failures()
    told = [n for n in notes if not any(f.startswith(n.partition("skipped: ")[2] or "\0") for f in failures)]
    told += [f"{failure}; what could not be copied was kept" for failure in failures]
    return [*told, *filter(None, [swapper.feedback.told() if swapper.feedback is not None else ""])]


def notes_on_the_run(
    hooks: SavedTensorHooks | None, pieces: OptimizerInPieces | None, swapper: Swapper | None, left_plain: int
) -> list[str]:
    """What to say of what the script did, and of copies that failed; `left_plain` iterations ran without the plan."""
    notes = pieces.failures() if pieces is not None else []
    if hooks is not None and hooks.stepped_aside:
        notes.append(f"stepped aside for torch.func {hooks.stepped_aside} times")
    if left_plain:
        notes.append(f"{left_plain} iterations began to train in another thread and ran without the plan")
    swaps = [part for part in (swapper, pieces) if part is not None]
    return [*notes, *dict.fromkeys(why for part in swaps for why in part.frees_nothing())]


def outcome_of(
    plan: Plan,
    measured: Measurements,
    decisions: list[Decision],
    *,
    actions_done: int,
    divergences: int,
    steps: int,
    waited_share: float,
    notes: list[str],
) -> Outcome:
    """What came of `plan`, beside what it promised; `actions_done` are those on tensors."""
    planned = len([action for action in plan.actions if action.kind != "keep"]) + len(decisions)
    done = actions_done + sum(each.used >= each.planned for each in decisions)
    outcome = Outcome(
        budget_bytes=plan.budget_bytes,
        unplanned_peak_bytes=plan.unplanned_peak_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        measured_peak_bytes=measured.peak_bytes,
        plain_step_ms=plan.plain_step_ms,
        predicted_step_ms=plan.predicted_step_ms,
        measured_step_ms=measured.step_ms,
        actions=ActionCounts(planned=planned, done=done, skipped=planned - done),
        divergences=divergences,
        steps=steps,
        other_steps=measured.other_steps,
        as_profiled_step_ms=measured.as_profiled_step_ms,
        waited_share=round(waited_share, 3),
        process_peak_bytes=measured.process_peak_bytes,
        notes=[*notes, *measured.notes()],
    )
    on_the_gpu = measured.on_the_gpu()
    outside = measured.outside_bytes(on_the_gpu.get("allocated_peak_bytes", 0))
    return msgspec.structs.replace(outcome, outside_peak_bytes=outside, **on_the_gpu)


def _declined(account: Account, done: Container[int]) -> list[str]:
    reasons = Counter(why for action, why in account.declined.items() if action not in done)
    return [f"{count} action{'s' * (count > 1)} skipped: {why}" for why, count in reasons.most_common()]


def _in_few(account: Account, done: Container[int]) -> list[str]:
    """Of actions that nothing spoke against, and that were taken in a few iterations only."""
    few = [n for n in account.ever if n not in done and n not in account.declined]
    if not few:
        return []
    most, seen = max(account.ever[n] for n in few), account.iterations - 1
    why = "the others ran other ops or calls than the profiled one"
    if 2 * account.alone >= seen - most:
        why = f"in {account.alone} the guard, which holds the budget where iterations take more than was planned for, did better without them"
    return [f"{len(few)} action{'s' * (len(few) > 1)} skipped in most iterations, and taken in {most} of {seen}: {why}"]  # fmt: skip


def _beyond(account: Account, done: Container[int]) -> list[str]:
    """Of codecs that were planned for the values of the profile."""
    more = [size for action, size in account.beyond.items() if size and action in done]
    if not more:
        return []
    return [
        f"{len(more)} compressed tensors took up to {format_bytes(sum(more))} more than planned in some iterations: "
        "their values were others than in the profile"
    ]
