"""A plan file -> the decisions that it was written from, and the simulator's timeline of them: the inverse of `plan_writer`.

A report draws a plan from this. What is drawn is what was promised: the timeline's peak is the plan's `predicted_peak_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from memopt.advisors.advise import Adviser
from memopt.advisors.kinds import DEFAULT_ALLOW
from memopt.advisors.profiles.problem import Candidate, Decisions, Problem
from memopt.errors import BadFile
from memopt.estimators.simulator.decision import Decision
from memopt.plan import Action, Plan, ScriptAction
from memopt.timeline import Timeline
from memopt.trace import Trace


@dataclass(frozen=True, slots=True)
class Away:
    """A tensor that the plan takes off the device before the ops `start` to `stop` (exclusive), but for `left_bytes`."""

    storage: int
    kind: str
    start: int
    stop: int
    left_bytes: int


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """A plan laid on its profile. Op numbers are those of `problem.view`, whose optimizer steps where the plan lets it."""

    plan: Plan
    problem: Problem
    decisions: Decisions
    timeline: Timeline

    @property
    def moves_the_optimizer(self) -> bool:
        return self.problem.instead_of is not None

    @property
    def away(self) -> list[Away]:
        """When which tensor is gone, and how much of it stays."""
        left_from = self.problem.simulator.away_from(self.decisions)
        found = []
        for storage, decision in self.decisions.items():
            saved = self.problem.view.saved[storage]
            use = self.problem.view.asked_as(storage, early=decision.early).first_use
            start, stop = saved.gone_after + 1, min(use, saved.release + 1)
            if decision.kind == "swap":
                stop = min(stop, decision.prefetch_op) if decision.prefetch_op >= 0 else stop
                stops = [stop, *(each.first_use for each in saved.again)]
                gone = zip(left_from[storage], stops, strict=True)
                found += [
                    Away(storage, "swap", op, stop, decision.encoded_bytes)
                    for op, stop in gone
                    if 0 <= op < stop
                ]
                continue
            if decision.each:
                parts = ((part.gone_after + 1, part.first_use) for part in saved.parts)
                found += [Away(storage, "recompute", begin, end, 0) for begin, end in parts]
                continue
            if decision.kind in ("compress", "drop"):
                stop = saved.release + 1
            if start < stop:
                found.append(Away(storage, decision.kind, start, stop, decision.encoded_bytes))
        return found


def read_plan(plan: Plan, trace: Trace) -> ReadPlan:
    """`plan` laid on `trace`. Raises `BadFile` where the plan was not made from this profile."""
    adviser = _adviser(Adviser(trace, DEFAULT_ALLOW), plan.streamed)
    if adviser is not None and plan.in_place is not None:
        adviser = adviser.in_place
    if adviser is None:
        raise _another("its backward cannot write over gradients")
    problem = _problem(adviser, plan)
    problem.simulator.given = {}  # they are among the plan's actions
    decisions: Decisions = {}
    for action in plan.actions:
        if action.kind != "keep":
            decisions[action.storage] = _decision(problem, action)
    timeline = problem.simulator.run(decisions, lanes=True)
    return ReadPlan(plan, problem, decisions, timeline)


def _adviser(adviser: Adviser, streamed: ScriptAction | None) -> Adviser | None:
    """Of the run whose frozen weights are where the plan has them."""
    if streamed is None:
        return adviser
    for other in adviser.streamed:
        known = other.variants.streamed
        if known is not None and (known.tier, known.least_bytes, known.ahead) == (
            streamed.tier,
            streamed.least_bytes,
            streamed.ahead,
        ):
            return other
    raise _another("it has no such frozen weights")


def _problem(adviser: Adviser, plan: Plan) -> Problem:
    """Of the run whose optimizer steps where the plan lets it."""
    problem = adviser.problem(max(1, plan.budget_bytes))
    if plan.in_backward is not None:
        moved = adviser.variants.moved(problem)
        if moved is None:
            raise _another("its optimizer cannot step inside backward")
        return moved
    wanted = plan.in_pieces
    if wanted is None:
        return problem
    for other in adviser.variants.in_pieces(problem, piece_bytes=wanted.piece_bytes):
        pieces = other.pieces
        if pieces is not None and (
            pieces.tier, pieces.piece_bytes, pieces.away, pieces.state_bytes, pieces.gradient_bytes, pieces.whole_from_bytes,
        ) == (
            wanted.tier, wanted.piece_bytes, wanted.away, wanted.away_bytes, wanted.gradient_bytes, wanted.whole_from_bytes,
        ):  # fmt: skip
            return other
    raise _another("its optimizer cannot step in such pieces")


def _decision(problem: Problem, action: Action) -> Decision:
    candidate = _candidate(problem, action)
    options = [option for option in candidate.options if option.kind == action.kind]
    if action.kind == "swap":
        options = [option for option in options if option.tier == action.tier]
    elif action.kind == "recompute":
        wanted = action.prefetch is not None, action.each
        options = [option for option in options if (option.early, option.each) == wanted]
    elif action.codec:
        options = [option for option in options if option.codec == action.codec]
    if not options:
        raise _another(f"{action.label[:80]} cannot be treated by '{action.kind}' there")
    changes: dict[str, object] = {"again": action.again}
    if action.kind == "swap" and action.prefetch is not None:
        changes["prefetch_op"] = _trigger(problem, action)
    return msgspec.structs.replace(options[0], **changes)


def _candidate(problem: Problem, action: Action) -> Candidate:
    found = problem.candidate(action.storage) if action.storage in problem.view.saved else None
    if found is None or problem.view.trace.storage_label(action.storage) != action.label:
        raise _another(f"it has no tensor {action.storage} called {action.label[:80]}")
    return found


def _trigger(problem: Problem, action: Action) -> int:
    """The op before which the slot `action.prefetch` is unpacked for the first time."""
    trace, wanted = problem.view.trace, action.prefetch
    assert wanted is not None
    slots, strings = trace.slots, trace.strings
    for slot, (module, ordinal) in enumerate(zip(slots.module, slots.ordinal, strict=True)):
        if ordinal == wanted.ordinal and strings[module] == wanted.module:
            return min(slots.unpacks.row(slot), default=-1)
    raise _another(f"it has no saved tensor {wanted.ordinal} of {wanted.module[:80]}")


def _another(why: str) -> BadFile:
    return BadFile(
        "the plan was not made from this profile",
        why=why,
        try_="the profile that the plan names, or memopt advise PROFILE, for a plan of this one",
    )
