"""Copies to and from the tiers: out in the order of packing, on one lane, then in by trigger, on another.

Computed for all swaps of a plan at once, since each copy waits for those before it. On a CPU backward begins when the copies out are done that
have begun by then, as the enforcer has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from memopt.device import Device
from memopt.estimators.simulator.decision import Decision
from memopt.estimators.simulator.trace_view import Floats, Ints, Saved, TraceView
from memopt.timeline import Interval
from memopt.trace import PHASES

_NEVER_MS = 1e15
"""When a copy ends that has no link: later than any op, and small enough to be added to."""


@dataclass(frozen=True, slots=True)
class Swaps:
    """What the copies add to an evaluation; one entry for each absence of a swapped storage, in the order of the copies in."""

    storages: Ints
    sizes: Ints
    gone: Ints
    """First op before which the copy out is done and nobody else holds it."""
    back: Ints
    """Op before which the bytes are there again."""
    out_ms: Floats
    """When the copy out ends."""
    in_ms: Floats
    """When the copy in ends; NaN where nobody asks for it."""
    out_took_ms: Floats
    in_took_ms: Floats
    leaves: Ints
    """1 where the copy out is done before the one in begins, else 0: the bytes never go."""
    done: Ints
    """Op after which nobody asks for it any more, of what outlives the iteration; else the op count."""
    left_until: Ints
    """Op until whose end the bytes are away that the iteration before has left; -1 where it leaves none."""
    stall_ms: float

    def change(self, n: int) -> Ints:
        """Bytes on the device before each of `n` ops, against the same without swaps."""
        delta = np.zeros(n + 2, dtype=np.int64)
        moved = self.sizes * self.leaves
        np.subtract.at(delta, np.minimum(self.gone, n + 1), moved)
        np.add.at(delta, self.back, moved)
        np.subtract.at(delta, self.done + 1, moved)
        delta[0] -= moved[self.left_until >= 0].sum()
        np.add.at(delta, self.left_until + 1, np.where(self.left_until >= 0, moved, 0))
        return np.asarray(np.cumsum(delta)[:n], dtype=np.int64)

    def away_from(self) -> dict[int, list[int]]:
        """Swapped storage -> for each of its absences the first op before which it has left, -1 where it does not."""
        found: dict[int, list[int]] = {}
        gone = np.where(self.leaves > 0, self.gone, -1)
        for storage, op in zip(self.storages.tolist(), gone.tolist(), strict=True):
            found.setdefault(storage, []).append(op)
        return found


_NO_INTS, _NO_FLOATS = np.zeros(0, dtype=np.int64), np.zeros(0)
NO_SWAPS = Swaps(
    storages=_NO_INTS,
    sizes=_NO_INTS,
    gone=_NO_INTS,
    back=_NO_INTS,
    out_ms=_NO_FLOATS,
    in_ms=_NO_FLOATS,
    out_took_ms=_NO_FLOATS,
    in_took_ms=_NO_FLOATS,
    leaves=_NO_INTS,
    done=_NO_INTS,
    left_until=_NO_INTS,
    stall_ms=0.0,
)


class SwapLanes:
    """The two lanes of one device."""

    def __init__(self, view: TraceView, device: Device) -> None:
        self.view, self.device = view, device
        saved = list(view.saved.values())
        self._row = {each.storage: row for row, each in enumerate(saved)}
        rows = [
            (
                each.storage,
                each.size_bytes,
                each.packed_op,
                each.gone_after,
                each.first_use,
                each.order,
                each.release,
                _done(view, each),
                view.left_until.get(each.storage, -1),
            )
            for each in saved
        ]
        self._again: dict[int, list[int]] = {}
        """Weight that is away more than once -> the rows of its later absences."""
        for each in saved:
            if each.again:
                self._again[each.storage] = [*range(len(rows), len(rows) + len(each.again))]
                rows += [
                    (
                        each.storage,
                        each.size_bytes,
                        it.gone_after,
                        it.gone_after,
                        it.first_use,
                        -1,
                        each.release,
                        view.n,
                        -1,
                    )
                    for it in each.again
                ]
        self._columns: Ints = np.array(rows, dtype=np.int64).reshape(len(rows), 9)
        self._waits: Ints = np.array(_waiting_ops(view) if device.kind == "cpu" else [], dtype=np.int64)
        """Ops before which the run waits for all copies out."""

    def swap(
        self,
        swapped: Mapping[int, Decision],
        times: Floats,
        back_by: Mapping[int, int],
        back_again_by: Mapping[int, list[int]],
    ) -> Swaps:
        """The copies of what is `swapped` (storage -> decision). `times`: when each op starts, in ms; `back_by`: the op before which a
        replay reads a storage ahead of its first consumer; `back_again_by`: of weights that are away more than once, of later ones."""
        names = [self._row[storage] for storage in swapped]
        decisions = [*swapped.values()]
        prefetches = [each.prefetch_op for each in decisions]
        for each in [storage for storage in swapped if storage in self._again] if self._again else ():
            names += self._again[each]
            decisions += [swapped[each]] * len(self._again[each])
            prefetches += [-1] * len(self._again[each])
        storage, size, packed, gone_after, use, order, release, done, left_until = self._columns[names].T
        if early := [at for at, each in enumerate(swapped) if each in back_by]:
            use = use.copy()
            use[early] = [back_by[each] for each in swapped if each in back_by]
        if again := [at for at in range(len(swapped), len(names)) if int(storage[at]) in back_again_by]:
            use = use.copy()
            for at in again:
                ops = back_again_by[int(storage[at])]
                use[at] = min((op for op in ops if gone_after[at] < op < use[at]), default=use[at])
        on_disk = np.array([each.tier == "disk" for each in decisions])
        prefetch = np.array(prefetches, dtype=np.int64)
        trigger = np.where(prefetch >= 0, np.minimum(prefetch, use), use)
        encoded = np.array([each.encoded_bytes for each in decisions], dtype=np.int64)
        moved = np.where(encoded > 0, encoded, size)
        out_took, in_took = (self._took_ms(moved, on_disk, out=out) for out in (True, False))
        n = self.view.n
        times, out_ms, gone, waited_ms = self._out(times, storage, packed, out_took)
        gone = np.maximum(gone_after + 1, gone)
        first_in = np.lexsort((storage, order, use, trigger))
        in_ms, stall_ms = _copied_in(
            times, trigger[first_in], use[first_in], out_ms[first_in], in_took[first_in]
        )
        back = np.minimum(trigger, release + 1)
        return Swaps(
            storages=storage[first_in],
            sizes=size[first_in],
            gone=gone[first_in],
            back=back[first_in],
            out_ms=out_ms[first_in],
            in_ms=in_ms,
            out_took_ms=out_took[first_in],
            in_took_ms=in_took[first_in],
            leaves=(gone < np.minimum(back, n)).astype(np.int64)[first_in],
            done=done[first_in],
            left_until=left_until[first_in],
            stall_ms=stall_ms + waited_ms,
        )

    def _out(
        self, times: Floats, storage: Ints, packed: Ints, out_took: Floats
    ) -> tuple[Floats, Floats, Ints, float]:
        """(when each op starts, with what it waits; when each copy out ends, and the op before which it has; what is waited for in all)."""
        n = self.view.n
        out_ms = np.empty(len(packed))
        first_out = np.lexsort((storage, packed))
        out_ms[first_out] = _copied_out(times[np.minimum(packed[first_out] + 1, n - 1)], out_took[first_out])
        gone = np.searchsorted(times, out_ms)
        waited_ms = 0.0
        for wait in self._waits.tolist():
            late = (packed < wait) & (gone > wait)
            if late.any():
                more = float(out_ms[late].max() - times[wait])
                gone = np.where(late, wait, gone)
                waited_ms += more
                times = times.copy()
                times[wait:] += more
                after = first_out[packed[first_out] >= wait]
                out_ms[after] = _copied_out(times[np.minimum(packed[after] + 1, n - 1)], out_took[after])
                gone[after] = np.searchsorted(times, out_ms[after])
        return times, out_ms, gone, waited_ms

    def intervals(self, swaps: Swaps) -> list[Interval]:
        """All copies, those out first, each lane in its order."""
        found = []
        for lane, ends, took in (
            ("swap_out", swaps.out_ms, swaps.out_took_ms),
            ("swap_in", swaps.in_ms, swaps.in_took_ms),
        ):
            for row in np.argsort(ends, kind="stable").tolist():
                if np.isnan(ends[row]):
                    continue
                label = self.view.trace.storage_label(int(swaps.storages[row]))
                begin, end = float(ends[row] - took[row]), float(ends[row])
                found.append(Interval(lane, label, begin, end, int(swaps.sizes[row])))
        return found

    def copy_ms(self, size_bytes: int, decision: Decision, *, out: bool) -> float:
        """Time of one copy on its lane; infinite where the device has no such link."""
        out_rate, in_rate = self.device.rates_of(decision.tier)
        rate = out_rate if out else in_rate
        return (decision.encoded_bytes or size_bytes) / rate * 1000 if rate > 0 else float("inf")

    def _took_ms(self, sizes: Ints, on_disk: Ints, *, out: bool) -> Floats:
        rates = [self.device.rates_of(tier)[0 if out else 1] for tier in ("host", "disk")]
        ms_per_byte = [1000 / rate if rate > 0 else _NEVER_MS for rate in rates]
        return np.minimum(sizes * np.where(on_disk, ms_per_byte[1], ms_per_byte[0]), _NEVER_MS)


def _done(view: TraceView, saved: Saved) -> int:
    """As `Swaps.done`: once all have been served, the copy on the device goes."""
    outlives = saved.storage in view.left_until and saved.last_use < view.n
    return view.node_end[saved.last_use] if outlives else view.n


def _waiting_ops(view: TraceView) -> list[int]:
    """The first op of each backward call; none where they cannot be told apart."""
    backward = np.concatenate([[False], view.phase == PHASES.index("backward")])
    begins = np.flatnonzero(backward[1:] & ~backward[:-1]).tolist()
    return begins if len(begins) == view.trace.facts.get("backward_calls", 0) else []


def _copied_out(starts: Floats, took_ms: Floats) -> Floats:
    """When each copy out ends, in their order: none begins before its start, or before the one ahead of it has ended."""
    done = np.cumsum(took_ms)
    waited = np.maximum.accumulate(starts - np.concatenate([[0.0], done[:-1]])) if len(done) else done
    return np.asarray(done + np.maximum(waited, 0.0))


def _copied_in(
    times: Floats, trigger: Ints, use: Ints, out_ms: Floats, took_ms: Floats
) -> tuple[Floats, float]:
    """(when each copy in ends, in their order; how long ops wait for copies in all). What no op of the iteration uses is not copied."""
    ends = np.full(len(use), np.nan)
    asked = np.flatnonzero(use < len(times))
    starts, needs = times[trigger[asked]].tolist(), times[use[asked]].tolist()
    lane = stall = 0.0
    found = []
    for start, need, out, took in zip(
        starts, needs, out_ms[asked].tolist(), took_ms[asked].tolist(), strict=True
    ):
        begin = start + stall
        if begin < lane:
            begin = lane
        if begin < out:
            begin = out
        lane = begin + took
        if lane > need + stall:
            stall += lane - (need + stall)
        found.append(lane)
    ends[asked] = found
    return ends, stall if stall < _NEVER_MS / 2 else float("inf")
