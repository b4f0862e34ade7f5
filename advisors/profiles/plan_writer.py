"""Decisions -> the plan that is enforced: every storage with all its slots, the ops to remember, the triggers, and why."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cached_property

from memopt.advisors.clock import now
from memopt.advisors.profiles.moments import moments_of
from memopt.advisors.profiles.problem import Candidate, Decisions, Problem
from memopt.codecs.table import CODECS
from memopt.estimators.simulator.chains import Chain
from memopt.estimators.simulator.decision import Decision
from memopt.estimators.simulator.in_pieces import Pieces
from memopt.estimators.simulator.saved import Absence, Saved
from memopt.estimators.simulator.slot_needs import VALUES, Need, Value
from memopt.growth import saved_bytes, saved_elements
from memopt.instrument.memory.outside import before_training
from memopt.plan import (
    GRADIENTS_IN_PLACE,
    OPTIMIZER_IN_BACKWARD,
    OPTIMIZER_IN_PIECES,
    OPTIMIZER_STATE_AWAY,
    WEIGHTS_STREAMED,
    Action,
    Departure,
    OpRef,
    Plan,
    ScriptAction,
    SlotRef,
)
from memopt.timeline import Timeline
from memopt.trace import PHASES, STATE_BESIDE, Trace
from memopt.units import format_bytes, format_ms
from memopt.version import VERSION
from memopt.workspaces import workspaces_of

_FORWARD, _OTHER = PHASES.index("forward"), PHASES.index("other")
_WHENEVER = None, False, None
"""Nothing waits for a copy out."""
_MARGINS_S, _MARGINS_SOON_S = 1.5, 0.1
"""For so long savings are found by taking actions away one by one; after that they are the bytes at the plain peak. The second where a script waits
for the plan."""


def write_plan(
    problem: Problem,
    decisions: Decisions,
    *,
    strategy: str,
    profile: str,
    notes: tuple[str, ...] = (),
    soon: bool = False,
) -> Plan:
    """The plan for `decisions` and what is given, the actions that save most first."""
    decisions = {**problem.given, **decisions}
    chains, kept = problem.simulator.chains(decisions)
    decisions = {storage: decision for storage, decision in decisions.items() if storage not in kept}
    timeline = problem.simulator.run(decisions, whole=True)
    writer = _Writer(problem, decisions, timeline, chains, soon=soon)
    actions = [
        writer.action(candidate, decision)
        for storage, decision in decisions.items()
        if (candidate := problem.candidate(storage)) is not None
    ]
    actions.sort(key=lambda action: (-action.saved_bytes, -action.size_bytes, action.storage))
    trace = problem.view.trace
    return Plan(
        memopt=VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        script=trace.script,
        device=trace.device,
        profile=profile,
        strategy=strategy,
        budget_bytes=problem.budget_bytes,
        unplanned_peak_bytes=problem.unplanned_peak_bytes,
        predicted_peak_bytes=timeline.peak_bytes
        if decisions or problem.is_of_another_run
        else problem.unplanned_peak_bytes,
        plain_step_ms=problem.plain_step_ms,
        predicted_step_ms=timeline.step_ms,
        iteration=trace.iteration,
        optimizers=trace.facts.get("in_first_round", 0),
        base_bytes=trace.base_bytes,
        saved_tensors=len(trace.slots.node),
        saved_elements=sum(saved_elements(trace)),
        saved_bytes=saved_bytes(trace),
        state_beside_bytes=trace.facts.get(STATE_BESIDE, 0),
        without_gradients=trace.calls_without_gradients,
        workspace_calls=problem.streamed.workspaces if problem.streamed else workspaces_of(trace),
        host_bytes=_host_bytes(problem, decisions),
        actions=actions,
        script_actions=[
            *_of_backward(problem, timeline),
            *_of_the_optimizer(problem, decisions, timeline),
            *_of_frozen_weights(problem, timeline),
        ],
        moments=moments_of(problem, decisions, timeline),
        notes=[
            *notes,
            *filter(None, [before_training(trace, problem.unplanned_peak_bytes), _beside_state(trace)]),
        ],
    )


def _beside_state(trace: Trace) -> str:
    """What only `memopt run` does under such a plan."""
    away_bytes = trace.facts.get(STATE_BESIDE, 0)
    if not away_bytes:
        return ""
    return f"recorded with {format_bytes(away_bytes)} of optimizer state in a tier, where memopt run keeps it: under memopt apply it comes on top"


def _host_bytes(problem: Problem, decisions: Decisions) -> int:
    """Most bytes that the host tier has at once: a storage from the op that packs it until its last handle is gone."""
    changes: list[tuple[int, int]] = []
    for storage, decision in decisions.items():
        if decision.kind == "swap" and decision.tier == "host":
            saved, left_until = problem.view.saved[storage], problem.view.left_until.get(storage, -1)
            if left_until >= 0:  # that of the iteration before
                changes += [(-1, saved.size_bytes), (left_until + 1, -saved.size_bytes)]
            changes += [(saved.acted_op, saved.size_bytes), (saved.release + 1, -saved.size_bytes)]
    return max(itertools.accumulate(size for _, size in sorted(changes)), default=0)


def _of_backward(problem: Problem, timeline: Timeline) -> list[ScriptAction]:
    """What the plan does about gradients that are used up."""
    over, trace = problem.in_place, problem.view.trace
    if over is None:
        return []
    count, high = len(over.made), timeline.high_bytes.copy()
    without = over.plain_peak_bytes
    if (
        trace.updates is not None or problem.pieces is not None
    ):  # else the optimizer's ops stand between those of backward
        for op, size in over.made:
            high[op] += size
        without = int(high.max())
    return [
        ScriptAction(
            kind="backward",
            what=GRADIENTS_IN_PLACE,
            why=f"{count} ops of backward write what they make into the gradient that they use up, with the same bits",
            saved_bytes=max(0, without - timeline.peak_bytes),
            ops=count,
            least_bytes=over.least_bytes,
            cost_ms=round(over.cost_ms, 4),
        )
    ]


def _of_frozen_weights(problem: Problem, timeline: Timeline) -> list[ScriptAction]:
    """What the plan does about weights that nothing trains, as a whole."""
    streamed = problem.streamed
    if streamed is None:
        return []
    size = format_bytes(streamed.size_bytes)
    why = f"{size} of weights that nothing trains are in the {streamed.tier} tier; each comes when something uses it"
    return [
        ScriptAction(
            kind="weights",
            what=WEIGHTS_STREAMED,
            why=f"{why}, while the one before is used" if streamed.ahead else why,
            saved_bytes=max(0, min(streamed.size_bytes, problem.unplanned_peak_bytes - timeline.peak_bytes)),
            parameters=streamed.count,
            cost_ms=round(streamed.cost_ms, 4),
            tier=streamed.tier,
            away_bytes=streamed.size_bytes,
            least_bytes=streamed.least_bytes,
            ahead=streamed.ahead,
        )
    ]


def _of_the_optimizer(problem: Problem, decisions: Decisions, timeline: Timeline) -> list[ScriptAction]:
    """What the plan does about the optimizer, where it steps inside backward."""
    plain = problem.instead_of
    updates = plain.view.trace.updates if plain is not None else None
    if plain is None or updates is None:
        return []
    if problem.pieces is not None:
        return [_in_pieces(problem, plain, problem.pieces, decisions, timeline)]
    count = len(updates.parameter)
    return [
        ScriptAction(
            kind="optimizer",
            what=OPTIMIZER_IN_BACKWARD,
            why=f"gradients of {count} parameters used and freed in backward: {updates.optimizer} gives the same bits one by one",
            saved_bytes=_saved_by_moving(plain, decisions, timeline),
            parameters=count,
            cost_ms=round(problem.view.trace.step_ms - plain.view.trace.step_ms, 4),
            cleared_late=bool(updates.old_gradients),
        )
    ]


def _saved_by_moving(plain: Problem, decisions: Decisions, timeline: Timeline) -> int:
    """Bytes by which the peak would rise if the optimizer stepped as in the run as it is."""
    without = max(plain.run(decisions).peak_bytes, plain.unplanned_peak_bytes if not decisions else 0)
    return max(0, without - timeline.peak_bytes)


def _in_pieces(
    problem: Problem, plain: Problem, pieces: Pieces, decisions: Decisions, timeline: Timeline
) -> ScriptAction:
    """The step in pieces: its words, what it saves, what it costs."""
    updates = plain.view.trace.updates
    kind = updates.optimizer if updates is not None else "the optimizer"
    return ScriptAction(
        kind="optimizer",
        what=OPTIMIZER_IN_PIECES if pieces.piece_bytes else OPTIMIZER_STATE_AWAY,
        why=_of_pieces(pieces, kind),
        saved_bytes=_saved_by_moving(plain, decisions, timeline),
        parameters=pieces.parameters + (pieces.whole.tensors if pieces.whole is not None else 0),
        cost_ms=round(max(0.0, problem.view.trace.step_ms - plain.view.trace.step_ms), 4),
        piece_bytes=pieces.piece_bytes,
        tier=pieces.tier,
        away_bytes=pieces.state_bytes,
        away=pieces.away,
        whole_from_bytes=pieces.whole_from_bytes,
        gradient_bytes=pieces.gradient_bytes,
        cleared_late=pieces.cleared_late,
    )


def _of_pieces(pieces: Pieces, kind: str) -> str:
    """What happens to the step of an optimizer of that kind, and to its state."""
    if not pieces.piece_bytes:
        return (
            f"{format_bytes(pieces.state_bytes)} of the state of {kind} are in the {pieces.tier} tier between steps; "
            "all of it is back in the step, which is the optimizer's own"
        )
    size = format_bytes(pieces.piece_bytes)
    why = f"{kind} steps {size} of parameters at once, with the same bits: its temporaries are no larger"
    if pieces.tier is None:
        return why
    moved = [f"{format_bytes(pieces.state_bytes)} of its state are in the {pieces.tier} tier between steps"]
    if pieces.gradient_bytes:
        moved.append(f"{format_bytes(pieces.gradient_bytes)} of gradients from when they are whole")
    why += f"; {', '.join(moved[not pieces.state_bytes :])}"
    if pieces.whole is not None:
        why += f" ({format_bytes(pieces.whole.size_bytes)} of it of optimizers that step as they do)"
    return why


class _Writer:
    def __init__(
        self,
        problem: Problem,
        decisions: Decisions,
        timeline: Timeline,
        chains: dict[int, Chain],
        *,
        soon: bool,
    ) -> None:
        self.problem, self.decisions, self.timeline = problem, decisions, timeline
        self.view, self.trace = problem.view, problem.view.trace
        self.chains = chains
        self.deadline = now() + (_MARGINS_SOON_S if soon else _MARGINS_S)
        self.chain_of_op: dict[int, list[Chain]] = {}
        for chain in chains.values():
            for op in chain.ops:
                self.chain_of_op.setdefault(op, []).append(chain)
        self.away_from = problem.simulator.away_from(decisions)
        packed = [(op, False, slot) for slot, op in enumerate(self.trace.slots.packed_before)]
        unpacked = [(op, True, slot) for op, slot in self.view.first_unpacked.items()]
        self.moments = sorted(packed + unpacked)
        """(Op that follows, whether the slot is unpacked before it rather than packed, slot): when the run can be made to wait."""

    def action(self, candidate: Candidate, decision: Decision) -> Action:
        saved = candidate.saved
        saved_bytes, cost_ms = self._margins(candidate, decision)
        first, *later = self._departures(saved)
        asked = self.view.asked_as(saved.storage, early=decision.early)
        moment = asked.first_use if decision.early else decision.prefetch_op
        prefetch = self.view.first_unpacked.get(moment) if moment >= 0 else None
        return Action(
            kind=decision.kind,
            storage=saved.storage,
            label=self.trace.storage_label(saved.storage),
            size_bytes=saved.size_bytes,
            slots=self._slots(candidate, decision),
            why=self._why(candidate, decision),
            saved_bytes=saved_bytes,
            cost_ms=round(cost_ms, 4),
            tier=decision.tier,
            again=decision.again,
            codec=decision.codec,
            away_by=first.away_by,
            away_at_use=first.away_at_use,
            away_before=first.away_before,
            each=decision.each,
            leaves_after=first.after if saved.is_weight else self._leaves_after(saved, decision),
            leaves_again=later,
            prefetch=self.slot_ref(prefetch) if prefetch is not None else None,
            turn=self._turns.get(saved.storage, 0),
            records=[self.op_ref(op) for op in self._recorded(saved)] if decision.kind == "recompute" else [],
            copied_back=self._copied_back(saved) if decision.kind == "recompute" else [],
            line=self.trace.strings[self.trace.storages.line[saved.storage]],
        )

    @cached_property
    def _turns(self) -> dict[int, int]:
        """What is prefetched in the order in which it is asked for, as the judge has it (`simulator.swap_lanes`, `simulator.replays`)."""
        ahead = [
            self.view.asked_as(s, early=decision.early)
            for s, decision in self.decisions.items()
            if decision.kind == "swap" or decision.early
        ]
        ahead.sort(key=lambda saved: (saved.first_use, saved.order, saved.storage))
        return {saved.storage: turn for turn, saved in enumerate(ahead)}

    def _departures(self, saved: Saved) -> list[Departure]:
        """Each absence of a storage: what it leaves after, and by when it must be away."""
        spans = saved.absences
        gone = self.away_from.get(saved.storage, [-1] * len(spans))
        found = []
        for span, op in zip(spans, gone, strict=True):
            by, at_use, before = self._away_by(span, op) if op >= 0 else _WHENEVER
            after = self.op_ref(min(span.gone_after, self.view.n - 1))
            found.append(Departure(after=after, away_by=by, away_at_use=at_use, away_before=before))
        return found

    def _leaves_after(self, saved: Saved, decision: Decision) -> OpRef | None:
        return self.op_ref(saved.leaves_after) if saved.leaves_after >= 0 and not decision.each else None

    def _away_by(self, span: Absence, gone: int) -> tuple[SlotRef | None, bool, OpRef | None]:
        """The last pack by which what is away from op `gone` on may still be on its way out; in backward, the last unpack (True); where nothing
        is packed in time, or all around that op, the op itself."""
        place = bisect.bisect_right(self.moments, (gone, True, len(self.moments))) - 1
        too_early = place >= 0 and self.moments[place][0] <= span.gone_after
        phase = self.view.phase[gone] if span.gone_after < gone < self.view.n else -1
        if phase == _OTHER or (phase == _FORWARD and too_early):
            return None, False, self.op_ref(gone)
        place += too_early
        if (
            not 0 <= place < len(self.moments)
            or not span.gone_after <= self.moments[place][0] < span.first_use
        ):
            return _WHENEVER
        _, in_backward, slot = self.moments[place]
        return self.slot_ref(slot), in_backward, None

    def _margins(self, candidate: Candidate, decision: Decision) -> tuple[int, float]:
        """(bytes by which the peak would rise, ms that would be saved) without this action."""
        saved = candidate.saved
        if now() > self.deadline or saved.storage in self.problem.given:
            at_peak = saved.gone_after < self.problem.plain.peak_op < saved.first_use
            gain = saved.size_bytes - decision.encoded_bytes if at_peak else 0
            return gain, self.problem.solo_ms(candidate, decision)
        without = self.problem.simulator.run({s: d for s, d in self.decisions.items() if s != saved.storage})
        peak = max(0, without.peak_bytes - self.timeline.peak_bytes)
        return peak, max(0.0, self.timeline.step_ms - without.step_ms)

    def _slots(self, candidate: Candidate, decision: Decision) -> list[SlotRef]:
        slots = candidate.saved.slots
        codec = candidate.codec
        if decision.kind not in ("compress", "drop") or codec is None:
            return [self.slot_ref(slot) for slot in slots]
        return [self.slot_ref(slot, need) for slot, need in zip(slots, codec.needs, strict=True)]

    def slot_ref(self, slot: int, need: Need = VALUES) -> SlotRef:
        slots, strings = self.trace.slots, self.trace.strings
        consumer = slots.consumer[slot]
        return SlotRef(
            module=strings[slots.module[slot]],
            ordinal=slots.ordinal[slot],
            node=strings[slots.node[slot]],
            slot=strings[slots.slot[slot]],
            dtype=strings[slots.dtype[slot]].removeprefix("torch."),
            dims=len(slots.shape.row(slot)),
            consumer=self.trace.op_name(consumer) if consumer >= 0 else "",
            is_output=slots.is_output(slot),
            need=need.kind,
            params=_plain(need.parameters),
        )

    def op_ref(self, op: int) -> OpRef:
        ops, strings = self.trace.ops, self.trace.strings
        return OpRef(module=strings[ops.module[op]], ordinal=ops.ordinal[op], name=self.trace.op_name(op))

    def _recorded(self, saved: Saved) -> list[int]:
        """The replays that make the storage: its own chain, or its share of the chain that makes it on the way."""
        own = self.chains.get(saved.storage)
        if own is not None:
            return sorted(own.ops)
        producer = self.view.value_producer[saved.value]
        found: set[int] = set()
        for chain in self.chain_of_op.get(producer, ()):
            found |= _ancestors(self, producer, set(chain.ops))
        return sorted(found)

    def _copied_back(self, saved: Saved) -> list[OpRef]:
        """The clones from which its own replay copies back."""
        own = self.chains.get(saved.storage)
        clones = [self.view.value_producer[copy] for _, copy in own.copied_back] if own is not None else []
        return [self.op_ref(op) for op in sorted(clones)]

    def _why(self, candidate: Candidate, decision: Decision) -> str:
        saved = candidate.saved
        times = self.timeline.start_ms
        if saved.storage in self.view.unasked:
            return f"saved, and no backward asks for it; {self._copy_words(saved, decision)}"
        away_ms = float(times[saved.first_use] - times[min(saved.gone_after + 1, self.view.n - 1)])
        away = f"unused for {format_ms(max(0.0, away_ms))} between forward and backward"
        if saved.is_weight:
            away = f"a weight, {away}"
        if decision.kind == "recompute":
            return f"{self._replay_words(saved)}; {away}"
        if decision.kind == "swap":
            return f"{away}; {self._copy_words(saved, decision)}"
        held = f"{format_bytes(decision.encoded_bytes)} instead of {format_bytes(saved.size_bytes)}"
        words = CODECS[decision.codec].words
        return words if decision.kind == "drop" else f"{words}: {held}"

    def _replay_words(self, saved: Saved) -> str:
        ops = self._recorded(saved)
        names = list(dict.fromkeys(self.trace.op_name(op).split(".")[1] for op in ops))
        took = format_ms(float(sum(self.view.op_ms[op] for op in ops)))
        listed = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        if saved.storage in self.chains:
            early = ", before what it is made of goes" if self.decisions[saved.storage].early else ""
            return f"made again by {len(ops)} op{'s' if len(ops) != 1 else ''} ({listed}) in {took}{early}"
        return f"comes back on the way when another tensor is made again ({listed})"

    def _copy_words(self, saved: Saved, decision: Decision) -> str:
        copy = self.problem.simulator.copy_ms
        out = format_ms(copy(saved.size_bytes, decision, out=True))
        if saved.storage in self.view.unasked:
            return f"copying takes {out} to the {decision.tier}"
        back = format_ms(copy(saved.size_bytes, decision, out=False))
        return f"copying takes {out} to the {decision.tier} and {back} back"


def _ancestors(writer: _Writer, op: int, within: set[int]) -> set[int]:
    """`op` and the ops of `within` that it stands on."""
    found, stack = {op}, [op]
    while stack:
        for value in writer.view.reads[stack.pop()]:
            producer = writer.view.value_producer[value]
            if producer in within and producer not in found:
                found.add(producer)
                stack.append(producer)
    return found


def _plain(params: Mapping[str, Value]) -> dict[str, float | int | str | bool | list[int]]:
    """As JSON holds them; a parameter that is None is left out, which codecs read the same."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in params.items()
        if value is not None
    }
