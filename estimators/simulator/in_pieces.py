"""A recorded iteration as it would run with the optimizer's step in pieces, its state on the device or in a tier between steps.

The ops of the step stay where they are; what lives during them changes. Temporaries are of one piece: as many bytes to a byte of
parameters as the recorded step had. With a tier, state is there during the step only, and never more than three pieces of it: one that
comes, one that is used, one that leaves. Storages and slots keep their numbers, so plans on the changed trace name the same tensors.
Where several optimizers train, those that cannot step in pieces step as they do, their state away between steps (`state_away.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from memopt.device import Device
from memopt.errors import NotPossibleHere
from memopt.estimators.simulator.costs import pace_of, staging_ms
from memopt.estimators.simulator.in_backward import groups_of
from memopt.estimators.simulator.state_away import Away, state_away, storages_of, whole_steps
from memopt.pieces import Cut, Uncut, cut
from memopt.plan import Tier
from memopt.trace import CATEGORIES, PHASES, Trace
from memopt.updates import Updates

SEGMENT_MS = 0.03
"""Per part of a parameter: slices, copies of its counters, and the optimizer's own Python."""
PIECE_MS = 0.1
"""Per piece: one more call of the step."""
_ROW_OF_STATE = 64
"""Bytes at whose multiples the rows of a piece's state begin."""
_ITEMSIZE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_LEAST_PIECE, _MOST_PIECE, _PIECES = 64 << 10, 8 << 20, 48
_COARSER = 4
"""Times that pieces may have twice the bytes, where there is room for them: each takes two copies and a call of the step."""
_MOST_PIECE_OF_A_GPU = 64 << 20
"""Whose host takes longer over a piece of `_MOST_PIECE` than the link does."""
_ROW_BYTES = 4096
_STATE, _PARAMETER = CATEGORIES.index("optimizer state"), CATEGORIES.index("parameter")
_OPTIMIZER = PHASES.index("optimizer")


@dataclass(frozen=True, slots=True)
class Pieces:
    """How the step is cut."""

    piece_bytes: int
    """Of parameters."""
    tier: Tier | None
    parameters: int
    state_bytes: int
    """Away between steps, of all that the optimizer keeps; 0 without a tier."""
    away: int = 0
    """Of how many parameters, the largest; 0: of all."""
    gradient_bytes: int = 0
    """Gradients that are in the tier from when they are whole until they are cleared."""
    cleared_late: bool = False
    """They are still there when the next iteration begins."""
    whole: Away | None = None
    """State of optimizers that do not step in pieces; among `state_bytes`."""

    @property
    def whole_from_bytes(self) -> int:
        """From which size on that leaves; 0: none does."""
        return self.whole.from_bytes if self.whole is not None else 0


def why_not(trace: Trace) -> str:
    """Why no optimizer can step in pieces, nor have its state away between steps; empty when one can."""
    updates = trace.updates
    if updates is None or updates.in_pieces is None:
        return "the profile does not tell how the optimizer steps"
    if trace.partial:
        return "the recording is not whole"
    if whole_steps(trace):
        return ""
    cut = _cut_steps(trace, updates)
    return "" if cut is not None and cut.parameters else updates.in_pieces or "the recording is not whole"


def _cut_steps(trace: Trace, updates: Updates) -> _Step | None:
    """What can be taken in pieces; None where nothing can."""
    if not updates.in_pieces:
        return _Step(trace, frozenset(range(trace.op_count)), frozenset())
    cut = {op for step in updates.steps if not step.in_pieces for op in range(step.begin_op, step.end_op)}
    if not cut:
        return None
    uncut = [step for step in updates.steps if step.in_pieces]
    others = {storage for step in uncut for storage in step.state}
    touched = {op for step in uncut for op in range(step.begin_op, step.end_op)}
    return _Step(trace, frozenset(cut), frozenset(others | storages_of(trace, touched)))


def in_pieces(
    trace: Trace, tier: Tier | None, device: Device, share: float = 1.0, *, piece_bytes: int = 0
) -> tuple[Trace, Pieces]:
    """The trace with the step in pieces, and how it is cut: with a tier, the state of the largest parameters is there between steps, so
    many that they have `share` of all parameters' bytes; of what cannot be cut, the largest tensors. `piece_bytes`: of parameters at once;
    0: as few as there may be. Raises `NotPossibleHere`."""
    reason = why_not(trace)
    updates = trace.updates
    if reason or updates is None:
        raise NotPossibleHere("the optimizer cannot step in pieces", why=reason)
    step = _cut_steps(trace, updates)
    whole = state_away(trace, tier, device, share) if tier is not None else None
    if step is None or not step.parameters:
        if whole is None or tier is None:
            raise NotPossibleHere("the optimizer cannot step in pieces", why=updates.in_pieces or "")
        changed, away = whole
        return changed, Pieces(0, tier, 0, away.size_bytes, whole=away)
    if whole is None:
        return _cut(_InPieces(step, piece_bytes, tier, share), device)
    changed, away = whole
    found, pieces = _cut(_InPieces(step.of(changed), piece_bytes, tier, share), device)
    return found, replace(pieces, whole=away, state_bytes=pieces.state_bytes + away.size_bytes)


def quickest_pieces(
    trace: Trace, tier: Tier, device: Device, share: float, *, within_bytes: int, elsewhere_bytes: int = 0
) -> int:
    """Bytes of parameters in a piece with which the step of `in_pieces` takes the least time, of the sizes that hold the step `within_bytes`,
    or within what is needed elsewhere anyway, `elsewhere_bytes` without the state that leaves; the least size where none does."""
    updates = trace.updates
    step = _cut_steps(trace, updates) if updates is not None and not why_not(trace) else None
    if step is None or not step.parameters:
        return 0
    least = _InPieces(step, 0, tier, share)
    most_bytes = max(within_bytes, elsewhere_bytes - least.away_bytes)
    sizes = [least.piece_bytes << more for more in range(1, _COARSER + 1)]
    whole_bytes = max(least.piece_bytes, min(step.most_piece_bytes, step.parameter_bytes))
    coarser = [_InPieces(step, size, tier, share) for size in sizes if size <= whole_bytes]
    fitting = [each for each in coarser if each.peak_bytes <= most_bytes]
    return min([least, *fitting], key=lambda each: _paging_ms(each, device)).piece_bytes


def _cut(pieces: _InPieces, device: Device) -> tuple[Trace, Pieces]:
    step, count = pieces.step, len(pieces.step.parameters)
    if pieces.tier is None:
        return pieces.changed(_calls_ms(pieces)), Pieces(pieces.piece_bytes, None, count, 0)
    away = pieces.away if pieces.away < count else 0
    found = Pieces(pieces.piece_bytes, pieces.tier, len(step.parameters), pieces.away_bytes, away)
    return pieces.changed(_paging_ms(pieces, device)), found


class _Step:
    """What is known of the recorded step; of those of several optimizers, of the ops `cut`, with state that is not among `others`."""

    def __init__(self, trace: Trace, cut: frozenset[int], others: frozenset[int]) -> None:
        self.trace, self._cut, self._others = trace, cut, others
        self.ops = [op for op, phase in enumerate(trace.ops.phase) if phase == _OPTIMIZER and op in cut]

    def of(self, trace: Trace) -> _Step:
        """The same of another form of the trace."""
        return _Step(trace, self._cut, self._others)

    @cached_property
    def parameters(self) -> set[int]:
        """Storages of the parameters that it writes."""
        return _of(self.trace, self.ops, _PARAMETER)

    @cached_property
    def parameter_bytes(self) -> int:
        return self._bytes(self.parameters)

    @cached_property
    def state(self) -> set[int]:
        """Storages of the state that is there before and after; counters of a few bytes stay."""
        storages, n = self.trace.storages, self.trace.op_count
        return {
            storage
            for storage, category in enumerate(storages.category)
            if category == _STATE
            and storage not in self._others
            and storages.birth_op[storage] < 0
            and storages.death_op[storage] >= n
            and storages.size_bytes[storage] > 16
        }

    @cached_property
    def state_bytes(self) -> int:
        return self._bytes(self.state)

    @property
    def most_piece_bytes(self) -> int:
        return _MOST_PIECE if self.trace.device.kind == "cpu" else _MOST_PIECE_OF_A_GPU

    @property
    def least_piece_bytes(self) -> int:
        aimed = min(max(self.parameter_bytes // _PIECES, _LEAST_PIECE), self.most_piece_bytes)
        return max(_ROW_BYTES, aimed // _ROW_BYTES * _ROW_BYTES)

    def largest(self, share: float) -> tuple[int, int]:
        """How many parameters, the largest first, have `share` of all bytes, and the bytes of their state."""
        sizes = sorted((self.trace.storages.size_bytes[each] for each in self.parameters), reverse=True)
        bytes_so_far = list(itertools.accumulate(sizes))
        count = next(
            (n for n, have in enumerate(bytes_so_far, 1) if have >= share * bytes_so_far[-1]), len(sizes)
        )
        return count, self.state_bytes * bytes_so_far[count - 1] // bytes_so_far[-1]

    @cached_property
    def temporaries(self) -> list[int]:
        """For each op of the trace: bytes that ops of the step have made and that are gone when the iteration ends."""
        n, storages = self.trace.op_count, self.trace.storages
        change = [0] * (n + 2)
        for storage, birth in self._passing:
            change[birth + 1] += storages.size_bytes[storage]
            change[storages.death_op[storage] + 1] -= storages.size_bytes[storage]
        return list(itertools.accumulate(change))[:n]

    @cached_property
    def _passing(self) -> list[tuple[int, int]]:
        """(storage, op of the step that makes it) of those that do not outlive the iteration."""
        ours, storages, n = set(self.ops), self.trace.storages, self.trace.op_count
        pairs = enumerate(zip(storages.birth_op, storages.death_op, strict=True))
        return [(storage, birth) for storage, (birth, death) in pairs if birth in ours and death < n]

    @cached_property
    def groups(self) -> list[tuple[list[int], int]]:
        """Ops that are taken together, and the bytes of the parameters that they step."""
        groups = groups_of(self.trace, self.ops)
        return [(ops, self._bytes(_of(self.trace, ops, _PARAMETER))) for ops in groups]

    @cached_property
    def in_order(self) -> list[int]:
        """The parameters, in the order in which they are stepped."""
        values, writes = self.trace.values.storage, self.trace.ops.writes
        written = (values[value] for ops, _ in self.groups for op in ops for value in writes.row(op))
        return list(dict.fromkeys(storage for storage in written if storage in self.parameters))

    def itemsize(self, parameter: int) -> int:
        return _ITEMSIZE.get(self.trace.storage_label(parameter).rpartition(" ")[2], 4)

    def uncut(self, parameter: int, leaves: bool) -> Uncut:
        itemsize = self.itemsize(parameter)
        return Uncut(self.trace.storages.size_bytes[parameter] // itemsize, itemsize, (itemsize, leaves))

    @cached_property
    def highs(self) -> list[int]:
        """For each of `groups` most bytes of what its ops make, while they run."""
        return [self._high_of(ops) for ops, _ in self.groups]

    @cached_property
    def left(self) -> list[int]:
        """For each of `groups` what it leaves to the next one."""
        return [self._left_by(ops) for ops, _ in self.groups]

    def _left_by(self, ops: Sequence[int]) -> int:
        """What `ops` have made and leave to those of the next parameter: names in a loop."""
        deaths, last = self.trace.storages.death_op, max(ops)
        return self._bytes(s for op in ops for s in self._made_at.get(op, []) if deaths[s] > last)

    def _high_of(self, ops: Sequence[int]) -> int:
        """Most bytes of what `ops` make, while they run."""
        extra, storages = self.trace.ops.extra_bytes, self.trace.storages
        held: list[int] = []
        most = 0
        for op in ops:
            held = [storage for storage in held if storages.death_op[storage] >= op]
            most = max(most, self._bytes(held) + extra[op])
            held += self._made_at.get(op, [])
        return most

    @cached_property
    def _made_at(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for storage, birth in self._passing:
            found.setdefault(birth, []).append(storage)
        return found

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self.trace.storages.size_bytes[each] for each in storages)


class _InPieces:
    """The step in pieces of one size, the state of the largest parameters in `tier`: of so many that they have `share` of all bytes."""

    def __init__(self, step: _Step, piece_bytes: int, tier: Tier | None, share: float) -> None:
        """`piece_bytes` of 0: the least."""
        self.step, self.tier = step, tier
        self.piece_bytes = piece_bytes or step.least_piece_bytes
        self.away, self.away_bytes = step.largest(share) if tier is not None else (0, 0)
        """How many parameters, and bytes of their state."""

    @property
    def count(self) -> int:
        return -(-self.step.parameter_bytes // self.piece_bytes)

    @property
    def bundle_bytes(self) -> int:
        """State of one piece."""
        all_bytes = self.step.parameter_bytes
        return -(-self.step.state_bytes * min(self.piece_bytes, all_bytes) // max(1, all_bytes))

    @cached_property
    def temporary_bytes(self) -> int:
        """Most that a piece makes and lets go: as much to a byte of parameters as the group of ops that makes most. What a group has left
        to the next one (a name in a loop) is no part of that."""
        most = 0
        for (_, stepped), high in zip(self.step.groups, self.step.highs, strict=True):
            share = min(1.0, self.piece_bytes / stepped) if stepped else 1.0
            most = max(most, int(share * high))
        return most

    @cached_property
    def _window_bytes(self) -> int:
        """Most, in the step, of state, and of temporaries beyond `temporary_bytes`: a piece is stepped while the next one comes and the one
        before leaves."""
        step = self.step
        order, sizes = step.in_order, step.trace.storages.size_bytes
        large = {*sorted(order, key=lambda each: -sizes[each])[: self.away]}
        uncut = [step.uncut(each, each in large).without_repeats(self.piece_bytes) for each in order]
        pieces = cut(uncut, self.piece_bytes)
        state = [0, *(self._state_of(piece) if order[piece[0][0]] in large else 0 for piece in pieces), 0]
        most = max(sum(state[at : at + 3]) + self._taken_by(piece) for at, piece in enumerate(pieces))
        return step.state_bytes - self.away_bytes + most - self.temporary_bytes

    def _state_of(self, piece: list[Cut]) -> int:
        """Bytes of the state of a piece's segments, as it lies together."""
        rows = self.step.state_bytes / max(1, self.step.parameter_bytes)
        return sum(int(rows * (-(-size // _ROW_OF_STATE) * _ROW_OF_STATE)) for size in self._sizes(piece))

    def _sizes(self, piece: list[Cut]) -> list[int]:
        order = self.step.in_order
        return [(stop - start) * self.step.itemsize(order[which]) for which, start, stop in piece]

    def _taken_by(self, piece: list[Cut]) -> int:
        """Most that the step on `piece` makes: on one segment after the other, or on all of them, as the recorded step did."""
        step = self.step
        if len(step.groups) < len(step.in_order):
            return self.temporary_bytes
        most = left = 0
        for (which, *_), size in zip(piece, self._sizes(piece), strict=True):
            share = min(1.0, size / step.groups[which][1])
            most = max(most, left + int(share * step.highs[which]))
            left = int(share * step.left[which])
        return most

    def _held_at(self, op: int) -> tuple[int, int]:
        """Live bytes, and those that the op itself takes, at an op of the step."""
        step = self.step
        ops, kept = step.trace.ops, step.state_bytes - self.away_bytes
        passing = step.temporaries[op]
        live = ops.live_bytes[op] - self.away_bytes + self._window_bytes - kept - passing
        return live, min(ops.extra_bytes[op] + passing, self.temporary_bytes)

    @property
    def peak_bytes(self) -> int:
        """Of the step."""
        return max(sum(self._held_at(op)) for op in self.step.ops)

    def changed(self, added_ms: float) -> Trace:
        """The trace without state that is away outside the step, and with a window of it in the step, which takes `added_ms` longer."""
        old, step, away_bytes = self.step.trace, self.step, self.away_bytes
        ops = old.ops
        live = [at - away_bytes for at in ops.live_bytes]
        extra, time_us = [*ops.extra_bytes], [*ops.time_us]
        workspace = [*ops.workspace_bytes]
        for op in step.ops:
            live[op], extra[op] = self._held_at(op)
            workspace[op] = min(workspace[op], extra[op])
            time_us[op] += 1000 * added_ms / len(step.ops)
        high = [at + more for at, more in zip(live, extra, strict=True)]
        sizes = [*old.storages.size_bytes]
        for storage in step.state:
            sizes[storage] = sizes[storage] * (step.state_bytes - away_bytes) // step.state_bytes
        base = old.base_bytes - away_bytes
        return msgspec.structs.replace(
            old,
            ops=msgspec.structs.replace(
                ops, live_bytes=live, extra_bytes=extra, workspace_bytes=workspace, time_us=time_us
            ),
            storages=msgspec.structs.replace(old.storages, size_bytes=sizes),
            base_bytes=base,
            peak_bytes=max([base, old.outside_peak_bytes - away_bytes, *high]),
            step_ms=old.step_ms + added_ms,
            updates=None,
        )


def _of(trace: Trace, ops: Iterable[int], category: int) -> set[int]:
    """Storages of `category` that `ops` write."""
    values, categories = trace.values.storage, trace.storages.category
    written = {values[value] for op in ops for value in trace.ops.writes.row(op)}
    return {storage for storage in written if categories[storage] == category}


def _calls_ms(pieces: _InPieces) -> float:
    usual_ms = SEGMENT_MS * (len(pieces.step.parameters) + pieces.count) + PIECE_MS * pieces.count
    return pace_of(pieces.step.trace) * usual_ms


def _paging_ms(pieces: _InPieces, device: Device) -> float:
    """What the step takes longer: more calls, and copies that nothing hides."""
    step = pieces.step
    assert pieces.tier is not None
    out_rate, in_rate = device.rates_of(pieces.tier)
    if min(out_rate, in_rate) <= 0:
        return float("inf")
    bundle = pieces.bundle_bytes
    count = -(-pieces.away_bytes // max(1, bundle))
    own_ms = sum(step.trace.ops.time_us[op] for op in step.ops) / 1000
    own_share_ms = own_ms * pieces.away_bytes / step.state_bytes if step.state_bytes else 0.0
    beside_ms = own_share_ms + 2 * count * staging_ms(bundle, device)
    in_ms, out_ms = 1000 * bundle / in_rate, 1000 * bundle / out_rate
    lanes_ms = count * (in_ms + out_ms) if pieces.tier == "disk" else count * max(in_ms, out_ms)
    return _calls_ms(pieces) + max(beside_ms, lanes_ms) + in_ms + out_ms - own_share_ms
