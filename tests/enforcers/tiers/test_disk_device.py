"""The disk tier for an accelerator's memory, on a pretended one whose compute stream runs late, while the tier's threads run at once."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from memopt.enforcers.tiers.disk import PIECE_BYTES, DiskStore
from memopt.enforcers.tiers.swap import SwapFailed
from memopt.enforcers.tiers.swapped import Swapper
from tests.enforcers.tiers.test_disk import content, some_storage


class LateEvent:
    """`synchronize` waits; the compute stream's pass when the test lets it run."""

    def __init__(self, passed: bool) -> None:
        self.flag = threading.Event()
        if passed:
            self.flag.set()

    def query(self) -> bool:
        return self.flag.is_set()

    def synchronize(self) -> None:
        assert self.flag.wait(30), "waiting for ever"


class ComputeStream:
    """What is queued here happens in `run`."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []

    def record_event(self) -> LateEvent:
        assert not threading.current_thread().name.startswith("memopt"), "a worker computes nothing"
        event = LateEvent(passed=False)
        self.work.append(event.flag.set)
        return event

    def wait_event(self, event: LateEvent) -> None:
        self.work.append(event.synchronize)

    def run(self) -> None:
        while self.work:
            self.work.pop(0)()


class SideStream(TorchDispatchMode):
    """A worker's: copies wait for the events before them, and must not block by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[LateEvent] = []

    def record_event(self) -> LateEvent:
        return LateEvent(passed=True)

    def wait_event(self, event: LateEvent) -> None:
        self.events.append(event)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            assert args[2] is True, "a blocking copy"
            for event in self.events:
                event.synchronize()
            self.events.clear()
        return func(*args, **(kwargs or {}))


class LateDevice:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.compute = ComputeStream()
        self.pinned_bytes: list[int] = []
        self.can_pin = 10
        self.used: list[tuple[int, ComputeStream]] = []

    def here(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_stream(self) -> ComputeStream:
        return self.compute

    def new_stream(self) -> SideStream:
        return SideStream()

    @contextlib.contextmanager
    def on(self, stream: SideStream) -> Iterator[None]:
        """For this thread alone: `with stream` sets flags of the process, which workers that end in another order leave set for good."""
        _push_mode(stream)
        try:
            yield
        finally:
            _pop_mode()

    def uses(self, storage: torch.UntypedStorage, stream: ComputeStream) -> None:
        self.used.append((storage.data_ptr(), stream))

    def pinned(self, nbytes: int) -> torch.Tensor:
        if len(self.pinned_bytes) >= self.can_pin:
            raise SwapFailed("host memory cannot be pinned")
        self.pinned_bytes.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    def unpin(self, row: torch.Tensor) -> None:
        self.pinned_bytes.remove(row.numel())


@pytest.fixture
def device() -> LateDevice:
    return LateDevice()


@pytest.fixture
def store(tmp_path, device):
    made = DiskStore(tmp_path, threads=3, accelerator=device)
    yield made
    made.close()
    assert device.pinned_bytes == [], "what was pinned is given back"


def fill(storage: torch.UntypedStorage, value: int) -> None:
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(value)


@pytest.mark.parametrize("nbytes", [0, 1, 5000, 2 * PIECE_BYTES + 3])
def test_a_copy_waits_for_the_kernels_that_were_queued_before_it(store, device, nbytes):
    storage = some_storage(nbytes)
    device.compute.work.append(lambda: fill(storage, 7))
    ticket = store.write_async(storage)
    assert not ticket.written.done() or nbytes == 0
    device.compute.run()
    store.wait(ticket)
    assert store.take_back(ticket) is None, "it has left"
    fill(storage, 8)
    into = torch.UntypedStorage(nbytes)
    device.compute.work.append(lambda: fill(into, 9))  # whoever had this memory before still writes to it
    done = store.read_async(ticket, into)
    device.compute.run()
    done.result(30)
    assert content(into) == b"\7" * nbytes


def test_before_it_has_left_it_is_copied_on_the_device(store, device):
    storage = some_storage(PIECE_BYTES + 5)
    ticket = store.write_async(storage)
    into = torch.UntypedStorage(ticket.nbytes)
    done = store.read_async(ticket, into)
    device.compute.run()
    done.result(30)
    assert content(into) == content(storage)


def test_a_swapper_swaps_to_it(store, device):
    swapper = Swapper({"disk": store}, {0: "disk"})
    storage = some_storage(10_000, 3)
    want = content(storage)
    swapped = swapper.swap_out(0, storage)
    del storage
    device.compute.run()
    swapper.wait_for_all()
    assert swapped.source() is None
    swapper.prefetch([0])
    device.compute.run()
    back = swapped.get()
    assert content(back) == want
    assert device.used[-1] == (back.data_ptr(), device.compute), "who asks may be another stream"
    assert back.device == device.device


def test_where_nothing_can_be_pinned_the_tensor_is_kept(store, device):
    device.can_pin = 2  # of three threads
    before = threading.active_count()
    for _ in range(2):
        with pytest.raises(SwapFailed, match="pinned"):
            store.write_async(some_storage(100))
    swapper = Swapper({"disk": store}, {0: "disk"})
    assert swapper.swap_out(0, some_storage(100)) is None
    assert "pinned" in swapper.reason
    other = DiskStore(store.folder, accelerator=device)
    storage = some_storage(100)
    watched = weakref.ref(storage)
    assert Swapper({"disk": other}, {0: "disk"}).swap_out(0, storage) is None
    del storage
    assert watched() is None, "the failure that is remembered holds no frames"
    other.close()
    assert threading.active_count() == before
