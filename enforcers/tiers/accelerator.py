"""The few things that the tiers ask of a device, so that tests can pretend one."""

from __future__ import annotations

import contextlib
import mmap
import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from memopt.enforcers.tiers.swap import SwapFailed, without_frames
from memopt.instrument.memory.host_memory import available_bytes
from memopt.instrument.script.unheard import unheard

if TYPE_CHECKING:
    import torch


_PINNED_SHARE = 0.9
"""Of the host's memory that is left; the script goes on to load batches beside it."""


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether it has come to pass."""

    def synchronize(self) -> None:
        """Block this thread until it has."""


class Stream(Protocol):
    """A queue of device work."""

    def record_event(self) -> Event:
        """The point after everything that is queued now."""

    def wait_event(self, event: Any) -> None:
        """Let what is queued from now on run after `event`; does not block the host."""


class Accelerator(Protocol):
    """A device with queues of work and memory that it can read at full speed."""

    device: Any

    def here(self) -> AbstractContextManager[object]:
        """This is the thread's device inside the block. All that follows is asked for in one: torch's streams and events set the
        thread's device back to what it was, which makes a context on a device (the first, in a new thread) that nobody else uses."""

    def current_stream(self) -> Stream:
        """The stream that this thread computes on."""

    def new_stream(self) -> Stream:
        """A stream of our own."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Queue copies to `stream` inside the block."""

    def timed(self, stream: Stream) -> Event:
        """As `record_event`, for `elapsed_ms`."""

    def elapsed_ms(self, start: Any, end: Any) -> float | None:
        """Between two such points; None as long as they have not come to pass."""

    def uses(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        """What is on `stream` when `storage` goes may still use it: no other stream gets its memory before that has run. Costs
        nothing where the memory belongs to `stream`."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """A page-locked uint8 row."""

    def unpin(self, row: torch.Tensor) -> None:
        """Before `row` goes."""


class Users:
    """The streams that a script computes on, as far as they have been seen when it saves tensors and asks for them again.

    Autograd would have kept a saved tensor until backward, by when a script has its streams wait for one another. Where it is let go of
    before, any of them may have read it just now: its memory is kept for all of them. With one stream that costs nothing.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._seen: list[Stream] = []

    def current(self) -> Stream:
        """The stream that this thread computes on."""
        stream = self._accelerator.current_stream()
        if stream not in self._seen:
            self._seen.append(stream)
        return stream

    def may_use(self, storage: torch.UntypedStorage) -> None:
        """Call before `storage` is let go of."""
        self.current()
        for stream in self._seen:
            self._accelerator.uses(storage, stream)


class TorchAccelerator:
    """One `device` of the machine. Raises `SwapFailed` where it is none of an accelerator's."""

    def __init__(self, device: torch.device) -> None:
        import torch

        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if here is None or device.type != here.type:
            raise SwapFailed(
                "there is no accelerator here"
                if here is None
                else f"{device} is not an accelerator's memory",
                why="the host tier, and pinned buffers to the disk, are for the tensors of a GPU",
                try_="a plan that was made on this machine",
            )
        self.device = device
        self._warns = device.type == "cuda" and torch.cuda.get_allocator_backend() == "cudaMallocAsync"
        """About `record_stream` for the stream that the memory belongs to."""
        self._registered: set[int] = set()
        self._alone = torch.accelerator.device_count() == 1
        self._streams: dict[object, Stream] = {}
        """By what `one_stream` tells them apart by: an object for a stream takes long to get."""

    def here(self) -> AbstractContextManager[object]:
        import torch

        if self._alone:
            return contextlib.nullcontext()
        entered: AbstractContextManager[object] = torch.accelerator.device_index(self.device.index)
        return entered

    def current_stream(self) -> Stream:
        import torch

        from memopt.instrument.one_stream import current_stream

        here = current_stream(self.device)
        known = self._streams.get(here)
        if known is None:
            known = self._streams[here] = torch.accelerator.current_stream(self.device)
        return known

    def new_stream(self) -> Stream:
        import torch

        return torch.Stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        entered: AbstractContextManager[object] = stream
        return entered

    def timed(self, stream: Any) -> Event:
        import torch

        event = torch.Event(self.device, enable_timing=True)
        stream.record_event(event)
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float | None:
        return float(start.elapsed_time(end)) if start.query() and end.query() else None

    def uses(self, storage: torch.UntypedStorage, stream: Any) -> None:

        from memopt.instrument.torch_internals import DisableTorchDispatch

        guard = DisableTorchDispatch()  # no mode is to take it for an op of the script's
        try:
            with unheard() if self._warns else contextlib.nullcontext():
                row_of(storage).record_stream(stream)
        finally:
            del guard

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Exactly `nbytes` where CUDA can register them (torch's own pinned allocator rounds up to a power of two)."""
        import torch

        if self.device.type == "cuda":
            row = _own_pages(nbytes)
            if int(_cuda_runtime().cudaHostRegister(row.data_ptr(), nbytes, 0)) == 0:
                self._registered.add(row.data_ptr())
                return row
            self._forget_error()
            del row
        rounded, most = 1 << max(0, nbytes - 1).bit_length(), most_bytes()
        try:
            if most is not None and rounded > most:
                raise RuntimeError(f"torch rounds up to {rounded} bytes, and the host has {most} left")
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise SwapFailed(
                f"{nbytes} bytes of host memory cannot be pinned",
                why=str(error),
                try_="ulimit -l unlimited, or the disk tier",
            ) from without_frames(error)

    def _forget_error(self) -> None:
        """A call that failed leaves its error to the next kernel launch of this thread, the script's: let one of ours report it."""
        import torch

        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=self.device).fill_(0)

    def unpin(self, row: torch.Tensor) -> None:
        if row.data_ptr() in self._registered:
            self._registered.discard(row.data_ptr())
            _cuda_runtime().cudaHostUnregister(row.data_ptr())


def most_bytes() -> int | None:
    """Bytes that may be pinned now: most of what the host has left, the other ranks of this machine having as much. None: not known."""
    left, ranks = available_bytes(), os.environ.get("LOCAL_WORLD_SIZE", "")
    return (
        None if left is None else int(_PINNED_SHARE * left) // max(1, int(ranks) if ranks.isdecimal() else 1)
    )


def accelerator_of(device: torch.device) -> Accelerator | None:
    """The accelerator whose memory `device` is; None: the host's own. The seam: tests put a pretended device here."""
    return None if device.type == "cpu" else TorchAccelerator(device)


def _own_pages(nbytes: int) -> torch.Tensor:
    """A uint8 row in pages that hold nothing else, and that a forked child (a loader's worker) does not get.

    If both had them, the first to write into one would get another in its place, while the device goes on with the old one: what the
    disk tier reads into its buffers would not be what is copied to the device.
    """
    import torch

    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _cuda_runtime() -> Any:
    import torch

    return torch.cuda.cudart()


def row_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Its bytes as a uint8 row."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
