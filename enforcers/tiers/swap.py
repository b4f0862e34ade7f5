"""What the disk tier and the host tier have in common: the error, the promise, and the handing out of space.

A tier takes the bytes of a storage away from the device and gives them back. It never loses any: a ticket holds its storage
until the copy is safe, so whatever fails before leaves the bytes where they were.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from memopt.errors import NotPossibleHere

if TYPE_CHECKING:
    import torch

AnyTicket = TypeVar("AnyTicket")


class SwapFailed(NotPossibleHere):
    """A tier cannot take, or cannot give back, bytes. After a failed write the ticket still holds its storage: keep that."""

    @property
    def words(self) -> str:
        """What failed, and why where that is known."""
        return f"{self.what} ({self.why})" if self.why else self.what

    def again(self) -> SwapFailed:
        """The same news without the frames of the first time, which would keep storages alive."""
        return SwapFailed(self.what, why=self.why, try_=self.try_)


def without_frames(error: BaseException) -> BaseException:
    """Its traceback would keep what was to be swapped alive for as long as somebody keeps the error."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


class Pending(Protocol):
    """Bytes on their way. `result` returns when the caller may use them (on a device: when its stream will have them)."""

    def result(self, timeout: float | None = None, /) -> None:
        """Raises `SwapFailed` when they did not arrive."""


class SwapTier(Protocol[AnyTicket]):
    """Where swapped bytes go. `DiskStore` and `HostStore` are both one."""

    @property
    def failure(self) -> SwapFailed | None:
        """The first thing that went wrong, for the outcome to tell."""

    @property
    def frees_nothing(self) -> str:
        """Why what was moved there has freed nothing; empty where it has."""

    def write_async(self, storage: torch.UntypedStorage, over: AnyTicket | None = None, /) -> AnyTicket:
        """Start to take `storage` away. The ticket holds it until the copy is safe and `collect` comes by. Do not write to it.
        `over`: a ticket whose bytes nobody will ask for again; the new ones may take their place."""

    def read_async(self, ticket: AnyTicket, into: torch.UntypedStorage, /) -> Pending:
        """Start to fill `into` with the bytes of `ticket`; as often as wanted."""

    def read_part(self, ticket: AnyTicket, begin: int, into: torch.UntypedStorage, /) -> Pending:
        """Start to fill all of `into` with the bytes of `ticket` from `begin` on, a multiple of a page."""

    def wait(self, ticket: AnyTicket, /) -> None:
        """Until the write is done; raises `SwapFailed` when it failed."""

    def collect(self) -> int:
        """Drop the storages whose copies are safe; their bytes. Cheap: call it often."""

    def take_back(self, ticket: AnyTicket, /) -> torch.UntypedStorage | None:
        """The storage itself, when it has not been dropped yet: the swap is off. None once it is gone."""

    def close(self) -> None:
        """Stop and give up all space."""


class FreeSpace:
    """Offsets in a stretch of bytes: first fit, neighbours joined on release, growing at the end."""

    def __init__(self, size_bytes: int = 0) -> None:
        self.size_bytes = size_bytes
        self._starts: list[int] = [0] if size_bytes else []
        self._lengths: dict[int, int] = {0: size_bytes} if size_bytes else {}

    @property
    def free_bytes(self) -> int:
        return sum(self._lengths.values())

    def take(self, nbytes: int) -> int | None:
        """The offset of a free stretch of `nbytes`, or None; nothing has a place anywhere."""
        if not nbytes:
            return 0
        for start in self._starts:
            length = self._lengths[start]
            if length >= nbytes:
                self._cut(start)
                if length > nbytes:
                    self._put(start + nbytes, length - nbytes)
                return start
        return None

    def missing_bytes(self, nbytes: int) -> int:
        """How much the end must grow for `nbytes` to fit (a free stretch at the end counts)."""
        last = self._starts[-1] if self._starts else None
        tail = (
            self._lengths[last] if last is not None and last + self._lengths[last] == self.size_bytes else 0
        )
        return max(0, nbytes - tail)

    def grow(self, by_bytes: int) -> None:
        self.give(self.size_bytes, by_bytes)
        self.size_bytes += by_bytes

    def give(self, start: int, nbytes: int) -> None:
        """Release a stretch."""
        if not nbytes:
            return
        place = bisect.bisect_left(self._starts, start)
        if place < len(self._starts) and self._starts[place] == start + nbytes:
            nbytes += self._cut(self._starts[place])
        if place > 0:
            before = self._starts[place - 1]
            if before + self._lengths[before] == start:
                nbytes += self._cut(before)
                start = before
        self._put(start, nbytes)

    def stretches(self) -> Sequence[tuple[int, int]]:
        """(offset, bytes) of every free stretch, in order."""
        return [(start, self._lengths[start]) for start in self._starts]

    def _cut(self, start: int) -> int:
        self._starts.remove(start)
        return self._lengths.pop(start)

    def _put(self, start: int, nbytes: int) -> None:
        bisect.insort(self._starts, start)
        self._lengths[start] = nbytes
