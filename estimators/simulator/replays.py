"""What one replay does: which ops run again, what they hold meanwhile, what stays, what their records pin.

The outcome depends on few storages only: those that the walk met and those that its ops write. It is remembered together with
how these stood, and taken again while they stand the same: a search that changes one decision after the other walks few chains anew.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from memopt.estimators.simulator.chains import Chain, find_chain, is_intact
from memopt.estimators.simulator.decision import Decision
from memopt.estimators.simulator.sums import on_grid
from memopt.estimators.simulator.trace_view import Saved, TraceView

AWAY, ASKED, AGAIN, MADE, THERE, CODED, COPIED = (1 << bit for bit in range(7))
"""How a storage stands: it leaves the device; it is to be made again; `Decision.again`; it was made; that one is still there; a codec
holds its values (which one: the bits above `_WIDTH`); a tier does."""
_WIDTH = 7
_MET = AWAY | THERE | CODED | COPIED | -1 << _WIDTH
"""What of it decides whether a walk that meets a storage ends there."""
_TOUCHED = ~(AWAY | THERE)
"""What of it decides whether a replay that writes a storage holds it, and how it reads one that nobody has let go of yet."""
_REMEMBERED = 16
"""Outcomes for each storage, and replays for each of its chains. Measured: more of them are hardly ever met again."""

Standing = Callable[[int], int]
"""How a storage stands when the replay begins."""


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
    random: tuple[tuple[int, int], ...]
    """(op whose generator state is recorded, op until which its record lives)."""
    pins: tuple[tuple[int, int, int], ...]
    """(op that made a source, its storage, op until which the records hold it)."""
    decoded: tuple[tuple[int, int], ...]
    """(storage that it reads from what a codec holds, op until which the records hold the encoded form)."""
    brought: tuple[int, ...]
    """Storages that it reads from a tier, and that stay for their own readers."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A replay (None: it cannot be made) and the storages on which it depends."""

    replay: Replay | None
    depends: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Walk:
    """A chain (None: there is none), the storages that were met and how they stood, and what its ops write or read beside these."""

    met: tuple[int, ...]
    stood: tuple[int, ...]
    chain: Chain | None
    touched: tuple[int, ...] = ()
    known: list[tuple[tuple[int, ...], Found]] = field(default_factory=list)
    """How what it touches stood -> the replay."""


class Replays:
    """Replays on one trace."""

    def __init__(self, view: TraceView) -> None:
        self.view = view
        self.asked = sorted(
            [*view.saved.values(), *view.early.values(), *_parts(view)],
            key=lambda saved: (saved.first_use, saved.order, saved.storage),
        )
        """In the order in which backward asks; what may be made early, at that moment too."""
        self.places: dict[int, list[int]] = {}
        """Storage -> the moment at which it is asked for."""
        self.early_places: dict[int, list[int]] = {}
        self.part_places: dict[int, list[int]] = {}
        """Of what may be made again for each that asks: all the moments, in order."""
        for place, saved in enumerate(self.asked):
            places = self.early_places if saved is view.early.get(saved.storage) else self.places
            places = self.part_places if saved.held_until >= 0 else places
            places.setdefault(saved.storage, []).append(place)
        self._walks: dict[tuple[int, int, int], list[_Walk]] = defaultdict(list)
        """By the storage, the op before which it is asked for, and that until which it is held then, where it goes again."""
        self._size: list[int] = view.size.tolist()
        self._extra: list[int] = view.extra.tolist()
        self._death: list[int] = view.death.tolist()
        self._op_ms = [on_grid(ms) for ms in view.replay_ms]
        self._asked_until: dict[int, tuple[int, int]] = {}
        self._codecs: list[Decision] = []
        self._number_of: dict[Decision, int] = {}

    def flags(self, decision: Decision) -> int:
        """How a storage stands of which this is decided, before anything is made again."""
        if decision.kind == "recompute":
            return AWAY | ASKED | AGAIN if decision.again or decision.each else AWAY | ASKED
        if decision.kind == "swap":
            return AWAY | COPIED
        if not decision.is_source:
            return AWAY
        number = self._number_of.setdefault(decision, len(self._codecs))
        if number == len(self._codecs):
            self._codecs.append(decision)
        return AWAY | CODED | number << _WIDTH

    def places_of(self, storage: int, decision: Decision | None) -> list[int]:
        """Where in `asked` it is asked for, as it is decided, in order."""
        if decision is None or not (decision.early or decision.each):
            return self.places[storage]
        others = self.early_places if decision.early else self.part_places
        return others.get(storage, self.places[storage])

    def replay(self, target: Saved, standing: Standing) -> Found:
        """What happens when `target` is asked for."""
        walk = self._walk_of(target, standing)
        stood = tuple([standing(storage) & _TOUCHED for storage in walk.touched])
        for at, (other, found) in enumerate(walk.known):
            if other == stood:
                if at:
                    walk.known.insert(0, walk.known.pop(at))
                return found
        replay = None if walk.chain is None else self._run(walk.chain, target, standing)
        found = Found(replay, tuple(sorted({*walk.met, *walk.touched})))
        walk.known.insert(0, (stood, found))
        del walk.known[_REMEMBERED:]
        return found

    def _walk_of(self, target: Saved, standing: Standing) -> _Walk:
        walks = self._walks[target.storage, target.first_use, target.held_until]
        for at, walk in enumerate(walks):
            for storage, stood in zip(walk.met, walk.stood, strict=True):
                if standing(storage) & _MET != stood:
                    break
            else:
                if at:
                    walks.insert(0, walks.pop(at))
                return walk
        walk = self._find(target, standing)
        walks.insert(0, walk)
        del walks[_REMEMBERED:]
        return walk

    def _find(self, target: Saved, standing: Standing) -> _Walk:
        """The chain to `target`, and what it depends on."""
        use, intact = target.first_use, self.view.intact
        storage_of, saved_of = self.view.value_storage, self.view.saved
        met: dict[int, int] = {}

        def stands_at_use(storage: int) -> int:
            saved = saved_of.get(storage)
            if saved is None or use <= saved.first_gone:
                return 0
            return met[storage] if storage in met else met.setdefault(storage, standing(storage))

        def may_be_copied_back(value: int) -> bool:
            stands = stands_at_use(storage_of[value])
            if stands & COPIED:
                return self._may_bring(saved_of[storage_of[value]], value, target)
            begin, end = intact[value]
            return begin < use <= end and not stands & AWAY

        def is_there(value: int) -> bool:
            storage = storage_of[value]
            saved, stands = saved_of.get(storage), stands_at_use(storage)
            if saved is None or not stands & AWAY:
                begin, end = intact[value]
                return begin < use <= end
            if stands & CODED:
                return saved.value == value
            if stands & COPIED:
                return self._may_bring(saved, value, target)
            return bool(stands & THERE) and saved.value == value

        return self._walked(
            met,
            find_chain(
                self.view, [target.value], is_there, self.view.replayable.__getitem__, may_be_copied_back
            ),
        )

    def _walked(self, met: Mapping[int, int], chain: Chain | None) -> _Walk:
        stood = tuple([stands & _MET for stands in met.values()])
        if chain is None:
            return _Walk(tuple(met), stood, None)
        view = self.view
        touched = {view.value_storage[value] for op in chain.ops for value in view.writes[op]}
        touched.update(s for s in map(view.value_storage.__getitem__, chain.sources) if s not in met)
        return _Walk(tuple(met), stood, chain, tuple(sorted(s for s in touched if s in view.saved)))

    def _may_bring(self, saved: Saved, value: int, target: Saved) -> bool:
        """Does a tier hold `value`, and will somebody else still ask for it? Afterwards the enforcer has let go of what came back."""
        if saved.value != value or not is_intact(self.view, value, target.first_use):
            return False
        if saved.is_weight:
            return True
        if saved.storage not in self._asked_until:
            every = (self.view.trace.slots.unpacks.row(slot) for slot in saved.slots)
            rows = [[op for op in row if op > saved.leaves_after] for row in every]
            last = max(row[0] for row in rows if row) if any(rows) else -1
            self._asked_until[saved.storage] = last, saved.order if last == saved.first_use else -1
        return (target.first_use, target.order) < self._asked_until[saved.storage]

    def _run(self, chain: Chain, target: Saved, standing: Standing) -> Replay:
        view, use = self.view, target.first_use
        coded: dict[int, Decision] = {}
        brought: list[int] = []
        for value in chain.sources:
            storage = view.value_storage[value]
            stands = standing(storage) if storage in view.saved else 0
            if stands & CODED:
                coded[value] = self._codecs[stands >> _WIDTH]
            elif stands & COPIED:
                brought.append(value)
        most, stays = self._hold(chain, target, standing, coded)
        records, until = self._held_until(chain, target, stays)
        sources = [
            (view.value_producer[v], view.value_storage[v], until[v])
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
            + sum(self._op_ms[view.value_producer[copy]] for _, copy in chain.copied_back)
            + sum(
                on_grid(coded[value].decode_ms)
                for op in chain.ops
                for value in view.reads[op]
                if value in coded
            ),
            random=tuple((op, records[op]) for op in chain.ops if view.random[op]),
            pins=tuple(pin for pin in sources if self._death[pin[1]] < pin[2]),
            decoded=tuple((view.value_storage[value], until[value]) for value in coded),
            brought=tuple(view.value_storage[value] for value in brought),
        )

    def _held_until(
        self, chain: Chain, target: Saved, stays: Sequence[Saved]
    ) -> tuple[dict[int, int], dict[int, int]]:
        """(op -> op until which its record lives, source -> op until which records hold it): what waits for a later consumer than the target's
        keeps its record, and with it the records and the sources of what that one reads."""
        until = target.release
        records = dict.fromkeys(chain.ops, until)
        needed = {saved.value: saved.release for saved in stays if saved.release > until}
        copy_of = dict(chain.copied_back)
        for op in reversed(chain.ops) if needed else ():
            records[op] = max(needed.get(value, until) for value in self.view.writes[op])
            for value in self.view.reads[op]:
                held = copy_of.get(value, value)
                needed[held] = max(needed.get(held, until), records[op])
        return records, {value: needed.get(value, until) for value in chain.sources}

    def _hold(
        self, chain: Chain, target: Saved, standing: Standing, coded: Mapping[int, Decision]
    ) -> tuple[int, list[Saved]]:
        """(most that the replay holds, what stays when it is over)."""
        view, copied = self.view, dict(chain.copied_back)
        last_read = {view.value_storage[value]: op for op in chain.ops for value in view.reads[op]}
        held: dict[int, int] = {}
        stays: dict[int, Saved] = {}
        total = most = 0
        for op in chain.ops:
            decoded = 0
            for value in view.reads[op]:
                storage = view.value_storage[value]
                if value in coded:
                    most = max(most, total + decoded + coded[value].decoded_bytes)
                    decoded += self._size[storage]
                elif value in copied and storage not in held:
                    held[storage] = self._size[storage]
                    total += held[storage]
            most = max(most, total + decoded + self._extra[op])
            for value in view.writes[op]:
                storage = view.value_storage[value]
                waits = storage not in stays and self._waits(storage, value, target, standing)
                if waits:
                    stays[storage] = target if storage == target.storage else view.saved[storage]
                if storage not in held and (waits or storage in last_read):
                    held[storage] = self._size[storage]
                    total += held[storage]
            for value in view.reads[op]:
                storage = view.value_storage[value]
                made = storage in stays or (storage in self.places and standing(storage) & MADE)
                if last_read[storage] == op and storage in held and not made:
                    total -= held.pop(storage)
        return most, list(stays.values())

    def _waits(self, storage: int, value: int, target: Saved, standing: Standing) -> bool:
        """Is this value a storage to be made again that somebody will still ask for?"""
        stands = standing(storage) if storage in self.places else 0
        if not stands & ASKED or stands & MADE or (stands & AGAIN and storage != target.storage):
            return False
        saved, use = target if storage == target.storage else self.view.saved[storage], target.first_use
        return saved.value == value and saved.gone_after < use <= saved.last_use < self.view.n


def _parts(view: TraceView) -> Iterator[Saved]:
    """What is saved, as if each of its parts were all of it."""
    for saved in view.saved.values():
        for part in saved.parts:
            yield dataclasses.replace(
                saved,
                gone_after=part.gone_after,
                first_use=part.first_use,
                held_until=part.until,
                order=saved.order if part.first_use == saved.first_use else -1,
                parts=(),
            )
