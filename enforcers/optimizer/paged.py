"""One optimizer that is stepped in pieces, its state in a tier between steps.

With a tier no more than three pieces of state are on the device: one that comes, one that is used, one that leaves.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from memopt.enforcers.optimizer.gradients_elsewhere import GradientsElsewhere
from memopt.enforcers.optimizer.piece import Pager, Piece
from memopt.enforcers.optimizer.state_elsewhere import StateElsewhere, stand_in
from memopt.enforcers.optimizer.state_looks import (
    as_it_lies,
    is_of_elements,
    layout_of,
    nobody_else_holds,
    put_in_order,
    trained,
)
from memopt.enforcers.tiers.swap import SwapTier
from memopt.enforcers.weights.emptied import Room
from memopt.instrument.script.signals import held
from memopt.instrument.stepping.handed_out import HandedOut, tells_of_looks
from memopt.instrument.stepping.in_pieces import Segment, State, pieces_of, step_slices
from memopt.instrument.stepping.loaded_state import share_with_checkpoint
from memopt.instrument.stepping.state_between_steps import ALONE, holders
from memopt.instrument.torch_internals import DisableTorchDispatch


class PagedOptimizer:
    """One optimizer: its pieces, and where their state is."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        piece_bytes: int,
        tier: SwapTier[Any] | None,
        leave_it: set[int],
        room: Room | None = None,
    ) -> None:
        """`leave_it`: ids of parameters whose state is to be in the tier between steps. `room`: who is told of state that stays, and of
        state that comes back."""
        self._room = room
        self._pages, self._pager = tier is not None, Pager(tier)
        self._layout = layout_of(optimizer)
        self._leave_it = leave_it
        cut = pieces_of(optimizer, piece_bytes, lambda each: id(each) in self._leave_it)
        self._pieces = [Piece(segments) for segments in cut]
        self._names: dict[int, tuple[str, ...]] = {}
        """id of a parameter -> the order of its state, as the optimizer made it."""
        self._stand: weakref.ref[StateElsewhere] | None = None
        """What stands for the optimizer's state, which goes with the optimizer, or with whoever has taken it."""
        self.keeps_bytes = 0
        """So much may stay on the device between steps."""
        self.is_back = False
        """Somebody has looked at the state, which is whole since."""
        self._handed_out: dict[int, weakref.ref[HandedOut]] = {}
        """id of a parameter -> its state, where the script was given that: it may outlive the optimizer's."""
        self._is_busy = False
        self._lock = threading.RLock()
        """Another thread that looks waits for the end of a step."""
        self._first: set[int] = set()
        """Parameters that this step is the first of: none of their segments has state, whatever the ones before have left."""

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: dict[int, Tensor],
        elsewhere: GradientsElsewhere | None = None,
    ) -> None:
        """The whole update, with `gradients` and those that are `elsewhere`."""
        with self._unlooked():
            self._step(optimizer, gradients, elsewhere)

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: dict[int, Tensor],
        elsewhere: GradientsElsewhere | None,
    ) -> None:
        self.is_back = False
        self._stand_in(optimizer)
        inner = optimizer.state
        pageable = self._pageable(inner) if self._state is not None else set()
        self._first = self._without_state(inner)
        away = {id(each) for each in trained(optimizer) if elsewhere is not None and elsewhere.holds(each)}
        stepped = away | gradients.keys()
        due = [p for p in self._pieces if any(id(s.parameter) in stepped for s in p.segments)]

        def gradient_of(segment: Segment) -> Tensor:
            parameter = segment.parameter
            if elsewhere is not None and id(parameter) in away:
                return elsewhere.part_of(segment)
            return segment.of(as_it_lies(gradients[id(parameter)], parameter))

        room = self.keeps_bytes
        for number, piece in enumerate(due):
            self._pager.fetch(piece)
            if number + 1 < len(due):
                self._pager.fetch(due[number + 1])
            self._pager.arrive(piece)
            taken = [n for n, s in enumerate(piece.segments) if id(s.parameter) in stepped]
            self._step_piece(optimizer, inner, piece, taken, gradient_of, pageable)
            room -= self._leave(piece, room)
            if number:
                self._pager.gone(due[number - 1])
        self._pager.all_gone(due)

    def leave(self, optimizer: torch.optim.Optimizer) -> None:
        """Lay the state that there is into bundles, and send away what may not stay: as after a step, without one."""
        with self._unlooked():
            self._leave_in_turn(optimizer)

    def _leave_in_turn(self, optimizer: torch.optim.Optimizer) -> None:
        self.is_back = False
        self._stand_in(optimizer)
        if self._state is None:
            return
        pageable, room = self._pageable(self._state), self.keeps_bytes
        for number, piece in enumerate(self._pieces):
            if piece.is_empty:
                self._lay(piece, pageable)
            room -= self._leave(piece, room)
            if number:
                self._pager.gone(self._pieces[number - 1])
        self._pager.all_gone(self._pieces)

    def leave_all(self, optimizer: torch.optim.Optimizer) -> None:
        """None of it may stay from here on, of any parameter."""
        self.keeps_bytes = 0
        self._leave_it = {id(each) for each in trained(optimizer)}
        self.leave(optimizer)

    def _leave(self, piece: Piece, room_bytes: int) -> int:
        """It leaves, or takes of the room that there is: how much."""
        size = piece.bundle.nbytes() if piece.bundle is not None else 0
        if size <= room_bytes:
            if piece.bundle is not None:
                self._is_here(piece.bundle)
            return size
        self._pager.leave(piece)
        return 0

    def _lay(self, piece: Piece, pageable: set[int]) -> None:
        fresh: dict[tuple[int, str], Tensor] = {}
        over: list[tuple[State, list[str]]] = []
        for number, segment in enumerate(piece.segments):
            parameter = segment.parameter
            inner = dict.get(self._state or {}, parameter)
            if not inner or id(parameter) not in pageable:
                continue
            moved = [n for n, v in inner.items() if isinstance(v, Tensor) and is_of_elements(v, parameter)]
            fresh |= {(number, name): segment.of(inner[name]) for name in moved}
            if segment.is_last:
                self._names[id(parameter)] = tuple(inner)
                over.append((inner, moved))
        if fresh:
            piece.lay(fresh)
        fresh.clear()
        for inner, moved in over:
            for name in moved:
                del inner[name]

    def _stand_in(self, optimizer: torch.optim.Optimizer) -> None:
        if self._pages and self._stand is None and holders(optimizer) == ALONE:
            share_with_checkpoint(optimizer.state)
            self._stand = stand_in(optimizer, self.bring_back, self._looked_at)

    @contextmanager
    def _unlooked(self) -> Iterator[None]:
        """Who reads state in here, in this thread, is one of us."""
        with self._lock:
            before, self._is_busy = self._is_busy, True
            try:
                yield
            finally:
                self._is_busy = before

    def _inner(self, parameter: Tensor) -> State | None:
        """The state of `parameter`: the optimizer's, or, where that is gone, what the script was given of it."""
        state = self._state
        if state is not None:
            found: State | None = dict.get(state, parameter)
            return found
        known = self._handed_out.get(id(parameter))
        return known() if known is not None else None

    @property
    def kept_bytes(self) -> int:
        """Of its state, in pieces that have stayed."""
        return sum(piece.bundle.nbytes() for piece in self._pieces if piece.bundle is not None)

    @property
    def away_bytes(self) -> int:
        """Of its state, in the tier."""
        return sum(piece.ticket.nbytes for piece in self._pieces if piece.ticket is not None)

    @property
    def _state(self) -> StateElsewhere | None:
        return self._stand() if self._stand is not None else None

    def stands_for(self, state: StateElsewhere) -> bool:
        """Is it what we have put in the place of the optimizer's state?"""
        return self._stand is not None and self._stand() is state

    def fits(self, optimizer: torch.optim.Optimizer) -> bool:
        """Are parameters as they were laid out, and is the state ours? The script may have put another one in its place."""
        ours = self._stand is None or optimizer.state is self._stand()
        return ours and self._layout == layout_of(optimizer)

    def _pageable(self, state: Any) -> set[int]:
        """Parameters whose state nobody else holds: those whose is away already, and those whose would be free if we let go."""
        found = set()
        tells = tells_of_looks(state)
        for parameter in {
            id(s.parameter): s.parameter for piece in self._pieces for s in piece.segments
        }.values():
            if id(parameter) not in self._leave_it:
                continue
            inner = dict.get(state, parameter)
            if type(inner) is HandedOut:
                self._handed_out[id(parameter)] = weakref.ref(inner)
            is_told = tells and type(inner) is HandedOut  # of whoever reads it
            if inner is not None and not is_told and sys.getrefcount(inner) > 3:
                continue
            if inner is None or nobody_else_holds(inner, parameter):
                found.add(id(parameter))
        return found

    def _without_state(self, state: Any) -> set[int]:
        away = {id(piece.segments[n].parameter) for piece in self._pieces for n, *_ in piece.entries}
        return {
            id(s.parameter)
            for piece in self._pieces
            for s in piece.segments
            if not dict.get(state, s.parameter)
        } - away

    # --- one piece

    def _step_piece(
        self,
        optimizer: torch.optim.Optimizer,
        state: Any,
        piece: Piece,
        taken: list[int],
        gradient_of: Callable[[Segment], Tensor],
        pageable: set[int],
    ) -> None:
        """Step the segments of those numbers; `gradient_of` gives a row."""
        rows = piece.rows() if piece.bundle is not None else {}
        rows_of: dict[int, dict[str, Tensor]] = {}
        for (number, name), row in rows.items():
            rows_of.setdefault(number, {})[name] = row
        slices, states, views = [], [], []
        for number in taken:
            segment = piece.segments[number]
            row = segment.of(segment.parameter)
            row.grad = gradient_of(segment)
            slices.append(row)
            view = self._views(state, segment, rows_of.get(number, {}))
            views.append(view)
            states.append(dict(view))
        group = optimizer.param_groups[piece.segments[0].group]
        fresh: dict[tuple[int, str], Tensor] = {}
        for number, view, after in zip(
            taken, views, step_slices(optimizer, group, slices, states), strict=True
        ):
            pages = id(piece.segments[number].parameter) in pageable
            fresh |= self._keep(state, number, piece.segments[number], view, after, rows, pages=pages)
        if fresh:
            piece.lay(rows | fresh)

    def _views(self, state: Any, segment: Segment, rows: dict[str, Tensor]) -> State:
        """The state of a segment as the optimizer is to see it: rows of its elements, and what is the whole parameter's, such as a counter: itself
        where no other segment is stepped with it, else a copy."""
        parameter, found = segment.parameter, dict[str, Any]()
        if id(parameter) in self._first:
            return found
        inner = dict.get(state, parameter) or {}
        for name in dict.fromkeys((*self._names.get(id(parameter), ()), *inner)):
            if name in rows:
                found[name] = rows[name]
            elif name in inner:
                value = inner[name]
                if isinstance(value, Tensor) and is_of_elements(value, parameter):
                    found[name] = segment.of(value)
                elif isinstance(value, Tensor) and not segment.is_whole:
                    found[name] = value.clone()
                else:
                    found[name] = value
        return found

    def _keep(
        self,
        state: Any,
        number: int,
        segment: Segment,
        before: State,
        after: State | None,
        rows: dict[tuple[int, str], Tensor],
        *,
        pages: bool,
    ) -> dict[tuple[int, str], Tensor]:
        """Put the state of a segment where it belongs, if it has any; what is to come into the bundle and is not there yet."""
        parameter, fresh = segment.parameter, dict[tuple[int, str], Tensor]()
        if after is None:
            return fresh
        inner = dict.get(state, parameter)
        if inner is None:
            inner = {}
            dict.__setitem__(state, parameter, inner)
        of_all: State = {}
        for name, value in after.items():
            if not isinstance(value, Tensor) or value.shape != (segment.numel,) or (value.dim() == 0):
                of_all[name] = value
            elif (number, name) in rows:
                if value is not before.get(name):
                    rows[number, name].copy_(value)
            elif pages and self._pages:
                fresh[number, name] = value
            elif value is not before.get(name) or name not in inner:
                whole = inner.get(name)
                if whole is None:
                    whole = inner[name] = segment.empty_whole(value.dtype, value.device)
                segment.of(whole).copy_(value)
        if segment.is_last:
            self._names[id(parameter)] = tuple(after)
            self._whole_ones(inner, after, of_all, {name for n, name in (*rows, *fresh) if n == number})
        return fresh

    def _whole_ones(self, inner: State, after: State, of_all: State, away: set[str]) -> None:
        """The last segment of a parameter is stepped: its counters move on, and what lies in bundles is dropped from its state."""
        for name, value in of_all.items():
            there = inner.get(name)
            if there is value:
                continue
            if isinstance(there, Tensor) and isinstance(value, Tensor) and there.shape == value.shape:
                there.copy_(value)
            else:
                inner[name] = value
        for name in away:
            inner.pop(name, None)
        put_in_order(inner, tuple(after))

    def _is_here(self, storage: UntypedStorage) -> None:
        if self._room is not None:
            self._room.resized(storage)

    def _looked_at(self) -> None:
        with self._lock:
            if self._is_busy:
                return
            if self._room is not None and (size := self.away_bytes):
                self._room.looked_at(size)
            self.bring_back()

    def bring_back(self) -> None:
        """All state is where the optimizer left it, in tensors of its own; until it is told to `leave`, or the next step."""
        nobodys = self._state is None and not any(known() is not None for known in self._handed_out.values())
        if nobodys or all(piece.is_empty for piece in self._pieces):
            return
        self.is_back = True
        guard = DisableTorchDispatch()
        try:
            with held(), torch.no_grad(), self._unlooked():
                for piece in self._pieces:
                    self._unpack(piece)
                for parameter in {
                    id(s.parameter): s.parameter for p in self._pieces for s in p.segments
                }.values():
                    put_in_order(self._inner(parameter), self._names.get(id(parameter)))
        finally:
            del guard

    def _unpack(self, piece: Piece) -> None:
        if piece.is_empty:
            return
        self._pager.fetch(piece)
        self._pager.arrive(piece)
        for (number, name), row in piece.rows().items():
            segment = piece.segments[number]
            inner = self._inner(segment.parameter)
            if inner is None:
                continue
            whole = inner.get(name)
            if whole is None:
                whole = inner[name] = segment.empty_whole(row.dtype, row.device)
                self._is_here(whole.untyped_storage())
            segment.of(whole).copy_(row)
        piece.bundle, piece.last, piece.entries = None, None, []
