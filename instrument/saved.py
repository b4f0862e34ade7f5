"""Default saved-tensor hooks that step aside where they must, and the version check that autograd drops under hooks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from msgspec import Struct
from torch import Tensor, UntypedStorage

from memopt.instrument.nodes import output_in_words
from memopt.instrument.ops import PLAIN_TYPES
from memopt.instrument.torch_internals import (
    DisableTorchDispatch,
    conjugated,
    disable_current_modes,
    negated,
    pop_saved_hooks,
    push_saved_hooks,
    saved_hooks_allowed,
    top_saved_hooks,
)
from memopt.instrument.traced import or_while_compiling

log = logging.getLogger(__name__)

_NO_CHECK = ", check_nan=False" if torch.__version__ >= "2.11" else ""
"""What autograd's own error advises to call anomaly detection with."""


class SavedTensorHooks:
    """Pushes `pack` and `unpack` as this thread's default hooks; steps aside for torch.func, which refuses any hooks."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        self._pack = _or_keep(pack)
        self._unpack = unpack
        self._pushed = False
        self._original: Callable[..., Any] | None = None
        self.stepped_aside = 0
        """Regions (vmap, grad, ...) in which torch allows no hooks."""

    def install(self) -> bool:
        """Push the hooks; False when the script has hooks of its own around this point (the innermost would win), or when this is inside
        of a torch.func transform (an iteration can end there), which allows none."""
        if self._pushed or not _may_push():
            return self._pushed
        _push(self._pack, self._unpack)
        self._pushed = True
        self._original = torch.autograd.graph.disable_saved_tensors_hooks
        torch.autograd.graph.disable_saved_tensors_hooks = or_while_compiling(self._aside, self._original)
        return True

    def thread_changed(self) -> None:
        """Push them in this thread as well: torch keeps them by thread."""
        if self._original is None:
            self.install()
        elif _may_push():
            _push(self._pack, self._unpack)

    def leave_thread(self) -> None:
        """Pop them in this thread, which ends."""
        if self._on_top():
            pop_saved_hooks()

    def remove(self) -> None:
        """Pop the hooks if they are on top; hooks of the script above them are left as they are."""
        if self._original is not None:
            torch.autograd.graph.disable_saved_tensors_hooks = self._original
            self._original = None
        if self._pushed and self._on_top():
            pop_saved_hooks()
        self._pushed = False

    def _on_top(self) -> bool:
        top = _top()
        return top is not None and top[0] == self._pack

    @contextlib.contextmanager
    def _aside(self, error_message: str) -> Iterator[None]:
        assert self._original is not None
        popped = self._pushed and self._on_top()
        if popped:
            self.stepped_aside += 1
            pop_saved_hooks()
        try:
            with self._original(error_message):
                yield
        finally:
            if popped and self._original is not None:  # else they were removed meanwhile
                _push(self._pack, self._unpack)


def _or_keep(pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """`pack`, which must not end the script: where it fails the tensor is kept, and the first time that is told."""
    told = False

    def pack_or_keep(tensor: Tensor) -> Any:
        nonlocal told
        try:
            return pack(tensor)
        except Exception:
            if not told:
                told = True
                log.error("memopt failed to handle a saved tensor, which is kept", exc_info=True)
            return Kept(tensor)

    pack_or_keep.is_ours = True  # type: ignore[attr-defined]
    return pack_or_keep


@contextlib.contextmanager
def none_of_ours() -> Iterator[None]:
    """No hooks of memopt's are there: torch.jit would trace what they compute (a size), and give them tensors for numbers."""
    top = _top()
    is_ours = top is not None and getattr(top[0], "is_ours", False)
    if is_ours:
        pop_saved_hooks()
    try:
        yield
    finally:
        if is_ours and top is not None:
            _push(*top)


def _push(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    push_saved_hooks(pack, unpack)


def _may_push() -> bool:
    """Does torch allow hooks here, and has the script none?"""
    return saved_hooks_allowed() and _top() is None


def _top() -> tuple[Any, Any] | None:
    top: tuple[Any, Any] | None = top_saved_hooks(True)
    return top


def share(tensor: Tensor) -> Tensor:
    """An alias of `tensor` that holds no graph and shares its version counter; no mode sees it being made."""
    if type(tensor) not in PLAIN_TYPES:  # a wrapper (NestedTensor, DTensor) has to make its alias itself
        with disable_current_modes():
            return tensor.detach()
    guard = DisableTorchDispatch()
    try:
        return tensor.detach()
    finally:
        del guard


class Elsewhere(Protocol):
    """Where the bytes of a storage are that has left."""

    waiting: int
    """Handles that have not been served."""

    def get(self) -> UntypedStorage:
        """The storage with its bytes."""

    def served(self) -> None:
        """One handle has been served."""


class Kept:
    """What autograd holds in place of a saved tensor that no plan has an action for: an alias and the version it had; or where its bytes
    are, once a guard has sent them away."""

    __slots__ = ("__weakref__", "away", "brings", "place", "served", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = share(tensor)
        self.version = tensor._version
        self.brings: Any = None
        """What an enforcer has happen when it is asked for."""
        self.away: Elsewhere | None = None
        self.served = False

    def leave(self, away: Elsewhere) -> None:
        """Its bytes are in `away` from here on."""
        self.away, self.place = away, Place.of(self.tensor)
        away.waiting += 1
        let_go_of_bytes(self.tensor)

    def get(self) -> Tensor:
        """The tensor; raises what autograd raises when it was changed in place since it was saved."""
        if self.away is None:
            check_version(self.tensor, self.version, self)
            return self.tensor
        check_version(self.tensor, self.version, self, shape=self.place.size)
        tensor = self.place.on(self.away.get())
        if not self.served:
            self.served = True
            self.away.served()
        return tensor


def view_of(
    storage: UntypedStorage, size: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype
) -> Tensor:
    """A tensor over `storage`; allocates nothing."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


class Place(Struct, frozen=True, gc=False):
    """Where a tensor lies in its storage, and whether it shows what is there conjugated or negated.

    One is made for each tensor of a run: this kind of class takes a third of a dataclass's time, and none of the garbage collector's.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        return cls(
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def is_of(self, tensor: Tensor) -> bool:
        """Does `tensor`, over the same storage, show the same?"""
        return (
            tensor.shape == self.size
            and tensor.stride() == self.stride
            and tensor.storage_offset() == self.offset
            and tensor.dtype is self.dtype
            and tensor.is_conj() is self.conjugated
            and tensor.is_neg() is self.negated
        )

    def on(self, storage: UntypedStorage) -> Tensor:
        """The same tensor over `storage`; allocates nothing."""
        tensor = view_of(storage, self.size, self.stride, self.offset, self.dtype)
        if self.conjugated:
            tensor = conjugated(tensor)
        return negated(tensor) if self.negated else tensor


def let_go_of_bytes(alias: Tensor) -> None:
    """Leave `alias` without its bytes; it still shares the version counter of the tensor that it was an alias of."""
    guard = DisableTorchDispatch()
    try:
        alias.data = _nothing(alias.dtype, alias.device)
    finally:
        del guard


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without bytes, which many may show."""
    return torch.empty(0, dtype=dtype, device=device)


def _type_of(tensor: Tensor) -> str:
    """As autograd names it; torch has no such name for CSR and its kind."""
    try:
        return tensor.type()
    except RuntimeError:
        return f"{tensor.layout} {tensor.dtype}"


def check_version(
    tensor: Tensor, version: int, handle: object, *, shape: Sequence[int] | None = None
) -> None:
    """Raise what autograd itself raises when the saved tensor of `handle` was changed in place since it was saved.

    Of an input autograd also says which op gave it, or wrote it last; that is known of outputs only.
    """
    if tensor._version == version:
        return
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{_type_of(tensor)} {list(shape if shape is not None else tensor.shape)}]{output_in_words(handle)} is at version {tensor._version}; expected version {version} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
        f"with torch.autograd.set_detect_anomaly(True{_NO_CHECK})."
    )
