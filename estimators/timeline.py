"""The judge: (trace, decisions, device) -> Timeline. Every predicted number of memopt comes from here.

It does what the enforcer does: a dropped storage is gone once nobody but autograd holds it; it comes back when the first
consumer asks, through replays that hold their inputs and outputs like the real ones, and stays until its last consumer is
served (made on the way to another, only if it is not to be made `again`); records pin their sources; encoded forms, decode buffers and copies in flight count. Lanes: compute, swap-out, swap-in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from memopt.device import Device
from memopt.estimators.chains import Chain, find_chain, is_intact
from memopt.estimators.decision import Decision
from memopt.estimators.trace_view import Floats, Ints, Saved, TraceView
from memopt.timeline import Interval, Timeline

MODE_MS = 0.005
"""Per forward op: what watching it costs while a plan has actions."""
HOOK_MS = 0.01
"""Per saved tensor: the hooks that pack and unpack it, while a plan has actions."""
REPLAY_MS = 0.09
"""Per replayed op, on top of the op itself: remembering it in forward and calling it again."""


@dataclass(slots=True)
class _State:
    """One evaluation."""

    change: Ints
    """Bytes that appear or vanish before each op, against the plain run."""
    bump: Ints
    """Bytes that are there during one op only."""
    made: dict[int, int] = field(default_factory=dict)
    """Recomputed storage -> op before which it was made again."""
    made_bytes: dict[int, int] = field(default_factory=dict)
    """Op -> bytes made before it so far."""
    replay_high: list[tuple[int, int]] = field(default_factory=list)
    """(op, bytes above what is live before its replays)."""
    added_ms: Floats = field(default_factory=lambda: np.zeros(0))
    chains: dict[int, Chain] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)
    """Storages that could not be made again and stay."""
    recorded: set[int] = field(default_factory=set)
    sources: list[tuple[int, int]] = field(default_factory=list)
    """(value that a replay reads, op until which its record lives)."""
    away_from: dict[int, int] = field(default_factory=dict)
    """Swapped storage -> first op before which its copy out is done."""
    staging_ms: float = 0.0
    """Part of `added_ms`: copies that the compute lane has to make for the disk tier."""


class Simulator:
    """Evaluates decisions on one trace. `device` gives the links."""

    def __init__(self, view: TraceView, device: Device | None = None) -> None:
        self.view = view
        self.device = device or view.trace.device
        self._watching_ms = MODE_MS * int((view.phase == 0).sum()) + HOOK_MS * len(view.trace.slots.node)

    def run(self, decisions: Mapping[int, Decision], *, lanes: bool = False) -> Timeline:
        """The timeline of a step under `decisions` (storage -> decision)."""
        state = self._evaluate(decisions)
        return self._finish(state, decisions, lanes)

    def chains(self, decisions: Mapping[int, Decision]) -> tuple[dict[int, Chain], list[int]]:
        """Replays by storage that asks for them first, and the storages that must be kept after all."""
        state = self._evaluate(decisions)
        return state.chains, state.kept

    def away_from(self, decisions: Mapping[int, Decision]) -> dict[int, int]:
        """For each swapped storage that leaves the device, the first op before which it has left."""
        state = self._evaluate(decisions)
        self._finish(state, decisions, lanes=False)
        return state.away_from

    # --- recompute and compress

    def _evaluate(self, decisions: Mapping[int, Decision]) -> _State:
        view = self.view
        state = _State(np.zeros(view.n + 2, dtype=np.int64), np.zeros(view.n + 1, dtype=np.int64))
        state.added_ms = np.zeros(view.n + 1)
        asked: list[Saved] = []
        for storage, decision in decisions.items():
            saved = view.saved[storage]
            if decision.kind == "recompute":
                asked.append(saved)
            elif decision.kind in ("compress", "drop"):
                self._compress(state, saved, decision)
            elif decision.kind == "swap":
                self._stage(state, saved)
        asked.sort(key=lambda saved: (saved.first_use, saved.order))
        for saved in asked:
            self._recompute(state, saved, decisions)
        self._pin(state)
        return state

    def _compress(self, state: _State, saved: Saved, decision: Decision) -> None:
        after = saved.gone_after + 1
        if after > saved.release:
            return
        state.change[after] -= saved.size_bytes
        state.change[saved.release + 1] += saved.size_bytes
        packed = min(saved.packed_op + 1, after)
        state.change[packed] += decision.encoded_bytes
        state.change[saved.release + 1] -= decision.encoded_bytes
        state.bump[min(packed, self.view.n)] += decision.transient_bytes
        state.added_ms[min(packed, self.view.n)] += decision.encode_ms
        for slot in saved.slots:
            for use in self.view.trace.slots.unpacks.row(slot):
                state.bump[use] += decision.decoded_bytes
                state.added_ms[use] += decision.decode_ms

    def staging_ms(self, saved: Saved) -> float:
        """What swapping `saved` takes of the compute lane: on a CPU the cores that compute copy to and from the tier's buffers."""
        rate = self.device.copy_bytes_per_s
        return 2 * saved.size_bytes / rate * 1000 if self.device.kind == "cpu" and rate > 0 else 0.0

    def _stage(self, state: _State, saved: Saved) -> None:
        half_ms = self.staging_ms(saved) / 2
        for op in (saved.packed_op + 1, saved.first_use):
            state.added_ms[min(op, self.view.n)] += half_ms
            state.staging_ms += half_ms

    def _recompute(self, state: _State, saved: Saved, decisions: Mapping[int, Decision]) -> None:
        gone = saved.gone_after + 1
        if gone >= saved.first_use:
            state.kept.append(saved.storage)
            return
        if saved.storage in state.made:
            return
        if saved.first_use >= self.view.n:
            self._away(state, saved, saved.release + 1)
            return
        use = saved.first_use
        chain = find_chain(
            self.view,
            [saved.value],
            lambda value: self._is_there(state, value, use, decisions),
            lambda op: self.view.replayable[op],
        )
        if chain is None or saved.value < 0:
            state.kept.append(saved.storage)
            return
        state.chains[saved.storage] = chain
        self._replay(state, chain, saved, decisions)

    def _is_there(self, state: _State, value: int, use: int, decisions: Mapping[int, Decision]) -> bool:
        view = self.view
        storage = view.value_storage[value]
        decision = decisions.get(storage)
        if decision is None or storage in state.kept:
            return is_intact(view, value, use)
        saved = view.saved[storage]
        if use <= saved.gone_after:
            return is_intact(view, value, use)
        made = state.made.get(storage)
        return made is not None and made <= use <= saved.release and saved.value == value

    def _away(self, state: _State, saved: Saved, until: int) -> None:
        state.change[saved.gone_after + 1] -= saved.size_bytes
        state.change[until] += saved.size_bytes

    def _replay(self, state: _State, chain: Chain, target: Saved, decisions: Mapping[int, Decision]) -> None:
        view, use = self.view, target.first_use
        already = state.made_bytes.get(use, 0)
        last_read = {view.value_storage[value]: op for op in chain.ops for value in view.reads[op]}
        held: dict[int, int] = {}
        stays: list[Saved] = []
        total = most = 0
        for op in chain.ops:
            most = max(most, total + int(view.extra[op]))
            for value in view.writes[op]:
                storage = view.value_storage[value]
                waiting = self._waits(state, storage, value, target.storage, use, decisions)
                if waiting is not None:
                    stays.append(waiting)
                    state.made[storage] = use
                if storage not in held and (waiting is not None or last_read.get(storage, -1) != -1):
                    held[storage] = int(view.size[storage])
                    total += held[storage]
            for value in view.reads[op]:
                storage = view.value_storage[value]
                if last_read[storage] == op and storage in held and storage not in state.made:
                    total -= held.pop(storage)
        state.replay_high.append((use, already + most))
        for saved in stays:
            self._away(state, saved, use)
        state.made_bytes[use] = already + sum(saved.size_bytes for saved in stays)
        state.added_ms[use] += sum(view.op_ms[op] + REPLAY_MS for op in chain.ops)
        self._record(state, chain, target)

    def _waits(
        self,
        state: _State,
        storage: int,
        value: int,
        target: int,
        use: int,
        decisions: Mapping[int, Decision],
    ) -> Saved | None:
        """The recomputed storage that this value is, if somebody will still ask for it."""
        decision = decisions.get(storage)
        if decision is None or decision.kind != "recompute" or storage in state.made or storage in state.kept:
            return None
        if decision.again and storage != target:
            return None
        saved = self.view.saved[storage]
        return (
            saved
            if saved.value == value and use <= saved.last_use < self.view.n and use > saved.gone_after
            else None
        )

    def _record(self, state: _State, chain: Chain, target: Saved) -> None:
        """Records live until the target's consumers let go of them, and hold sources and generator states."""
        until = target.release
        state.sources.extend((value, until) for value in chain.sources)
        for op in chain.ops:
            if op not in state.recorded and self.view.random[op]:
                state.change[op + 1] += self.view.record_bytes(op)
                state.change[until + 1] -= self.view.record_bytes(op)
        state.recorded.update(chain.ops)

    def _pin(self, state: _State) -> None:
        """A source whose own op is not recorded is held by the records that read it, once for all of them."""
        view = self.view
        held: dict[int, int] = {}
        for value, until in state.sources:
            if view.value_producer[value] not in state.recorded:
                storage = view.value_storage[value]
                held[storage] = max(until, held.get(storage, int(view.death[storage])))
        for storage, until in held.items():
            state.change[int(view.death[storage]) + 1] += int(view.size[storage])
            state.change[until + 1] -= int(view.size[storage])

    # --- swaps, and the sum of it all

    def _finish(self, state: _State, decisions: Mapping[int, Decision], lanes: bool) -> Timeline:
        view = self.view
        watching_ms = self._watching_ms if decisions else 0.0
        times = view.start_ms + np.cumsum(state.added_ms)[: view.n]
        intervals, stall_ms = self._swap(state, decisions, times)
        live = view.live + np.cumsum(state.change)[: view.n]
        high = live + view.extra + state.bump[: view.n]
        for op, most in state.replay_high:
            before = int(live[op]) - state.made_bytes.get(op, 0)
            high[op] = max(int(high[op]), before + most)
        peak_op = int(high.argmax()) if view.n else 0
        added_ms = float(state.added_ms.sum())
        return Timeline(
            live_bytes=live,
            high_bytes=high,
            start_ms=times,
            peak_bytes=int(high[peak_op]) if view.n else view.trace.base_bytes,
            peak_op=peak_op,
            step_ms=view.trace.step_ms + added_ms + stall_ms + watching_ms,
            replay_ms=added_ms - state.staging_ms,
            stall_ms=stall_ms + state.staging_ms,
            lanes=(*self._replay_lanes(state, times), *intervals) if lanes else (),
        )

    def _swap(
        self, state: _State, decisions: Mapping[int, Decision], times: Floats
    ) -> tuple[list[Interval], float]:
        swaps = [(self.view.saved[s], d) for s, d in decisions.items() if d.kind == "swap"]
        if not swaps:
            return [], 0.0
        intervals: list[Interval] = []
        out_end: dict[int, float] = {}
        lane = 0.0
        for saved, decision in sorted(swaps, key=lambda pair: pair[0].packed_op):
            begin = max(lane, float(times[min(saved.packed_op + 1, self.view.n - 1)]))
            lane = out_end[saved.storage] = begin + self.copy_ms(saved.size_bytes, decision, out=True)
            intervals.append(
                Interval(
                    "swap_out", self.view.trace.storage_label(saved.storage), begin, lane, saved.size_bytes
                )
            )
        lane = shift = 0.0
        for saved, decision in sorted(swaps, key=lambda pair: _trigger(*pair)):
            lane, shift = self._swap_in(
                state, saved, decision, times, out_end[saved.storage], lane, shift, intervals
            )
        return intervals, shift

    def _swap_in(
        self,
        state: _State,
        saved: Saved,
        decision: Decision,
        times: Floats,
        out_end: float,
        lane: float,
        shift: float,
        intervals: list[Interval],
    ) -> tuple[float, float]:
        trigger, use, n = _trigger(saved, decision), saved.first_use, self.view.n
        gone = max(saved.gone_after + 1, int(np.searchsorted(times, out_end)))
        if gone < min(trigger, n):
            state.away_from[saved.storage] = gone
            state.change[gone] -= saved.size_bytes
            state.change[min(trigger, saved.release + 1)] += saved.size_bytes
        if use >= n:
            return lane, shift
        begin = max(lane, float(times[trigger]) + shift, out_end)
        end = begin + self.copy_ms(saved.size_bytes, decision, out=False)
        intervals.append(
            Interval("swap_in", self.view.trace.storage_label(saved.storage), begin, end, saved.size_bytes)
        )
        return end, shift + max(0.0, end - (float(times[use]) + shift))

    def copy_ms(self, size_bytes: int, decision: Decision, *, out: bool) -> float:
        """Time of one copy on its lane; infinite where the device has no such link."""
        device = self.device
        if decision.tier == "host":
            rate = device.host_out_bytes_per_s if out else device.host_in_bytes_per_s
        else:
            rate = device.disk_out_bytes_per_s if out else device.disk_in_bytes_per_s
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


def _trigger(saved: Saved, decision: Decision) -> int:
    return min(decision.prefetch_op if decision.prefetch_op >= 0 else saved.first_use, saved.first_use)
