"""The judge: (trace, decisions, device) -> Timeline. Every predicted number of memopt comes from here.

It does what the enforcer does: a dropped storage is gone once nobody but autograd holds it; it comes back when the first
consumer asks, through replays that hold their inputs and outputs like the real ones, and stays until its last consumer is
served (made on the way to another, only if it is not to be made `again`); a replay that reads a swapped storage brings it back, and it stays;
records pin their sources; encoded forms, decode buffers and copies in flight count. Lanes: compute, swap-out, swap-in.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush

import numpy as np

from memopt.device import Device
from memopt.estimators.simulator.chains import Chain
from memopt.estimators.simulator.decision import Decision
from memopt.estimators.simulator.replays import REPLAY_MS as REPLAY_MS
from memopt.estimators.simulator.replays import Replay, Replays
from memopt.estimators.simulator.trace_view import Floats, Ints, Saved, TraceView
from memopt.timeline import Interval, Timeline

MODE_MS = 0.005
"""Per forward op: what watching it costs while a plan has actions."""
HOOK_MS = 0.01
"""Per saved tensor: the hooks that pack and unpack it, while a plan has actions."""

HANDOVER_MS = 0.5
"""Per copy to or from the disk tier of a CPU: what its threads cost the kernels, which wait for the core and the interpreter's lock that
such a thread holds. Fitted, with `ONE_CORE`, to the swaps of three examples on two cores; their own time hides behind other ops."""
ONE_CORE = 2.0
"""Times as long as the kernels' own copy, on all cores, takes a thread of the tier."""


def staging_ms(size_bytes: int, device: Device) -> float:
    """What one copy to or from a tier takes of the cores that compute; 0 but on a CPU."""
    if device.kind != "cpu" or device.copy_bytes_per_s <= 0:
        return 0.0
    return HANDOVER_MS + ONE_CORE * size_bytes / device.copy_bytes_per_s * 1000


@dataclass(slots=True)
class _Deltas:
    """What is added to an array: sparse, summed up once."""

    where: list[int] = field(default_factory=list)
    what: list[float] = field(default_factory=list)

    def add(self, where: int, what: float) -> None:
        self.where.append(where)
        self.what.append(what)

    def summed(self, length: int) -> Ints:
        found = np.zeros(length, dtype=np.int64)
        np.add.at(found, np.array(self.where, dtype=np.intp), np.array(self.what, dtype=np.int64))
        return found

    def summed_ms(self, length: int) -> Floats:
        found = np.zeros(length, dtype=np.float64)
        np.add.at(found, np.array(self.where, dtype=np.intp), np.array(self.what, dtype=np.float64))
        return found


@dataclass(slots=True)
class _State:
    """One evaluation."""

    change: _Deltas = field(default_factory=_Deltas)
    """Bytes that appear or vanish before each op, against the plain run."""
    bump: _Deltas = field(default_factory=_Deltas)
    """Bytes that are there during one op only."""
    added_ms: _Deltas = field(default_factory=_Deltas)
    made_bytes: dict[int, int] = field(default_factory=dict)
    """Op -> bytes made before it so far."""
    replay_high: dict[int, int] = field(default_factory=dict)
    """Op -> most bytes above what is live before its replays."""
    encoding: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Op -> bytes that are encoded once it has run, and the most that encoding one of them holds besides."""
    chains: dict[int, Chain] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)
    """Storages that could not be made again and stay."""
    recorded: set[int] = field(default_factory=set)
    pins: list[tuple[int, int, int]] = field(default_factory=list)
    """(op that made what a replay reads, its storage, op until which its record lives)."""
    decoded: dict[int, int] = field(default_factory=dict)
    """Storage that replays read from a codec -> op until which their records hold the encoded form."""
    back_by: dict[int, int] = field(default_factory=dict)
    """Swapped storage -> op before which a replay reads it, ahead of its first consumer."""
    staging_ms: float = 0.0
    """Part of `added_ms`: copies that the compute lane has to make for the disk tier."""


@dataclass(slots=True)
class _Summed:
    """An evaluation but for the copies: what swaps take off comes on top."""

    state: _State
    live: Ints
    over: Ints
    """High above live."""
    times: Floats
    added_ms: float
    beside: tuple[Ints, Ints]
    """(ops, bytes that the replays before them, or encoding after them, reach above what is live when they start)."""


@dataclass(slots=True)
class _Swaps:
    """What the copies add to it."""

    change: _Deltas = field(default_factory=_Deltas)
    away_from: dict[int, int] = field(default_factory=dict)
    """Swapped storage -> first op before which its copy out is done."""
    intervals: list[Interval] = field(default_factory=list)
    stall_ms: float = 0.0


class Simulator:
    """Evaluates decisions on one trace. `device` gives the links."""

    def __init__(self, view: TraceView, device: Device | None = None) -> None:
        self.view = view
        self.device = device or view.trace.device
        self._watching_ms = MODE_MS * int((view.phase == 0).sum()) + HOOK_MS * len(view.trace.slots.node)
        self._watching_backward_ms = MODE_MS * int((view.phase == 1).sum())
        """Who else reads weights that are away is seen op by op."""
        self._last: tuple[list[tuple[int, Decision | None]], _Summed] | None = None

    def run(
        self,
        decisions: Mapping[int, Decision],
        *,
        lanes: bool = False,
        still_wanted: Callable[[], None] = lambda: None,
    ) -> Timeline:
        """The timeline of a step under `decisions` (storage -> decision). `still_wanted` is called before each replay is looked for, and
        may raise: where thousands need one another, that takes a minute."""
        summed = self._evaluate(decisions, still_wanted)
        watching_ms = self._watching_ms if decisions else 0.0
        if any(self.view.saved[storage].is_weight for storage in decisions):
            watching_ms += self._watching_backward_ms
        view, state, added_ms = self.view, summed.state, summed.added_ms
        live = summed.live
        swaps = _Swaps()
        self._swap(swaps, decisions, summed, lanes)
        if swaps.change.where:
            live = live + np.cumsum(swaps.change.summed(view.n + 2))[: view.n]
        high = live + summed.over
        ops, above = summed.beside
        high[ops] = np.maximum(high[ops], live[ops] + above)
        peak_op = int(high.argmax()) if view.n else 0
        return Timeline(
            live_bytes=live,
            high_bytes=high,
            start_ms=summed.times,
            peak_bytes=int(high[peak_op]) if view.n else view.trace.base_bytes,
            peak_op=peak_op,
            step_ms=view.trace.step_ms + added_ms + swaps.stall_ms + watching_ms,
            replay_ms=added_ms - state.staging_ms,
            stall_ms=swaps.stall_ms + state.staging_ms,
            lanes=(*self._replay_lanes(state, summed.times), *swaps.intervals) if lanes else (),
        )

    def chains(self, decisions: Mapping[int, Decision]) -> tuple[dict[int, Chain], list[int]]:
        """Replays by storage that asks for them first, and the storages that must be kept after all."""
        state = self._evaluate(decisions).state
        return dict(state.chains), list(state.kept)

    def away_from(self, decisions: Mapping[int, Decision]) -> dict[int, int]:
        """For each swapped storage that leaves the device, the first op before which it has left."""
        swaps = _Swaps()
        self._swap(swaps, decisions, self._evaluate(decisions), lanes=False)
        return swaps.away_from

    def back_by(self, decisions: Mapping[int, Decision]) -> dict[int, int]:
        """For each swapped storage that a replay reads ahead of its first consumer, the op before which it does."""
        return self._evaluate(decisions).state.back_by

    # --- recompute and compress

    @cached_property
    def _replays(self) -> Replays:
        return Replays(self.view)

    def _evaluate(
        self, decisions: Mapping[int, Decision], still_wanted: Callable[[], None] = lambda: None
    ) -> _Summed:
        """All but the copies; the last one is remembered, since placing prefetches asks for it several times."""
        key = [(s, None if d.kind == "swap" else d) for s, d in decisions.items()]
        if self._last is None or self._last[0] != key:
            self._last = key, self._summed(self._decided(decisions, still_wanted))
        return self._last[1]

    def _decided(self, decisions: Mapping[int, Decision], still_wanted: Callable[[], None]) -> _State:
        state = _State()
        asked: list[Saved] = []
        for storage, decision in decisions.items():
            saved = self.view.saved[storage]
            if decision.kind == "recompute":
                asked.append(saved)
            elif decision.kind != "swap":
                self._compress(state, saved, decision)
        if asked:
            asked.sort(key=lambda saved: (saved.first_use, saved.order))
            self._recompute(state, asked, self._replays.standing(decisions), still_wanted)
            self._pin(state)
            self._hold_encoded(state, decisions)
        for storage, decision in decisions.items():
            if decision.kind == "swap":
                self._stage(state, self.view.saved[storage])
        return state

    def _summed(self, state: _State) -> _Summed:
        view, n = self.view, self.view.n
        added = state.added_ms.summed_ms(n + 1)
        beside = {op: most - state.made_bytes[op] for op, most in state.replay_high.items()}
        for op, (encoded, transient) in state.encoding.items():
            outputs = int(view.extra[op] - view.workspace[op])
            beside[op] = max(beside.get(op, 0), outputs + encoded + transient)
        return _Summed(
            state=state,
            live=view.live + np.cumsum(state.change.summed(n + 2))[:n],
            over=view.extra + state.bump.summed(n + 1)[:n],
            times=view.start_ms + np.cumsum(added)[:n],
            added_ms=float(added.sum()),
            beside=(np.array(list(beside), dtype=np.int64), np.array(list(beside.values()), dtype=np.int64)),
        )

    def _compress(self, state: _State, saved: Saved, decision: Decision) -> None:
        after, until = saved.gone_after + 1, saved.release + 1
        if after >= until:
            return
        state.change.add(after, -saved.size_bytes)
        state.change.add(until, saved.size_bytes - decision.encoded_bytes)
        state.change.add(min(saved.acted_op + 1, after), decision.encoded_bytes)
        state.added_ms.add(min(saved.acted_op + 1, self.view.n), decision.encode_ms)
        if saved.acted_op < self.view.n:
            encoded, transient = state.encoding.get(saved.acted_op, (0, 0))
            state.encoding[saved.acted_op] = (
                encoded + decision.encoded_bytes,
                max(transient, decision.transient_bytes),
            )
        for slot in saved.slots:
            for use in self.view.trace.slots.unpacks.row(slot):
                state.bump.add(use, decision.decoded_bytes)
                state.added_ms.add(use, decision.decode_ms)

    def staging_ms(self, saved: Saved) -> float:
        """What swapping `saved` takes of the compute lane: on a CPU the cores that compute copy to and from the tier's buffers."""
        return 2 * staging_ms(saved.size_bytes, self.device)

    def _stage(self, state: _State, saved: Saved) -> None:
        half_ms = self.staging_ms(saved) / 2
        for op in (saved.packed_op + 1, state.back_by.get(saved.storage, saved.first_use)):
            state.added_ms.add(min(op, self.view.n), half_ms)
            state.staging_ms += half_ms

    def _recompute(
        self, state: _State, asked: list[Saved], standing: int, still_wanted: Callable[[], None]
    ) -> None:
        """Makes each of `asked`, in the order in which backward wants them."""
        replays, made = self._replays, set[int]()
        dying: list[tuple[int, int]] = []
        for saved in asked:
            still_wanted()
            use = saved.first_use
            while dying and dying[0][0] < use:
                standing &= ~replays.there(heappop(dying)[1])
            if saved.gone_after + 1 >= use:
                state.kept.append(saved.storage)
                standing &= ~replays.kept(saved.storage)
            elif saved.storage in made:
                continue
            elif use >= self.view.n:
                state.change.add(saved.gone_after + 1, -saved.size_bytes)
                state.change.add(saved.release + 1, saved.size_bytes)
            elif (replay := replays.replay(saved, standing)) is None:
                state.kept.append(saved.storage)
                standing &= ~replays.kept(saved.storage)
            else:
                self._replay(state, replay, saved)
                standing |= replay.made
                for stays in replay.stays:
                    made.add(stays.storage)
                    heappush(dying, (stays.release, stays.storage))

    def _replay(self, state: _State, replay: Replay, target: Saved) -> None:
        use = target.first_use
        already = state.made_bytes.get(use, 0)
        state.made_bytes[use] = already + replay.stays_bytes
        state.replay_high[use] = max(state.replay_high.get(use, 0), already + replay.most_bytes)
        state.chains[target.storage] = replay.chain
        state.added_ms.add(use, replay.took_ms)
        state.change.where += replay.where
        state.change.what += replay.change
        for op in replay.random:
            if op not in state.recorded:
                state.change.add(op + 1, self.view.record_bytes(op))
                state.change.add(target.release + 1, -self.view.record_bytes(op))
        state.recorded.update(replay.chain.ops)
        state.pins += replay.pins
        for storage in replay.brought:
            if use < self.view.saved[storage].first_use:
                state.back_by.setdefault(storage, use)
        for storage in replay.decoded:
            state.decoded[storage] = max(target.release, state.decoded.get(storage, 0))

    def _pin(self, state: _State) -> None:
        """A source whose own op is not recorded is held by the records that read it, once for all of them."""
        view = self.view
        held: dict[int, int] = {}
        for producer, storage, until in state.pins:
            if producer not in state.recorded:
                held[storage] = max(until, held.get(storage, until))
        for storage, until in held.items():
            state.change.add(int(view.death[storage]) + 1, int(view.size[storage]))
            state.change.add(until + 1, -int(view.size[storage]))

    def _hold_encoded(self, state: _State, decisions: Mapping[int, Decision]) -> None:
        """Records hold the encoded form of a source beyond its own last reader."""
        for storage, until in state.decoded.items():
            release, held = self.view.saved[storage].release, decisions[storage].encoded_bytes
            if until > release:
                state.change.add(release + 1, held)
                state.change.add(until + 1, -held)

    # --- swaps

    def _swap(self, swaps: _Swaps, decisions: Mapping[int, Decision], summed: _Summed, lanes: bool) -> None:
        """Copies out in the order of packing, on one lane, then copies in by trigger, on another."""
        swapped = [(self.view.saved[s], d) for s, d in decisions.items() if d.kind == "swap"]
        if not swapped:
            return
        times, last = summed.times.tolist(), self.view.n - 1
        back_by = summed.state.back_by
        out_end: dict[int, float] = {}
        lane = 0.0
        for saved, decision in sorted(swapped, key=lambda pair: pair[0].packed_op):
            begin = max(lane, times[min(saved.packed_op + 1, last)])
            lane = out_end[saved.storage] = begin + self.copy_ms(saved.size_bytes, decision, out=True)
            if lanes:
                swaps.intervals.append(self._interval("swap_out", saved, begin, lane))
        lane = 0.0
        triggered = [
            (_trigger(use, decision), use, saved, decision)
            for saved, decision in swapped
            for use in (back_by.get(saved.storage, saved.first_use),)
        ]
        for trigger, use, saved, decision in sorted(triggered, key=lambda row: row[0]):
            end_ms = out_end[saved.storage]
            self._leave(swaps, saved, trigger, bisect_left(times, end_ms))
            if use > last:
                continue
            begin = max(lane, times[trigger] + swaps.stall_ms, end_ms)
            lane = begin + self.copy_ms(saved.size_bytes, decision, out=False)
            swaps.stall_ms += max(0.0, lane - (times[use] + swaps.stall_ms))
            if lanes:
                swaps.intervals.append(self._interval("swap_in", saved, begin, lane))

    def _leave(self, swaps: _Swaps, saved: Saved, trigger: int, copied: int) -> None:
        """The bytes go once they are `copied` and nobody else holds them, if that is before they come back."""
        gone = max(saved.gone_after + 1, copied)
        if gone < min(trigger, self.view.n):
            swaps.away_from[saved.storage] = gone
            swaps.change.add(gone, -saved.size_bytes)
            swaps.change.add(min(trigger, saved.release + 1), saved.size_bytes)

    def _interval(self, lane: str, saved: Saved, begin: float, end: float) -> Interval:
        return Interval(lane, self.view.trace.storage_label(saved.storage), begin, end, saved.size_bytes)

    def copy_ms(self, size_bytes: int, decision: Decision, *, out: bool) -> float:
        """Time of one copy on its lane; infinite where the device has no such link."""
        out_rate, in_rate = self.device.rates_of(decision.tier)
        rate = out_rate if out else in_rate
        return size_bytes / rate * 1000 if rate > 0 else float("inf")

    def _replay_lanes(self, state: _State, times: Floats) -> list[Interval]:
        lanes = []
        for storage, chain in state.chains.items():
            saved = self.view.saved[storage]
            end = float(times[saved.first_use])
            took = float(sum(self.view.op_ms[op] for op in chain.ops))
            label = self.view.trace.storage_label(storage)
            lanes.append(Interval("compute", f"replay {label}", end - took, end, saved.size_bytes))
        return lanes


def _trigger(use: int, decision: Decision) -> int:
    return min(decision.prefetch_op if decision.prefetch_op >= 0 else use, use)
