"""What a strategy is given: a trace, the judge, a budget, and what may be done with each storage."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memopt.advisors.clock import OutOfTime, now
from memopt.advisors.kinds import DEFAULT_ALLOW
from memopt.advisors.profiles.codec_options import CodecChoice, codec_choice
from memopt.errors import NotPossibleHere
from memopt.estimators.simulator.chains import Chain, find_chain, is_intact
from memopt.estimators.simulator.decision import (
    RECOMPUTE,
    RECOMPUTE_EACH,
    RECOMPUTE_EARLY,
    Decision,
)
from memopt.estimators.simulator.gradients_in_place import InPlace
from memopt.estimators.simulator.in_pieces import Pieces
from memopt.estimators.simulator.saved import Absence
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import Ints, Saved, TraceView
from memopt.estimators.simulator.weights_streamed import Streamed
from memopt.timeline import Timeline
from memopt.trace import PHASES

Decisions = dict[int, Decision]

MARGIN = 0.005
"""Share of the budget that plans leave free, for what the next run allocates differently."""
LEAST_GAIN = 0.01
"""No plan that lowers the peak by less is worth its hooks."""
LEAST_SWAP_BYTES = 1 << 20
"""Smaller ones are not worth the start of a copy and a place in a tier, where they can leave in another way."""
_LEAST_SWAP_BYTES, _LEAST_SWAP_SHARE = 64 << 10, 256
"""Nor are those that are smaller than this, or than this part of the peak, where they cannot."""
TIME_LIMIT_S = 8.0
"""How long a search, or a solver, may take; for iterations of more than 8,000 ops see `usual_limit_s`."""
_OPTIMIZER = PHASES.index("optimizer")
_REMEMBERED_OPS = 40_000_000
"""Timelines together; an op takes 24 bytes of each."""
_COVERED = 0.998
"""Of all bytes with an option; what is left out beyond it is each smaller than a thousandth of the peak, too."""
_MOST_CANDIDATES = 40_000
"""The largest; what one of more could save is lost in the margin."""


def usual_limit_s(op_count: int) -> float:
    """Time limit where none is given: 8 s, rising from 8,000 ops to 25 s for 100,000."""
    return float(np.interp(op_count, (8000, 100_000), (TIME_LIMIT_S, 25.0)))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A saved storage with something that may be done about it."""

    saved: Saved
    options: tuple[Decision, ...]
    chain: Chain | None
    """Its replay if nothing else were away."""
    codec: CodecChoice | None
    early_chain: Chain | None = None
    """As `chain`, where it is made early."""
    beyond: tuple[slice, ...] = ()
    """Of one that outlives the iteration, and is swapped: where it is away once more, after its last use and when the next one begins."""

    @property
    def storage(self) -> int:
        return self.saved.storage

    @property
    def away(self) -> slice:
        """Ops during which it need not be on the device."""
        return slice(self.saved.gone_after + 1, self.saved.first_use)

    @property
    def absences(self) -> list[slice]:
        """That, and where it need not be there once more: a weight, in each of the iteration's backward calls."""
        return _slices(self.saved.absences)

    def away_by(self, option: Decision) -> list[slice]:
        """Ops during which it need not be on the device under `option`."""
        return _slices(self.saved.parts) if option.each else [*self.absences, *self.beyond]

    def option(self, kind: str) -> Decision | None:
        return next((option for option in self.options if option.kind == kind), None)


def _slices(absences: Iterable[Absence]) -> list[slice]:
    return [slice(each.gone_after + 1, each.first_use) for each in absences]


class Problem:
    """Find decisions whose peak is at most `target_bytes`, at the least step time."""

    def __init__(
        self,
        view: TraceView,
        simulator: Simulator,
        budget_bytes: int,
        allow: frozenset[str] = DEFAULT_ALLOW,
        *,
        margin: float = MARGIN,
        time_limit_s: float = TIME_LIMIT_S,
        instead_of: Problem | None = None,
        part_of: Problem | None = None,
        pieces: Pieces | None = None,
        in_place: InPlace | None = None,
        streamed: Streamed | None = None,
    ) -> None:
        """`instead_of`: the problem of the run as it is, where `view` is of one whose optimizer steps inside backward, or in `pieces`.
        `in_place`: of the run where backward writes into gradients that it uses up, `view` too; as that of `instead_of`. `streamed`: of the
        run whose frozen weights are streamed, both too.
        `part_of`: the problem of the whole iteration, where `view` is of some of its rounds."""
        if view.trace.partial:
            raise NotPossibleHere(
                "this profile is not whole, so nothing can be planned on it",
                why=view.trace.partial,
                try_="memopt profile --offload SCRIPT, or with a smaller batch, then --budget with what the larger one needs",
            )
        self.view, self.simulator, self.budget_bytes, self.allow = view, simulator, budget_bytes, allow
        self.time_limit_s = time_limit_s
        self.device = simulator.device
        self.plain = simulator.run({})
        self.instead_of, self.pieces = instead_of, pieces
        self.in_place: InPlace | None = in_place if instead_of is None else instead_of.in_place
        self.streamed: Streamed | None = streamed if instead_of is None else instead_of.streamed
        self.unplanned_peak_bytes: int = max(self.plain.peak_bytes, view.trace.peak_bytes)
        if instead_of is not None:
            self.unplanned_peak_bytes = instead_of.unplanned_peak_bytes
        elif in_place is not None:
            self.unplanned_peak_bytes = max(self.unplanned_peak_bytes, in_place.plain_peak_bytes)
        if streamed is not None:
            self.unplanned_peak_bytes = max(self.unplanned_peak_bytes, streamed.plain_peak_bytes)
        self.target_bytes = min(
            int(budget_bytes * (1 - margin)), int(self.unplanned_peak_bytes * (1 - LEAST_GAIN))
        )
        if part_of is not None:
            self.unplanned_peak_bytes, self.target_bytes = part_of.unplanned_peak_bytes, part_of.target_bytes
        self._is_part = part_of is not None
        self.least_step_ms: float | None = None
        """No plan that fits has a shorter step, where somebody has proved that (see `lower_bound`)."""
        self._deadline = float("inf")
        self._memo: dict[tuple[tuple[int, ...], tuple[Decision, ...]], Timeline] = {}
        self._looked_up: dict[int, Candidate | None] = {}
        self._give()

    def _give(self) -> None:
        """Have as much leave that no backward call asks for as the budget takes: it costs the copy out only."""
        if self.fits(self.plain) or self._is_part or not self.view.unasked:
            return
        able = [self.candidate(storage) for storage in self.view.unasked]
        wanted = sorted((c for c in able if c is not None), key=self._relief_at_peak)

        def peak_without(count: int) -> int:
            self.simulator.given = {c.storage: c.options[0] for c in wanted[:count]}
            self.plain = self.simulator.run({})
            return -self.plain.peak_bytes

        peak_without(bisect_left(range(len(wanted)), -self.target_bytes, key=peak_without))

    def _relief_at_peak(self, candidate: Candidate) -> tuple[bool, int]:
        """Sorts what is there at the peak first, and of that the largest."""
        saved, at = candidate.saved, self.plain.peak_op
        there = saved.gone_after < at <= saved.release or at <= self.view.left_until.get(saved.storage, -1)
        return not there, -saved.size_bytes

    @property
    def given(self) -> Mapping[int, Decision]:
        """What is decided whatever else is."""
        return self.simulator.given

    @property
    def plain_step_ms(self) -> float:
        """A step of the run as it is."""
        changed = self.streamed or self.in_place
        return changed.plain_step_ms if changed else (self.instead_of or self).view.trace.step_ms

    @property
    def is_of_another_run(self) -> bool:
        """Is it of a run that is changed before any tensor is: another step of the optimizer, another backward, weights elsewhere, less of
        what nobody asks for?"""
        changes = (self.instead_of, self.in_place, self.streamed)
        return bool(self.given) or any(each is not None for each in changes)

    @property
    def is_met_unplanned(self) -> bool:
        return self.unplanned_peak_bytes <= self.budget_bytes

    def with_target(self, target_bytes: int) -> Problem:
        """The same problem with another target; candidates are shared."""
        _ = self.candidates, self.triggers, self.floor_bytes
        other = Problem.__new__(Problem)
        other.__dict__.update(self.__dict__)
        other._memo = {}
        other.target_bytes = target_bytes
        other.least_step_ms = None
        return other

    def with_budget(self, budget_bytes: int) -> Problem:
        """The same problem under another budget, which leaves no margin."""
        other = self.with_target(budget_bytes)
        other._memo, other.budget_bytes = self._memo, budget_bytes
        return other

    def limited(self, deadline: float) -> Problem:
        """The same problem; `run` raises `OutOfTime` once `clock.now()` has passed `deadline`."""
        other = self.with_target(self.target_bytes)
        other._memo, other._deadline = self._memo, deadline
        return other

    @property
    def seconds_left(self) -> float:
        """How long a strategy that starts now may work."""
        return min(self.time_limit_s, self._deadline - now())

    def run(self, decisions: Mapping[int, Decision]) -> Timeline:
        """The judge's timeline, remembered."""
        storages = tuple(sorted(decisions))
        key = storages, tuple(map(decisions.__getitem__, storages))  # a set of pairs takes ten times as long
        found = self._memo.get(key)
        if found is None:
            self._check_time()
            if len(self._memo) > min(4000, _REMEMBERED_OPS // max(1, self.view.n)):
                self._memo.clear()
            found = self._memo[key] = self.simulator.run(decisions, still_wanted=self._check_time)
        return found

    def _check_time(self) -> None:
        if now() > self._deadline:
            raise OutOfTime

    def forget(self) -> None:
        """Let go of the timelines that are remembered."""
        self._memo.clear()

    def fits(self, timeline: Timeline) -> bool:
        return timeline.peak_bytes <= self.target_bytes

    @cached_property
    def movable(self) -> list[Candidate]:
        """Every storage with at least one option, the largest first; the same under any budget."""
        key = "movable", self.allow, self.device, self._is_part
        found: list[Candidate] | None = self.view.shared.get(key)
        if found is None:
            unasked = self.view.unasked
            every = (
                self._candidate(saved) for saved in self.view.saved.values() if saved.storage not in unasked
            )
            found = sorted((c for c in every if c is not None), key=lambda c: -c.saved.size_bytes)
            self.view.shared[key] = found
        return found

    @cached_property
    def candidates(self) -> dict[int, Candidate]:
        """Those of them that together matter, by storage."""
        total = sum(c.saved.size_bytes for c in self.movable)
        covered, chosen = 0, []
        for candidate in self.movable[:_MOST_CANDIDATES]:
            if covered >= _COVERED * total and candidate.saved.size_bytes < self.unplanned_peak_bytes // 1000:
                break
            covered += candidate.saved.size_bytes
            chosen.append(candidate)
        return {c.storage: c for c in sorted(chosen, key=lambda c: (c.saved.packed_op, c.storage))}

    def candidate(self, storage: int) -> Candidate | None:
        """What may be done with any one storage, be it among `candidates` or not."""
        if "candidates" in self.__dict__ and storage in self.candidates:
            return self.candidates[storage]
        if storage not in self._looked_up:
            self._looked_up[storage] = self._candidate(self.view.saved[storage])
        return self._looked_up[storage]

    @cached_property
    def free(self) -> Decisions:
        """All that costs nothing."""
        return {
            c.storage: option
            for c in self.candidates.values()
            for option in c.options
            if option.kind == "drop" and option.decoded_bytes < c.saved.size_bytes
        }

    @cached_property
    def fastest_tier(self) -> str | None:
        """Of those that a candidate may be swapped to."""
        swaps = {o.tier for c in self.candidates.values() for o in c.options if o.kind == "swap" and o.tier}
        return max(swaps, key=lambda tier: min(self.device.rates_of(tier)), default=None)

    @cached_property
    def triggers(self) -> Ints:
        """Ops before which something is unpacked, in order: the only moments at which a swap-in can be started."""
        return np.array(sorted(op for op in self.view.first_unpacked if op < self.view.n), dtype=np.int64)

    @property
    def floor_bytes(self) -> int:
        """No plan goes below: the most that is there at some op when everything that may be away then is away for nothing."""
        return self.floor[0]

    @cached_property
    def floor(self) -> tuple[int, int]:
        """`floor_bytes`, and the op at which they are needed (-1 where there is none)."""
        low = self._least_bytes
        op = int(low.argmax()) if len(low) else -1
        return (max(0, int(low[op])), op) if op >= 0 else (0, op)

    @property
    def floor_outside_the_step_bytes(self) -> int:
        """The same, of the ops that are none of the optimizer's."""
        return int(self._least_bytes[self.view.phase != _OPTIMIZER].max(initial=0))

    @cached_property
    def _least_bytes(self) -> Ints:
        """For each op what is there when everything that may be away then is."""
        low = self.plain.high_bytes.copy()
        for candidate in self.movable:
            least = min(option.encoded_bytes for option in candidate.options)
            for each in candidate.away_by(
                RECOMPUTE_EACH if RECOMPUTE_EACH in candidate.options else RECOMPUTE
            ):
                low[each] -= candidate.saved.size_bytes - least
            if candidate.codec is not None:
                option = candidate.codec.decision
                for op in range(candidate.saved.first_use, candidate.saved.release + 1):
                    low[op] -= max(0, self.relief_bytes(candidate, option, op))
        return low

    def relief_bytes(self, candidate: Candidate, option: Decision, op: int) -> int:
        """Most that `option` takes off what is on the device at `op`. What is encoded stays so when backward asks for it."""
        saved = candidate.saved
        if option.kind in ("recompute", "swap"):
            away = candidate.away_by(option)
            return saved.size_bytes if any(each.start <= op < each.stop for each in away) else 0
        if not saved.gone_after < op <= saved.release:
            return 0
        unpacks, node_end = self.view.trace.slots.unpacks, self.view.node_end
        handed = 0
        if op >= saved.first_use:
            handed = sum(
                use <= op <= node_end[use]
                for slot in saved.slots
                for use in unpacks.row(slot)
                if use < self.view.n
            )
        return saved.size_bytes - option.encoded_bytes - handed * option.decoded_bytes

    def _candidate(self, saved: Saved) -> Candidate | None:
        if saved.is_weight:
            may = not self._is_part and saved.gone_after + 1 < saved.first_use < self.view.n
            swaps = self._swaps(saved) if may else []
            return Candidate(saved, tuple(swaps), None, None) if swaps else None
        if saved.storage in self.view.unasked or saved.storage in self.view.left_until:
            return self._swapped_beyond(saved)
        if not may_act_on(self.view, saved):
            return None
        options: list[Decision] = []
        codec = self._codec(saved)
        if codec is not None:
            options.append(codec.decision)
        chain = self._chain(saved) if "recompute" in self.allow else None
        for_each = chain is not None and self._may_be_made_for_each(saved)
        if chain is not None and not (for_each and self._asks_again(saved)):
            options.append(RECOMPUTE)
        early_chain = self._early_chain(saved, chain) if chain is not None else None
        if early_chain is not None:
            options.append(RECOMPUTE_EARLY)
        if for_each:
            options.append(RECOMPUTE_EACH)
        if saved.size_bytes >= (LEAST_SWAP_BYTES if options else self._least_swap_bytes):
            options.extend(self._swaps(saved))
        return Candidate(saved, tuple(options), chain, codec, early_chain) if options else None

    @property
    def _least_swap_bytes(self) -> int:
        """Of what can leave in no other way."""
        share = self.view.trace.peak_bytes // _LEAST_SWAP_SHARE
        return min(LEAST_SWAP_BYTES, max(_LEAST_SWAP_BYTES, share))

    def _swapped_beyond(self, saved: Saved) -> Candidate | None:
        """What nobody asks for, or what outlives the iteration, and is asked for once by each of its consumers: it is in a tier from its last
        use on. It could not be made again, for the optimizer changes what it was made from."""
        view, last = self.view, min(saved.release, self.view.n)
        able = (
            saved.plain
            and saved.value >= 0
            and saved.size_bytes >= self._least_swap_bytes
            and not self._is_part
        )
        if not able or saved.gone_after + 1 >= min(saved.first_use, last) or self._asks_again(saved):
            return None
        swaps = self._swaps(saved)
        if saved.storage in view.unasked:
            return Candidate(saved, tuple(swaps[:1]), None, None) if swaps else None
        if view.trace.facts.get("create_graph", 0):  # what comes back is saved again
            return None
        beyond = slice(view.node_end[saved.last_use] + 1, last), slice(0, view.left_until[saved.storage] + 1)
        return Candidate(saved, tuple(swaps), None, None, beyond=beyond) if swaps else None

    def _codec(self, saved: Saved) -> CodecChoice | None:
        makes_graph = self.view.trace.facts.get("create_graph", 0) > 0
        if "compress" not in self.allow or makes_graph or saved.written_in_parts:
            return None
        known = (self.instead_of or self).view.shared  # a run that it may become saves the same
        key = "codec", self.device, saved.storage, tuple(saved.slots)
        if key not in known:
            known[key] = codec_choice(self.view, self.device, saved)
        found: CodecChoice | None = known[key]
        return found

    def _chain(self, saved: Saved) -> Chain | None:
        """The replay of `saved` when all else is kept; None when it cannot be made again."""
        if saved.value < 0 or saved.written_in_parts or self.view.next_write[saved.value] <= saved.release:
            return None
        view, use, own = self.view, saved.first_use, saved.storage
        chain = find_chain(
            view,
            [saved.value],
            lambda value: view.value_storage[value] != own and is_intact(view, value, use),
            lambda op: view.replayable[op],
        )
        return chain if chain is not None and chain.ops else None

    def _may_be_made_for_each(self, saved: Saved) -> bool:
        """Can it be made again in each of its parts, when all else is kept?"""
        parts = (dataclasses.replace(saved, first_use=part.first_use) for part in saved.parts)
        return bool(saved.parts) and all(self._chain(part) is not None for part in parts)

    def _asks_again(self, saved: Saved) -> bool:
        """Does one of its consumers ask more than once? What was made for all of them is gone by then."""
        rows = (self.view.trace.slots.unpacks.row(slot) for slot in saved.slots)
        return any(sum(use >= saved.first_use for use in row) > 1 for row in rows)

    def _early_chain(self, saved: Saved, late: Chain) -> Chain | None:
        """The same as `late`, its replay, when it is made while its sources are there; None where that is never, or saves no op."""
        early = self.view.early.get(saved.storage)
        chain = self._chain(early) if early is not None else None
        return chain if chain is not None and len(chain.ops) < len(late.ops) else None

    def _swaps(self, saved: Saved) -> list[Decision]:
        tiers = (
            (("disk", "swap-disk"),)
            if self.device.kind == "cpu"
            else (("host", "swap-host"), ("disk", "swap-disk"))
        )
        swaps = [Decision(kind="swap", tier=tier) for tier, name in tiers if name in self.allow]  # type: ignore[arg-type]
        return [s for s in swaps if np.isfinite(self._round_trip_ms(saved.size_bytes, s))]

    def _round_trip_ms(self, size_bytes: int, decision: Decision) -> float:
        copy = self.simulator.copy_ms
        return copy(size_bytes, decision, out=True) + copy(size_bytes, decision, out=False)

    def solo_ms(self, candidate: Candidate, option: Decision) -> float:
        """What `option` costs when nothing else is done: replay, encode and decode, or the copies that nothing hides."""
        if option.kind == "recompute":
            chain = candidate.early_chain if option.early else candidate.chain
            assert chain is not None
            return self.replay_ms(chain) * (len(candidate.saved.parts) if option.each else 1)
        if option.kind == "swap":
            exposed = max(0.0, -self.free_ms(candidate.saved, option)) * len(candidate.absences)
            return exposed + self.simulator.staging_ms(candidate.saved)
        unpacks = sum(len(self.view.trace.slots.unpacks.row(slot)) for slot in candidate.saved.slots)
        return option.encode_ms + option.decode_ms * unpacks

    def replay_ms(self, chain: Chain) -> float:
        """What making a tensor by `chain` takes."""
        return sum(self.view.replay_ms[op] for op in chain.ops) + self.simulator.make_ms

    def free_ms(self, saved: Saved, option: Decision) -> float:
        """Capuchin's free time: what is left of the span between the uses after both copies; negative when exposed. What nobody asks for again
        has all the time that there is."""
        if saved.storage in self.view.unasked:
            return math.inf
        times = self.view.start_ms
        begin = float(times[min(saved.packed_op + 1, self.view.n - 1)])
        end = float(times[saved.first_use])
        return end - begin - self._round_trip_ms(saved.size_bytes, option)


def may_act_on(view: TraceView, saved: Saved) -> bool:
    """Plain slots of one version, free of others before backward asks, gone before the iteration ends, and asked for once at least. Of others
    some may be swapped (`Problem._swapped_beyond`)."""
    return (
        saved.plain
        and saved.value >= 0
        and saved.size_bytes > 0
        and saved.gone_after + 1 < saved.first_use < view.n
        and saved.release < view.n
        and not saved.is_weight
    )
