"""The optimizer's step in pieces: its own step, on slices of the parameters one after the other; its state in a tier between steps.

Temporaries (Adam's `sqrt` and `div`) are of one piece then, and with a tier no more than three pieces of state are on the device: one
that comes, one that is used, one that leaves (ZeRO-Infinity, Rajbhandari et al. 2021, pages them so for several GPUs and with a kernel of
its own; here it is the optimizer's own kernel on the same device, and the same bits). The whole update runs when the script calls `step`,
after clipping and scaling; the script's own step then finds no gradients, and gets them back when it has ended.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from memopt.enforcers import capturing
from memopt.enforcers.optimizer.gradients_elsewhere import GradientsElsewhere
from memopt.enforcers.optimizer.state_elsewhere import StateElsewhere
from memopt.enforcers.tiers.swap import Pending, SwapFailed, SwapTier, without_frames
from memopt.instrument.iterations import Iterations
from memopt.instrument.script.signals import held
from memopt.instrument.stepping.gradient_reads import give_back, gradient_of, kept_gradient, let_go
from memopt.instrument.stepping.in_pieces import (
    Segment,
    State,
    lies_like,
    pieces_of,
    same_bits_in_pieces,
    step_slices,
    why_not,
)
from memopt.instrument.stepping.single_parameter_step import parameters_of
from memopt.instrument.torch_internals import DisableTorchDispatch, storage_use_count


class OptimizerInPieces:
    """Told of the training loop; steps what it may in pieces."""

    def __init__(
        self,
        iterations: Iterations,
        piece_bytes: int,
        tier: SwapTier[Any] | None,
        most_away: int | None = None,
        gradients: GradientsElsewhere | None = None,
    ) -> None:
        """`tier`: where state goes between steps; none: it stays. `most_away`: of so many parameters, the largest; none: of all.
        `gradients`: where those are that are in a tier, too."""
        self._elsewhere = gradients
        self._iterations, self._piece_bytes, self._tier, self._most_away = (
            iterations,
            piece_bytes,
            tier,
            most_away,
        )
        self._stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Stepped] = (
            weakref.WeakKeyDictionary()
        )
        self._trusted: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        self._hidden: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[tuple[Tensor, Tensor]]] = (
            weakref.WeakKeyDictionary()
        )
        """Gradients that the script's own step does not see. Several steps may be under way, each in a thread of autograd's."""
        self._used: Counter[int] = Counter()
        """id of an optimizer, which may be gone -> most parameters that one of its steps has stepped in pieces."""
        self.declined: Counter[str] = Counter()

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Do the step, and leave nothing to do for the script's own. A Ctrl-C comes when the update is whole."""
        guard = DisableTorchDispatch()
        try:
            with held(), torch.no_grad():
                self._step(optimizer)
        except BaseException:  # no word comes of the end of a step that raised
            self.step_ended(optimizer)
            raise
        finally:
            del guard

    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Send away the state that `optimizers` have made in the steps before this one was told of any; between two steps."""
        guard = DisableTorchDispatch()
        try:
            with held(), torch.no_grad():
                for optimizer in optimizers:
                    if self._tier is not None and not self._reason(optimizer, {}):
                        self._stepped_of(optimizer).leave(optimizer)
        finally:
            del guard

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = {id(each): found for group in optimizer.param_groups for each in group["params"] if (found := kept_gradient(each)) is not None}  # fmt: skip
        stepped = self._stepped.get(optimizer)
        if stepped is not None and not stepped.fits(optimizer):
            stepped.end(optimizer)
            del self._stepped[optimizer]
            self._trusted.pop(optimizer, None)
        reason = self._reason(optimizer, gradients)
        if reason:
            self.declined[reason] += 1
            return
        self._stepped_of(optimizer).step(optimizer, gradients, self._elsewhere)
        used = len(gradients)
        if self._elsewhere is not None:
            used += sum(self._elsewhere.holds(each) for _, each in parameters_of(optimizer))
            self._elsewhere.step_begins()
        self._used[id(optimizer)] = max(self._used[id(optimizer)], used)
        if not gradients:
            return
        self._hidden[optimizer] = [
            (each, gradients[id(each)]) for _, each in parameters_of(optimizer) if id(each) in gradients
        ]
        for each, _ in self._hidden[optimizer]:
            let_go(each)

    @property
    def most_used(self) -> int:
        """Parameters that have been stepped in pieces, of all optimizers."""
        return self._used.total()

    @property
    def why_not_all(self) -> str:
        """Why it was not done as often as planned."""
        return "; ".join(self.declined) or "no step was made"

    def _reason(self, optimizer: torch.optim.Optimizer, gradients: dict[int, Tensor]) -> str:
        """Why it must not step in pieces; empty when nothing speaks against it."""
        reason = (
            why_not(optimizer, with_closure=self._iterations.step_has_closure)
            or _odd(optimizer, gradients)
            or _odd_state(optimizer)
        )
        if not reason and not self._is_trusted(optimizer):
            reason = f"{type(optimizer).__name__} gives other bits in pieces on this device, or no step could be tried"
        return reason

    def _stepped_of(self, optimizer: torch.optim.Optimizer) -> _Stepped:
        if optimizer not in self._stepped:
            self._stepped[optimizer] = _Stepped(optimizer, self._piece_bytes, self._tier, self._most_away)
        return self._stepped[optimizer]

    def _is_trusted(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer not in self._trusted:
            try:
                self._trusted[optimizer] = same_bits_in_pieces(optimizer)
            except Exception:  # whatever it is, the script's own step meets it too, or has none of it
                self._trusted[optimizer] = False
        return self._trusted[optimizer]

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """The script's own step is over, or was never begun: gradients are where they were."""
        for parameter, gradient in self._hidden.pop(optimizer, []):
            if gradient_of(parameter) is None:
                give_back(parameter, gradient)

    def failures(self) -> list[str]:
        """What went wrong with the tier; what could not be moved has stayed."""
        failure = self._tier.failure if self._tier is not None else None
        return (
            [f"{failure.what}; optimizer state that could not be moved has stayed"]
            if failure is not None
            else []
        )

    def frees_nothing(self) -> list[str]:
        """Why paging has freed nothing, if that is so."""
        why = self._tier.frees_nothing if self._tier is not None else ""
        return [why] if why else []

    def remove(self) -> None:
        """Page no more. State that is away comes back when somebody asks for it: the tier stays open until the process ends."""
        for optimizer in list(self._hidden):
            self.step_ended(optimizer)


def _odd(optimizer: torch.optim.Optimizer, gradients: dict[int, Tensor]) -> str:
    if capturing.on_this_stream():
        return "a CUDA graph was being captured"
    for _, parameter in parameters_of(optimizer):
        each = gradients.get(id(parameter))
        if each is None:
            continue
        if not parameter.requires_grad or not parameter.numel():
            return "a parameter that is frozen, or empty, has a gradient"
        if each.layout is not torch.strided or type(each) is not Tensor:
            return "a gradient is sparse, or a tensor of another kind"
        if (each.dtype, each.device, each.shape) != (parameter.dtype, parameter.device, parameter.shape):
            return "a gradient is of another data type, device or shape than its parameter"
        if each.requires_grad:
            return "a gradient has a graph of its own"
    return ""


def _odd_state(optimizer: torch.optim.Optimizer) -> str:
    for parameter in dict.keys(optimizer.state):
        for value in dict.__getitem__(optimizer.state, parameter).values():
            if isinstance(value, Tensor) and value.dim() and not lies_like(value, parameter):
                return "the optimizer's state does not lie in memory as the parameters do"
    return ""


@dataclass(slots=True, eq=False)
class _Piece:
    segments: list[Segment]
    entries: list[tuple[int, str, torch.dtype, int]] = field(default_factory=list)
    """(segment, name, data type, first byte) of what lies in its bundle."""
    bundle: UntypedStorage | None = None
    """Its state while it is on the device."""
    ticket: Any = None
    coming: Pending | None = None

    @property
    def is_empty(self) -> bool:
        return self.bundle is None and self.ticket is None

    def rows(self) -> dict[tuple[int, str], Tensor]:
        """What lies in the bundle, as rows over its bytes."""
        assert self.bundle is not None
        found = {}
        for number, name, dtype, begin in self.entries:
            whole = torch.empty(0, dtype=dtype, device=self.bundle.device)
            found[number, name] = whole.set_(
                self.bundle, begin // dtype.itemsize, (self.segments[number].numel,), (1,)
            )
        return found


class _Stepped:
    """One optimizer: its pieces, and where their state is."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        piece_bytes: int,
        tier: SwapTier[Any] | None,
        most_away: int | None,
    ) -> None:
        self._tier = tier
        self._layout = _layout_of(optimizer)
        self._leave_it = {
            id(each) for each in sorted(_trained(optimizer), key=lambda each: -each.nbytes)[:most_away]
        }
        """ids of parameters whose state is to be in the tier between steps: all, or as many as were asked for, the largest first."""
        cut = pieces_of(optimizer, piece_bytes, lambda each: id(each) in self._leave_it)
        self._pieces = [_Piece(segments) for segments in cut]
        self._names: dict[int, tuple[str, ...]] = {}
        """id of a parameter -> the order of its state, as the optimizer made it."""
        self._state: StateElsewhere | None = None
        self._first: set[int] = set()
        """Parameters that this step is the first of: none of their segments has state, whatever the ones before have left."""

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: dict[int, Tensor],
        elsewhere: GradientsElsewhere | None = None,
    ) -> None:
        """The whole update, with `gradients` and those that are `elsewhere`."""
        self._stand_in(optimizer)
        inner = optimizer.state
        pageable = self._pageable(inner) if self._state is not None else set()
        self._first = self._without_state(inner)
        away = {id(each) for each in _trained(optimizer) if elsewhere is not None and elsewhere.holds(each)}
        gradients = dict(gradients)
        due = [p for p in self._pieces if any(id(s.parameter) in {*gradients, *away} for s in p.segments)]
        for number, piece in enumerate(due):
            self._fetch(piece)
            if number + 1 < len(due):
                self._fetch(due[number + 1])
            self._arrive(piece)
            coming = [s.parameter for s in piece.segments if id(s.parameter) in away - gradients.keys()]
            if elsewhere is not None:
                gradients |= {id(each): elsewhere.copy_of(each) for each in coming}
            self._step_piece(optimizer, inner, piece, gradients, pageable)
            for segment in piece.segments:
                if segment.is_last and id(segment.parameter) in away:
                    gradients.pop(id(segment.parameter), None)
            self._leave(piece)
            if number:
                self._gone(due[number - 1])
        self._all_gone(due)

    def leave(self, optimizer: torch.optim.Optimizer) -> None:
        """Lay the state that there is into bundles, and send them away: as after a step, without one."""
        self._stand_in(optimizer)
        if self._state is None:
            return
        pageable = self._pageable(self._state)
        for number, piece in enumerate(self._pieces):
            if piece.is_empty:
                self._lay(piece, pageable)
                self._leave(piece)
            if number:
                self._gone(self._pieces[number - 1])
        self._all_gone(self._pieces)

    def _lay(self, piece: _Piece, pageable: set[int]) -> None:
        fresh: dict[tuple[int, str], Tensor] = {}
        over: list[tuple[State, list[str]]] = []
        for number, segment in enumerate(piece.segments):
            parameter = segment.parameter
            inner = dict.get(self._state or {}, parameter)
            if not inner or id(parameter) not in pageable:
                continue
            moved = [n for n, v in inner.items() if isinstance(v, Tensor) and _is_of_elements(v, parameter)]
            fresh |= {(number, name): segment.of(inner[name]) for name in moved}
            if segment.is_last:
                self._names[id(parameter)] = tuple(inner)
                over.append((inner, moved))
        if fresh:
            _bundle(piece, fresh)
        fresh.clear()
        for inner, moved in over:
            for name in moved:
                del inner[name]

    def _stand_in(self, optimizer: torch.optim.Optimizer) -> None:
        if self._tier is not None and self._state is None and _holders(optimizer) == _ALONE:
            optimizer.state = self._state = StateElsewhere(optimizer.state, self.bring_back)

    def _all_gone(self, pieces: list[_Piece]) -> None:
        if pieces:
            self._gone(pieces[-1])
        if self._tier is not None:
            self._tier.collect()

    def fits(self, optimizer: torch.optim.Optimizer) -> bool:
        """Are parameters as they were laid out, and is the state ours? The script may have put another one in its place."""
        return (self._state is None or optimizer.state is self._state) and self._layout == _layout_of(
            optimizer
        )

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the state back as it was laid out, unless nobody can look at it any more."""
        if optimizer.state is self._state or (
            self._state is not None and sys.getrefcount(self._state) > _ALONE
        ):
            self.bring_back()
        elif self._state is not None:
            self._state.bring_back = lambda: None

    def _pageable(self, state: Any) -> set[int]:
        """Parameters whose state nobody else holds: those whose is away already, and those whose would be free if we let go."""
        found = set()
        for parameter in {
            id(s.parameter): s.parameter for piece in self._pieces for s in piece.segments
        }.values():
            if id(parameter) not in self._leave_it:
                continue
            inner = dict.get(state, parameter)
            if inner is None or (sys.getrefcount(inner) <= 3 and _nobody_else_holds(inner, parameter)):
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
        piece: _Piece,
        gradients: dict[int, Tensor],
        pageable: set[int],
    ) -> None:
        rows = piece.rows() if piece.bundle is not None else {}
        taken = [n for n, s in enumerate(piece.segments) if id(s.parameter) in gradients]
        slices, states, views = [], [], []
        for number in taken:
            segment = piece.segments[number]
            row = segment.of(segment.parameter)
            row.grad = segment.of(_as_it_lies(gradients[id(segment.parameter)], segment.parameter))
            slices.append(row)
            view = self._views(state, segment, {name: r for (n, name), r in rows.items() if n == number})
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
            _bundle(piece, rows | fresh)

    def _views(self, state: Any, segment: Segment, rows: dict[str, Tensor]) -> State:
        """The state of a segment as the optimizer is to see it: rows of its elements, and copies of what is the whole parameter's."""
        parameter, found = segment.parameter, dict[str, Any]()
        if id(parameter) in self._first:
            return found
        inner = dict.get(state, parameter) or {}
        for name in dict.fromkeys((*self._names.get(id(parameter), ()), *inner)):
            if name in rows:
                found[name] = rows[name]
            elif name in inner:
                value = inner[name]
                if isinstance(value, Tensor) and _is_of_elements(value, parameter):
                    found[name] = segment.of(value)
                else:
                    found[name] = value.clone() if isinstance(value, Tensor) else value
        return found

    def _keep(
        self,
        state: Any,
        number: int,
        segment: Segment,
        before: State,
        after: State,
        rows: dict[tuple[int, str], Tensor],
        *,
        pages: bool,
    ) -> dict[tuple[int, str], Tensor]:
        """Put the state of a segment where it belongs; what is to come into the bundle and is not there yet."""
        parameter, fresh = segment.parameter, dict[tuple[int, str], Tensor]()
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
            elif pages and self._tier is not None:
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
            held = inner.get(name)
            if isinstance(held, Tensor) and isinstance(value, Tensor) and held.shape == value.shape:
                held.copy_(value)
            else:
                inner[name] = value
        for name in away:
            inner.pop(name, None)
        _put_in_order(inner, tuple(after))

    # --- to and from the tier

    def _fetch(self, piece: _Piece) -> None:
        if self._tier is None or piece.ticket is None or piece.coming is not None:
            return
        held = self._tier.take_back(piece.ticket)
        if held is not None:
            piece.bundle, piece.ticket = held, None
            return
        piece.bundle = UntypedStorage(piece.ticket.nbytes, device=piece.ticket.device)
        piece.coming = self._tier.read_async(piece.ticket, piece.bundle)

    def _arrive(self, piece: _Piece) -> None:
        if piece.coming is not None:
            piece.coming.result()
            piece.coming = piece.ticket = None

    def _leave(self, piece: _Piece) -> None:
        if self._tier is None or piece.bundle is None:
            return
        try:
            piece.ticket = self._tier.write_async(piece.bundle)
        except SwapFailed as error:
            without_frames(error)
            return
        piece.bundle = None

    def _gone(self, piece: _Piece) -> None:
        """Wait until the copy is safe; where it cannot be made, the state stays here."""
        if self._tier is None or piece.ticket is None:
            return
        try:
            self._tier.wait(piece.ticket)
        except SwapFailed as error:
            without_frames(error)
            piece.bundle = self._tier.take_back(piece.ticket)
            piece.ticket = None

    def bring_back(self) -> None:
        """All state is where the optimizer left it, in tensors of its own; until the next step."""
        state = self._state
        if state is None or all(piece.is_empty for piece in self._pieces):
            return
        guard = DisableTorchDispatch()
        try:
            with held(), torch.no_grad():
                for piece in self._pieces:
                    self._unpack(state, piece)
                for parameter in {
                    id(s.parameter): s.parameter for p in self._pieces for s in p.segments
                }.values():
                    _put_in_order(dict.get(state, parameter), self._names.get(id(parameter)))
        finally:
            del guard

    def _unpack(self, state: StateElsewhere, piece: _Piece) -> None:
        if piece.is_empty:
            return
        self._fetch(piece)
        self._arrive(piece)
        for (number, name), row in piece.rows().items():
            segment = piece.segments[number]
            parameter = segment.parameter
            inner = dict.get(state, parameter)
            if inner is None:
                continue
            whole = inner.get(name)
            if whole is None:
                whole = inner[name] = segment.empty_whole(row.dtype, row.device)
            segment.of(whole).copy_(row)
        piece.bundle, piece.entries = None, []


def _trained(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for _, each in parameters_of(optimizer) if each.requires_grad]


def _layout_of(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """What the pieces depend on: any of it may change between two steps (`p.data = ...`, `channels_last`, other groups)."""
    return tuple(
        (number, id(each), each.shape, each.stride(), each.dtype, each.device)
        for number, group in enumerate(optimizer.param_groups)
        for each in group["params"]
        if each.requires_grad
    )


def _holders(owner: Any) -> int:
    return sys.getrefcount(owner.state)


_ALONE = _holders(SimpleNamespace(state=defaultdict(dict)))
"""As many hold a state that its optimizer alone holds."""


def _bundle(piece: _Piece, rows: dict[tuple[int, str], Tensor]) -> None:
    """Lay `rows` into one storage."""
    begin, entries = 0, []
    for (number, name), row in rows.items():
        entries.append((number, name, row.dtype, begin))
        begin += -(-row.nbytes // 64) * 64
    device = next(iter(rows.values())).device
    old = rows
    piece.bundle, piece.entries = UntypedStorage(begin, device=device), entries
    for key, row in piece.rows().items():
        row.copy_(old[key])


def _is_of_elements(value: Tensor, parameter: Tensor) -> bool:
    return value.numel() == parameter.numel() and value.dim() > 0 and lies_like(value, parameter)


def _nobody_else_holds(inner: State, parameter: Tensor) -> bool:
    """Is the state ours to move, and does it lie as the parameter does?"""
    for name in list(inner):
        value = inner[name]
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue
        if not _is_of_elements(value, parameter):
            return False
        if sys.getrefcount(value) > 3 or storage_use_count(value.untyped_storage()._cdata) > 2:
            return False  # a name here, the call, and the state; the tensor, and who asks
    return True


def _as_it_lies(gradient: Tensor, parameter: Tensor) -> Tensor:
    """`gradient` with its elements where the parameter has them."""
    if lies_like(gradient, parameter):
        return gradient
    same = torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=gradient.dtype, device=gradient.device
    )
    return same.copy_(gradient)


def _put_in_order(inner: State | None, names: tuple[str, ...] | None) -> None:
    """As the optimizer made it: a checkpoint has its entries in this order."""
    if inner is None or names is None or tuple(inner) == names:
        return
    known = {name: inner[name] for name in names if name in inner} | inner
    if tuple(known) == tuple(inner):
        return
    inner.clear()
    inner.update(known)
