"""What one replay does: which ops run again, what they hold meanwhile, what stays, what their records pin.

The outcome depends on few storages only: those that the walk met and those that its ops write. It is remembered together with
what was decided about these, as bits, and taken again while they stand the same: a search that changes one decision after the
other walks few chains anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memopt.estimators.simulator.chains import Chain, find_chain, is_intact
from memopt.estimators.simulator.decision import Decision
from memopt.estimators.simulator.trace_view import Saved, TraceView

REPLAY_MS = 0.09
"""Per replayed op, on top of the op itself: remembering it in forward and calling it again."""
_AWAY, _ASKED, _AGAIN, _MADE, _THERE, _CODED, _COPIED = (1 << bit for bit in range(7))
"""Of a storage: it leaves the device; it is to be made again; `Decision.again`; it was made; that one is still there; a codec
holds its values; a tier does."""
_WIDTH = 7
_ALL = (1 << _WIDTH) - 1
_REMEMBERED = 16
"""Outcomes for each storage."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The ops that run when a storage is asked for, and what follows."""

    chain: Chain
    most_bytes: int
    """Most that it holds above what is live before it."""
    stays: tuple[Saved, ...]
    """What it makes that waits for its consumers."""
    stays_bytes: int
    where: tuple[int, ...]
    change: tuple[int, ...]
    """Bytes that appear or vanish before the ops `where`, since what stays is away until then."""
    took_ms: float
    random: tuple[int, ...]
    """Ops whose generator states are recorded."""
    pins: tuple[tuple[int, int, int], ...]
    """(op that made a source, its storage, op until which the records hold it)."""
    decoded: tuple[int, ...]
    """Storages that it reads from what a codec holds."""
    brought: tuple[int, ...]
    """Storages that it reads from a tier, and that stay for their own readers."""
    made: int
    """The bits that it sets."""


class Replays:
    """Replays on one trace. The standing of all saved storages is one integer, with `_WIDTH` bits for each."""

    def __init__(self, view: TraceView) -> None:
        self.view = view
        self._shift = {storage: _WIDTH * index for index, storage in enumerate(view.saved)}
        self._known: dict[int, list[tuple[int, int, Replay | None]]] = {storage: [] for storage in view.saved}
        self._size: list[int] = view.size.tolist()
        self._death: list[int] = view.death.tolist()
        self._op_ms = [float(ms) + REPLAY_MS for ms in view.op_ms]
        self._asked_until: dict[int, tuple[int, int]] = {}
        self._codecs: dict[int, Decision] = {}
        """Storage -> how a codec holds its values."""

    def standing(self, decisions: Mapping[int, Decision]) -> int:
        """What is decided, before anything is made again."""
        bits, shift = 0, self._shift
        for storage, decision in decisions.items():
            flags = _AWAY
            if decision.kind == "recompute":
                flags = _AWAY | _ASKED | _AGAIN if decision.again else _AWAY | _ASKED
            elif decision.kind == "swap":
                flags = _AWAY | _COPIED
            elif decision.is_source:
                flags = _AWAY | _CODED
                if self._codecs.setdefault(storage, decision) != decision:
                    self._codecs[storage] = decision
                    self._known = {storage: [] for storage in self._known}
            bits |= flags << shift[storage]
        return bits

    def kept(self, storage: int) -> int:
        """The bits to clear when `storage` stays after all."""
        return _ALL << self._shift[storage]

    def there(self, storage: int) -> int:
        """The bit to clear when `storage` was made again, and has died."""
        return _THERE << self._shift[storage]

    def replay(self, target: Saved, bits: int) -> Replay | None:
        """What happens when `target` is asked for; None if it cannot be made."""
        known = self._known[target.storage]
        for at, (mask, stood, replay) in enumerate(known):
            if bits & mask == stood:
                if at:
                    known.insert(0, known.pop(at))
                return replay
        mask, replay = self._find(target, bits)
        known.insert(0, (mask, bits & mask, replay))
        del known[_REMEMBERED:]
        return replay

    def _find(self, target: Saved, bits: int) -> tuple[int, Replay | None]:
        """The replay, and the bits that it depends on."""
        view, use, shift = self.view, target.first_use, self._shift
        met: set[int] = set()

        def is_there(value: int) -> bool:
            storage = view.value_storage[value]
            saved = view.saved.get(storage)
            if saved is None or use <= saved.gone_after:
                return is_intact(view, value, use)
            met.add(storage)
            stands = bits >> shift[storage]
            if not stands & _AWAY:
                return is_intact(view, value, use)
            if stands & _CODED:
                return saved.value == value
            if stands & _COPIED:
                return self._may_bring(saved, value, target)
            return bool(stands & _THERE) and saved.value == value

        chain = find_chain(view, [target.value], is_there, view.replayable.__getitem__)
        mask = 0
        for storage in met:
            mask |= (_AWAY | _THERE | _CODED | _COPIED) << shift[storage]
        if chain is None:
            return mask, None
        for op in chain.ops:
            for value in view.writes[op]:
                storage = view.value_storage[value]
                if storage in shift:
                    mask |= (_ASKED | _AGAIN | _MADE) << shift[storage]
        return mask, self._run(chain, target, bits)

    def _may_bring(self, saved: Saved, value: int, target: Saved) -> bool:
        """Does a tier hold `value`, and will somebody else still ask for it? Afterwards the enforcer has let go of what came back."""
        if saved.value != value or not is_intact(self.view, value, target.first_use):
            return False
        if saved.is_weight:
            return True
        if saved.storage not in self._asked_until:
            rows = [self.view.trace.slots.unpacks.row(slot) for slot in saved.slots]
            last = max(row[0] for row in rows if row) if any(rows) else -1
            self._asked_until[saved.storage] = last, saved.order if last == saved.first_use else -1
        return (target.first_use, target.order) < self._asked_until[saved.storage]

    def _run(self, chain: Chain, target: Saved, bits: int) -> Replay:
        view, use, until = self.view, target.first_use, target.release
        coded = {
            value: self._codecs[view.value_storage[value]]
            for value in chain.sources
            if self._stands(view.value_storage[value], bits) & _CODED
        }
        most, stays = self._hold(chain, target, bits, coded)
        made = 0
        for saved in stays:
            made |= (_MADE | _THERE) << self._shift[saved.storage]
        brought = {
            value for value in chain.sources if self._stands(view.value_storage[value], bits) & _COPIED
        }
        sources = [
            (view.value_producer[v], view.value_storage[v])
            for v in chain.sources
            if v not in coded and v not in brought
        ]
        return Replay(
            chain=chain,
            most_bytes=most,
            stays=tuple(stays),
            stays_bytes=sum(saved.size_bytes for saved in stays),
            where=tuple(op for saved in stays for op in (saved.gone_after + 1, use)),
            change=tuple(size for saved in stays for size in (-saved.size_bytes, saved.size_bytes)),
            took_ms=sum(self._op_ms[op] for op in chain.ops)
            + sum(coded[value].decode_ms for op in chain.ops for value in view.reads[op] if value in coded),
            random=tuple(op for op in chain.ops if view.random[op]),
            pins=tuple((op, storage, until) for op, storage in sources if self._death[storage] < until),
            decoded=tuple(view.value_storage[value] for value in coded),
            brought=tuple(view.value_storage[value] for value in brought),
            made=made,
        )

    def _hold(
        self, chain: Chain, target: Saved, bits: int, coded: Mapping[int, Decision]
    ) -> tuple[int, list[Saved]]:
        """(most that the replay holds, what stays when it is over)."""
        view = self.view
        last_read = {view.value_storage[value]: op for op in chain.ops for value in view.reads[op]}
        held: dict[int, int] = {}
        stays: dict[int, Saved] = {}
        total = most = 0
        for op in chain.ops:
            decoded = 0
            for value in view.reads[op]:
                if value in coded:
                    most = max(most, total + decoded + coded[value].decoded_bytes)
                    decoded += self._size[view.value_storage[value]]
            most = max(most, total + decoded + int(view.extra[op]))
            for value in view.writes[op]:
                storage = view.value_storage[value]
                waits = storage not in stays and self._waits(storage, value, target, bits)
                if waits:
                    stays[storage] = view.saved[storage]
                if storage not in held and (waits or storage in last_read):
                    held[storage] = self._size[storage]
                    total += held[storage]
            for value in view.reads[op]:
                storage = view.value_storage[value]
                made = storage in stays or self._stands(storage, bits) & _MADE
                if last_read[storage] == op and storage in held and not made:
                    total -= held.pop(storage)
        return most, list(stays.values())

    def _stands(self, storage: int, bits: int) -> int:
        shift = self._shift.get(storage)
        return 0 if shift is None else bits >> shift & _ALL

    def _waits(self, storage: int, value: int, target: Saved, bits: int) -> bool:
        """Is this value a storage to be made again that somebody will still ask for?"""
        stands = self._stands(storage, bits)
        if not stands & _ASKED or stands & _MADE or (stands & _AGAIN and storage != target.storage):
            return False
        saved, use = self.view.saved[storage], target.first_use
        return saved.value == value and saved.gone_after < use <= saved.last_use < self.view.n
