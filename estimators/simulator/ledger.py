"""What replays, codecs and swaps add to the plain run, in bytes and ms by op. Whatever was entered can be taken back.

Most of it is a sum. What is not (the first replay that records an op, the last record that reads a source, the highest of the replays before one op)
is found anew for those that were touched, when the sums are asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from memopt.device import Device
from memopt.estimators.simulator.costs import handling_ms
from memopt.estimators.simulator.decision import Decision
from memopt.estimators.simulator.replays import Replay
from memopt.estimators.simulator.sums import Sums, on_grid
from memopt.estimators.simulator.trace_view import Floats, Ints, Saved, TraceView

T = TypeVar("T")
_NOTHING = np.iinfo(np.int64).min
"""Below whatever an op makes."""
_Entry = tuple[tuple[int, ...], tuple[int, ...]]
"""(ops, bytes that appear or vanish before them)."""


@dataclass(frozen=True, slots=True)
class Summed:
    """An evaluation but for the copies: what swaps take off comes on top."""

    live: Ints
    over: Ints
    """Most bytes above live, in each op and what runs before it."""
    times: Floats
    added_ms: float
    staging_ms: float
    """Part of `added_ms`: copies that the compute lane has to make for the disk tier."""


class Ledger:
    """One plan's entries. Of a decision or a replay that is entered, the same is taken back."""

    def __init__(self, view: TraceView, device: Device) -> None:
        self.view, self.device, n = view, device, view.n
        self._change = Sums(np.zeros(n + 2, dtype=np.int64))
        """Bytes that appear or vanish before each op, against the plain run."""
        self._bump = Sums(np.zeros(n + 1, dtype=np.int64))
        """Bytes that are there during one op only."""
        self._added_ms = Sums(np.zeros(n + 1))
        self._beside: Ints = np.full(n, _NOTHING)
        """Per op: most that the replays before it, or encoding after it, reach above what is live when they start."""
        self._staging_ms = 0.0
        self._replays: dict[int, dict[int, Replay]] = defaultdict(dict)
        """Op -> place -> the replay that runs before it."""
        self._encoded: dict[int, dict[int, Decision]] = defaultdict(dict)
        """Op -> storage that is encoded once it has run -> how."""
        self._recorded: dict[int, int] = defaultdict(int)
        """Op -> replays that run it."""
        self._drawn: dict[int, dict[int, int]] = defaultdict(dict)
        """Op that draws random numbers -> place of a replay that runs it -> op until which that one's record lives."""
        self._pins: dict[int, dict[int, dict[int, int]]] = {}
        """Storage that replays read -> op that made it -> place -> op until which the record lives."""
        self._sources: dict[int, set[int]] = defaultdict(set)
        """Op -> storages made by it that were ever read so."""
        self._decoded: dict[int, dict[int, int]] = defaultdict(dict)
        """Storage that replays read from a codec -> place -> op until which their records hold the encoded form."""
        self._brought: dict[int, dict[int, int]] = defaultdict(dict)
        """Swapped storage -> place -> op before which a replay reads it, ahead of a consumer."""
        self._coded: dict[int, Decision] = {}
        self.swapped: set[int] = set()
        """Storages that are copied to a tier."""
        self._entries: dict[tuple[str, int], _Entry] = {}
        """What was entered for that which is no sum."""
        self._staged: dict[int, tuple[int, ...]] = {}
        self._touched: dict[tuple[str, int], None] = {}
        self._summed: Summed | None = None

    # --- entering and taking back

    def decide(self, saved: Saved, decision: Decision, *, back: bool = False) -> None:
        """Enter a codec or a swap, or take it back."""
        if decision.kind == "recompute":
            return
        if decision.kind == "swap":
            (self.swapped.discard if back else self.swapped.add)(saved.storage)
            self._touched["staged", saved.storage] = None
            return
        if back:
            del self._coded[saved.storage]
        else:
            self._coded[saved.storage] = decision
        self._touched["decoded", saved.storage] = None
        self._encode(saved, decision, back)

    def replay(self, target: Saved, place: int, replay: Replay, *, back: bool = False) -> None:
        """Enter what the replay at `place`, among all in the order in which they are asked for, does, or take it back."""
        use = target.first_use
        sign = -1 if back else 1
        _enter(self._replays[use], place, replay, back)
        self._touched["beside", use] = None
        self._added_ms.add(use, sign * replay.took_ms)
        self._change.extend(replay.where, [sign * size for size in replay.change])
        for op in replay.chain.ops:
            self._recorded[op] += sign
            if self._recorded[op] == (0 if back else 1):
                for storage in self._sources.get(op, ()):
                    self._touched["pinned", storage] = None
        for op, until in replay.random:
            _enter(self._drawn[op], place, until, back)
            self._touched["drawn", op] = None
        for op, storage, held in replay.pins:
            self._sources[op].add(storage)
            _enter(self._pins.setdefault(storage, {}).setdefault(op, {}), place, held, back)
            self._touched["pinned", storage] = None
        for storage in replay.brought:
            saved = self.view.saved[storage]
            if use < saved.first_use or any(each.gone_after < use < each.first_use for each in saved.again):
                _enter(self._brought[storage], place, use, back)
                self._touched["staged", storage] = None
        for storage, until in replay.decoded:
            _enter(self._decoded[storage], place, until, back)
            self._touched["decoded", storage] = None

    def stays_away(self, saved: Saved, *, back: bool = False) -> None:
        """Enter that nobody asks for `saved` before the iteration ends."""
        size = -saved.size_bytes if back else saved.size_bytes
        self._change.extend((saved.gone_after + 1, saved.release + 1), (-size, size))

    def _encode(self, saved: Saved, decision: Decision, back: bool) -> None:
        after, until, acted, n = saved.gone_after + 1, saved.release + 1, saved.acted_op, self.view.n
        if after >= until:
            return
        sign = -1 if back else 1
        self._change.extend(
            (after, until, min(acted + 1, after)),
            (
                -sign * saved.size_bytes,
                sign * (saved.size_bytes - decision.encoded_bytes),
                sign * decision.encoded_bytes,
            ),
        )
        self._added_ms.add(min(acted + 1, n), sign * on_grid(decision.encode_ms))
        if acted < n:
            _enter(self._encoded[acted], saved.storage, decision, back)
            self._touched["beside", acted] = None
        decode_ms = sign * on_grid(decision.decode_ms)
        for slot in saved.slots:
            for use in self.view.trace.slots.unpacks.row(slot):
                for op in range(use, self.view.node_end[use] + 1) if use < n else ():
                    self._bump.add(op, sign * decision.decoded_bytes)
                self._added_ms.add(use, decode_ms)

    # --- summing up

    def back_by(self) -> dict[int, int]:
        """For each swapped storage that a replay reads ahead of its first consumer, the op before which it does."""
        first = ((storage, self._first_brought(storage)) for storage, uses in self._brought.items() if uses)
        return {storage: op for storage, op in first if op < self.view.saved[storage].first_use}

    def back_again_by(self) -> dict[int, list[int]]:
        """For each weight that is away more than once, the ops before which replays read it ahead of its later consumers."""
        saved = self.view.saved
        return {
            storage: [op for op in uses.values() if op >= saved[storage].first_use]
            for storage, uses in self._brought.items()
            if uses and saved[storage].again
        }

    def _first_brought(self, storage: int) -> int:
        """Op before which it has to be back for the first time."""
        return min((*self._brought.get(storage, {}).values(), self.view.saved[storage].first_use))

    def summed(self) -> Summed:
        """All that is entered."""
        self._settle()
        changed = [self._change.take(), self._bump.take(), self._added_ms.take()]
        if self._summed is None or any(changed):
            view, n, added = self.view, self.view.n, self._added_ms.total
            self._summed = Summed(
                live=view.live + np.cumsum(self._change.total)[:n],
                over=np.maximum(view.extra + self._bump.total[:n], self._beside),
                times=view.start_ms + np.cumsum(added)[:n],
                added_ms=float(added.sum()),
                staging_ms=self._staging_ms,
            )
        return self._summed

    def _settle(self) -> None:
        """Find anew what is no sum, where it was touched."""
        if not self._touched:
            return
        find: dict[str, Callable[[int], _Entry]] = {
            "drawn": self._drawn_entry,
            "pinned": self._pinned_entry,
            "decoded": self._decoded_entry,
        }
        for what, which in self._touched:
            if what == "beside":
                self._beside[which] = self._beside_at(which)
            elif what == "staged":
                self._stage(which)
            else:
                before, now = self._entries.get((what, which), ((), ())), find[what](which)
                if before != now:
                    self._change.extend(before[0], [-size for size in before[1]])
                    self._change.extend(*now)
                    self._entries[what, which] = now
        self._touched.clear()
        self._summed = None

    def _beside_at(self, op: int) -> int:
        made = most = 0
        replays = self._replays.get(op)
        for place in sorted(replays or ()):
            assert replays is not None
            most = max(most, made + replays[place].most_bytes)
            made += replays[place].stays_bytes
        beside = most - made if replays else _NOTHING
        if encoded := self._encoded.get(op):
            outputs = int(self.view.extra[op] - self.view.workspace[op])
            held = sum(each.encoded_bytes for each in encoded.values())
            transient = max(each.transient_bytes for each in encoded.values())
            beside = max(beside, 0, outputs + held + transient)
        return beside

    def _drawn_entry(self, op: int) -> _Entry:
        """What `op` draws from, its generator's state, is recorded for all replays that run it: until the last of them has been."""
        if not (until := self._drawn.get(op)):
            return (), ()
        held = self.view.record_bytes(op)
        return (op + 1, max(until.values()) + 1), (held, -held)

    def _pinned_entry(self, storage: int) -> _Entry:
        """A source whose own op is not recorded is held by the records that read it, once for all of them."""
        until = max(
            (
                max(places.values())
                for op, places in self._pins.get(storage, {}).items()
                if places and not self._recorded[op]
            ),
            default=None,
        )
        if until is None:
            return (), ()
        size = int(self.view.size[storage])
        return (int(self.view.death[storage]) + 1, until + 1), (size, -size)

    def _decoded_entry(self, storage: int) -> _Entry:
        """Records hold the encoded form of a source beyond its own last reader."""
        release = self.view.saved[storage].release
        until = max(self._decoded.get(storage, {}).values(), default=0)
        if until <= release or storage not in self._coded:
            return (), ()
        held = self._coded[storage].encoded_bytes
        return (release + 1, until + 1), (held, -held)

    def _stage(self, storage: int) -> None:
        """The copies out and in of a swapped storage take time of the compute lane."""
        saved, n = self.view.saved[storage], self.view.n
        half_ms = handling_ms(saved.size_bytes, self.device, self.view.pace)
        for op in self._staged.pop(storage, ()):
            self._added_ms.add(op, -half_ms)
            self._staging_ms -= half_ms
        if storage in self.swapped:
            back = () if storage in self.view.unasked else (min(self._first_brought(storage), n),)
            self._staged[storage] = min(saved.packed_op + 1, n), *back
            for op in self._staged[storage]:
                self._added_ms.add(op, half_ms)
                self._staging_ms += half_ms


def _enter(places: dict[int, T], place: int, what: T, back: bool) -> None:
    if back:
        places.pop(place, None)
    else:
        places[place] = what
