"""The disk tier: every byte comes back, nothing is left behind, and whatever fails leaves the bytes where they were."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.enforcers.tiers import swap_file, swap_places, swapped
from memopt.enforcers.tiers.disk import PIECE_BYTES, DiskStore
from memopt.enforcers.tiers.swap import FreeSpace, SwapFailed
from memopt.errors import NotPossibleHere
from memopt.instrument.script import forks
from tests.support import warm

PAGE = swap_file.PAGE_BYTES


@pytest.fixture
def store(tmp_path):
    made = DiskStore(tmp_path, threads=2)
    yield made
    made.close()


def some_storage(nbytes: int, seed: int = 0) -> torch.UntypedStorage:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).untyped_storage()


def content(storage: torch.UntypedStorage) -> bytes:
    return bytes(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())


def fetched(store: DiskStore, ticket: swap_places.Ticket) -> bytes:
    into = torch.UntypedStorage(ticket.nbytes)
    store.read_async(ticket, into).result(30)
    return content(into)


class Gate:
    """Holds every write of a store until it is opened."""

    def __init__(self, store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        write = store._file.write

        def gated(data: memoryview, offset: int) -> None:
            self.reached.set()
            assert self.open.wait(30)
            write(data, offset)

        monkeypatch.setattr(store._file, "write", gated)


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize(
    "nbytes", [0, 1, 64, PAGE - 1, PAGE, PAGE + 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES - 7]
)
def test_every_byte_comes_back_as_often_as_wanted(store, nbytes):
    storage = some_storage(nbytes)
    before = content(storage)
    ticket = store.write_async(storage)
    del storage
    store.wait(ticket)
    assert ticket.source is None
    assert fetched(store, ticket) == before
    assert fetched(store, ticket) == before
    assert store.written_bytes == nbytes
    assert store.read_bytes == 2 * nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64])
def test_strides_and_dtypes_are_the_views_matter_the_storage_is_whole(store, dtype):
    base = torch.randn(20, 30).to(dtype)
    view = base.t()[3:, ::2]
    want = view.clone()
    ticket = store.write_async(base.untyped_storage())
    store.wait(ticket)
    into = torch.UntypedStorage(ticket.nbytes)
    store.read_async(ticket, into).result(30)
    again = torch.empty(0, dtype=dtype).set_(into, view.storage_offset(), view.size(), view.stride())
    assert torch.equal(again.view(-1) if again.is_contiguous() else again.clone(), want)


def test_the_storage_is_dropped_by_the_caller_once_it_is_safe(store):
    storage = some_storage(PIECE_BYTES)
    ticket = store.write_async(storage)
    ticket.written.result(30)
    assert ticket.source is storage, "a worker must not drop it"
    assert store.collect() == PIECE_BYTES
    assert ticket.source is None
    assert store.collect() == 0
    assert sys.getrefcount(storage) == 2, "nobody but this test holds it"


def test_many_threads_of_writes_and_reads_at_once(store):
    storages = [some_storage(50_000 + 4097 * i, i) for i in range(60)]
    want = [content(s) for s in storages]
    tickets = [store.write_async(s) for s in storages]
    targets = [torch.UntypedStorage(t.nbytes) for t in tickets]
    reads = [store.read_async(t, into) for t, into in zip(tickets, targets, strict=True)]
    for done in reads:
        done.result(30)
    assert [content(into) for into in targets] == want
    for ticket in tickets:
        store.wait(ticket)
    assert [fetched(store, t) for t in tickets] == want


def test_room_is_used_again_and_the_file_stays_small(store):
    for i in range(40):
        storage = some_storage(3 << 20, i)
        want = content(storage)
        ticket = store.write_async(storage)
        store.wait(ticket)
        assert fetched(store, ticket) == want
        del ticket
    assert store.file_bytes <= swap_places.GROW_BYTES


def test_reserved_room_is_asked_for_at_once(tmp_path):
    store = DiskStore(tmp_path, reserve_bytes=5 * PAGE + 1)
    assert store.file_bytes == 6 * PAGE
    assert os.fstat(store._file.fd).st_size == 6 * PAGE
    store.close()


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize(("begin", "nbytes"), [(0, 5), (PAGE, PAGE + 1), (PIECE_BYTES, 2 * PIECE_BYTES - 1), (3 * PIECE_BYTES, 100)])  # fmt: skip
def test_a_part_is_read(store, monkeypatch, begin, nbytes, written):
    """From the file, or from the storage that the ticket still holds."""
    storage = some_storage(3 * PIECE_BYTES + 100)
    gate = None if written else Gate(store, monkeypatch)
    ticket = store.write_async(storage)
    if written:
        store.wait(ticket)
    into = torch.UntypedStorage(nbytes)
    store.read_part(ticket, begin, into).result(30)
    assert content(into) == content(storage)[begin : begin + nbytes]
    assert store.read_bytes == nbytes
    if gate is not None:
        gate.open.set()
    for odd in (PAGE + 1, 4 * PIECE_BYTES):
        with pytest.raises(ValueError, match="are no part of"):
            store.read_part(ticket, odd, into)


def test_a_larger_target_is_fine_and_a_smaller_one_is_not(store):
    storage = some_storage(1000)
    ticket = store.write_async(storage)
    store.wait(ticket)
    large = torch.UntypedStorage(2000)
    store.read_async(ticket, large).result(30)
    assert content(large)[:1000] == content(storage)
    with pytest.raises(ValueError, match="do not fit"):
        store.read_async(ticket, torch.UntypedStorage(999))


# ------------------------------------------------------------------ before the write is done


def test_a_read_before_the_write_is_done_does_not_wait_for_it(store, monkeypatch):
    gate = Gate(store, monkeypatch)
    storage = some_storage(100_000)
    ticket = store.write_async(storage)
    assert gate.reached.wait(30)
    assert fetched(store, ticket) == content(storage)
    gate.open.set()
    store.wait(ticket)
    assert fetched(store, ticket) == content(storage)


@pytest.mark.parametrize("started", [True, False])
def test_taken_back_before_it_is_written(store, monkeypatch, started):
    gate = Gate(store, monkeypatch)
    blockers = [] if started else [store.write_async(some_storage(10)) for _ in range(2)]
    storage = some_storage(3 * PIECE_BYTES)
    ticket = store.write_async(storage)
    assert gate.reached.wait(30)
    assert store.take_back(ticket) is storage
    assert store.take_back(ticket) is None
    gate.open.set()
    store.wait(ticket)
    for blocker in blockers:
        store.wait(blocker)
    assert store.collect() == 0
    assert ticket.source is None
    with pytest.raises(ValueError, match="taken back"):
        store.read_async(ticket, torch.UntypedStorage(ticket.nbytes))


def test_nothing_to_take_back_once_it_is_gone(store):
    ticket = store.write_async(some_storage(10))
    store.wait(ticket)
    assert store.take_back(ticket) is None
    assert len(fetched(store, ticket)) == 10


# ------------------------------------------------------------------ what can go wrong


@pytest.mark.parametrize("where", ["missing", "a-file", "/proc", "/sys"])
def test_a_folder_that_cannot_hold_a_swap_file(tmp_path, where):
    (tmp_path / "a-file").write_text("")
    with pytest.raises(SwapFailed) as caught:
        DiskStore(tmp_path / where)
    assert isinstance(caught.value, NotPossibleHere)
    assert where in caught.value.what
    assert caught.value.why
    assert "--swap-dir" in caught.value.try_


def raising(code: int, *, after: int = 0):
    calls = iter(range(10**9))

    def refuse(real):
        def act(*arguments):
            if next(calls) >= after:
                raise OSError(code, os.strerror(code))
            return real(*arguments)

        return act

    return refuse


@pytest.mark.parametrize(
    ("call", "code"), [("posix_fallocate", errno.ENOSPC), ("pwrite", errno.EIO), ("pwrite", errno.EROFS)]
)
def test_a_write_that_fails_loses_nothing_and_is_remembered(store, monkeypatch, call, code):
    early = some_storage(swap_places.GROW_BYTES)
    want = content(early)
    first = store.write_async(early)
    del early
    store.wait(first)
    monkeypatch.setattr(os, call, raising(code)(getattr(os, call)))
    storage = some_storage(100_000)
    ticket = store.write_async(storage)
    with pytest.raises(SwapFailed, match="swap file") as caught:
        store.wait(ticket)
    assert os.strerror(code) in caught.value.why
    assert str(store.failure) == str(caught.value)
    with pytest.raises(SwapFailed) as again:
        store.write_async(storage)
    assert str(again.value) == str(caught.value), "the same words every time, so that it can be told once"
    assert caught.value.__traceback__ is not again.value.__traceback__, "frames would keep the storage alive"
    assert fetched(store, ticket) == content(storage)
    assert store.take_back(ticket) is storage
    assert fetched(store, first) == want


def test_a_write_that_failed_is_told_and_its_storage_goes_with_the_ticket(store, monkeypatch):
    """The error that was told must not hold, by its frames, the ticket that holds the error."""
    monkeypatch.setattr(os, "posix_fallocate", raising(errno.ENOSPC)(os.posix_fallocate))
    storage = some_storage(100_000)
    gone = weakref.ref(storage)
    ticket = store.write_async(storage)
    del storage
    gc.disable()
    try:
        for _ in range(2):
            with contextlib.suppress(SwapFailed):
                store.wait(ticket)
        del ticket
        assert gone() is None
    finally:
        gc.enable()


def test_a_failed_generous_growth_tries_the_bare_need(store, monkeypatch):
    real = os.posix_fallocate

    def small_disk(fd, start, nbytes):
        if nbytes > PAGE:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", small_disk)
    ticket = store.write_async(some_storage(PAGE))
    store.wait(ticket)
    assert store.file_bytes == PAGE


def test_no_fallocate_on_this_file_system(store, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", raising(errno.EOPNOTSUPP)(os.posix_fallocate))
    storage = some_storage(10_000)
    ticket = store.write_async(storage)
    store.wait(ticket)
    assert fetched(store, ticket) == content(storage)


def test_a_read_that_fails_says_so(store, monkeypatch):
    ticket = store.write_async(some_storage(10_000))
    store.wait(ticket)
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", raising(errno.EIO)(os.preadv))
        with pytest.raises(SwapFailed, match="read back"):
            fetched(store, ticket)
    assert len(fetched(store, ticket)) == 10_000


def test_a_truncated_file_is_an_error_and_not_zeros(store):
    ticket = store.write_async(some_storage(10_000))
    store.wait(ticket)
    os.ftruncate(store._file.fd, 0)
    with pytest.raises(SwapFailed, match="read back"):
        fetched(store, ticket)


def test_short_writes_and_reads_are_continued(store, monkeypatch):
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:PAGE], at))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: read(fd, [buffers[0][:PAGE]], at))
    storage = some_storage(10 * PAGE + 5)
    ticket = store.write_async(storage)
    store.wait(ticket)
    assert fetched(store, ticket) == content(storage)


def test_o_direct_refused_at_the_first_write_goes_through_the_cache(store, monkeypatch):
    if not store.direct:
        pytest.skip("no O_DIRECT in the temporary folder")
    real, seen = os.pwrite, []

    def refuse_direct(fd, data, offset):
        import fcntl

        seen.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        if seen[-1]:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse_direct)
    storage = some_storage(10_000)
    ticket = store.write_async(storage)
    store.wait(ticket)
    assert fetched(store, ticket) == content(storage)
    assert seen == [True, False]
    assert not store.direct


def test_a_real_limit_on_file_sizes(tmp_path):
    said = run(
        """
        import resource, sys, torch
        from memopt.enforcers.tiers.disk import DiskStore
        from memopt.enforcers.tiers.swap import SwapFailed
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        store = DiskStore(sys.argv[1])
        storage = torch.ones(1 << 20).untyped_storage()
        ticket = store.write_async(storage)
        try:
            store.wait(ticket)
        except SwapFailed as error:
            print(store.take_back(ticket) is storage, "ulimit" in error.try_)
        """,
        tmp_path,
    )
    assert said == "True True\n"


def test_a_memory_file_system_is_told(tmp_path):
    shm = Path("/dev/shm")
    if swap_file.filesystem_of(shm) != "tmpfs" or not os.access(shm, os.W_OK):
        pytest.skip("no tmpfs here")
    store = DiskStore(shm)
    assert store.in_memory
    storage = some_storage(10_000)
    ticket = store.write_async(storage)
    store.wait(ticket)
    assert fetched(store, ticket) == content(storage)
    store.close()
    assert swap_file.filesystem_of(Path("/proc")) == "proc"


def test_after_close_there_is_nothing(tmp_path):
    store = DiskStore(tmp_path)
    ticket = store.write_async(some_storage(10))
    store.close()
    store.close()
    assert ticket.written.done()
    with pytest.raises(SwapFailed, match="closed"):
        store.write_async(some_storage(10))
    with pytest.raises(SwapFailed, match="closed"):
        store.read_async(ticket, torch.UntypedStorage(10))


# ------------------------------------------------------------------ names, processes, leftovers


def run(script: str, *arguments: object, status: int = 0) -> str:
    """What `script` wrote; it ends with `status`."""
    done = warm.python(["-c", textwrap.dedent(script), *map(str, arguments)], timeout=60)
    assert done.returncode == status, done.stderr
    return done.stdout


@pytest.mark.parametrize("unnamed", [True, False])
def test_no_name_is_left_while_it_runs(tmp_path, monkeypatch, unnamed):
    if not unnamed:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    store = DiskStore(tmp_path)
    storage = some_storage(10_000)
    ticket = store.write_async(storage)
    store.wait(ticket)
    assert os.listdir(tmp_path) == []
    assert fetched(store, ticket) == content(storage)
    store.close()


def test_kill_9_leaves_nothing(tmp_path):
    script = """
        import os, signal, sys, torch
        from memopt.enforcers.tiers.disk import DiskStore
        store = DiskStore(sys.argv[1], reserve_bytes=300 << 20)
        store.wait(store.write_async(torch.ones(1 << 20).untyped_storage()))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    run(script, tmp_path, status=-signal.SIGKILL)
    assert os.listdir(tmp_path) == []


def test_only_what_dead_processes_left_is_removed(tmp_path):
    import fcntl

    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f"memopt-swap-{dead.pid}-{'0' * 16}.bin"
    locked = tmp_path / f"memopt-swap-{dead.pid}-{'1' * 16}.bin"
    alive = tmp_path / f"memopt-swap-{os.getpid()}-{'2' * 16}.bin"
    foreign = tmp_path / f"memopt-swap-{dead.pid}-notes.bin"
    link = tmp_path / f"memopt-swap-{dead.pid}-{'3' * 16}.bin"
    folder = tmp_path / f"memopt-swap-{dead.pid}-{'4' * 16}.bin"
    huge = tmp_path / f"memopt-swap-9999999999-{'5' * 16}.bin"
    for path in (left, locked, alive, foreign, huge):
        path.write_bytes(b"x" * 5000)
    link.symlink_to(foreign)
    folder.mkdir()
    with locked.open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        store = DiskStore(tmp_path)
        store.close()
        assert set(tmp_path.iterdir()) == {locked, alive, foreign, link, folder, huge}
    assert store.leftover_bytes >= 5000
    assert foreign.read_bytes() == b"x" * 5000


def test_a_forked_child_cannot_touch_the_parents_bytes(store):
    storage = some_storage(100_000)
    ticket = store.write_async(storage)
    store.wait(ticket)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what this test is about
        child = os.fork()
    if child == 0:
        verdict = 1
        try:
            closed = store._file.fd == -1
            refused = 0
            for act in (
                lambda: store.write_async(storage),
                lambda: store.wait(ticket),
                lambda: fetched(store, ticket),
            ):
                try:
                    act()
                except SwapFailed as error:
                    refused += "forked" in error.why
            store.close()
            verdict = 0 if closed and refused == 3 else 2
        finally:
            os._exit(verdict)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert fetched(store, ticket) == content(storage)
    second = store.write_async(storage)
    store.wait(second)
    assert fetched(store, second) == content(storage)


@pytest.mark.parametrize("by_a_loader", [False, True])
def test_what_is_away_is_there_in_a_forked_child(store, monkeypatch, by_a_loader):
    """It may go back through a graph that its parent has made; a loader's worker does not."""
    monkeypatch.setattr(forks, "starts_a_loaders_worker", lambda: by_a_loader)
    storage = some_storage(100_000)
    swap, bytes_ = swapped.SwappedStorage(store, storage), content(storage)
    del storage
    swap.wait_until_away()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os._exit(0 if content(swap.get()) == bytes_ else 3)
        except SwapFailed:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (4 if by_a_loader else 0)
    assert content(swap.get()) == bytes_


def test_a_child_that_outlives_the_parent_does_not_keep_the_space(tmp_path):
    script = """
        import os, sys, time, torch
        from memopt.enforcers.tiers.disk import DiskStore
        store = DiskStore(sys.argv[1])
        store.wait(store.write_async(torch.ones(100).untyped_storage()))
        fd = store._file.fd
        if os.fork() == 0:
            try:
                os.fstat(fd)
                print("open")
            except OSError:
                print("closed")
            sys.stdout.flush()
            os._exit(0)
        os.wait()
    """
    assert run(script, tmp_path) == "closed\n"


# ------------------------------------------------------------------ room and speed


class Allotment:
    """Brute force: a list with one entry per byte."""

    def __init__(self) -> None:
        self.taken: dict[int, int] = {}
        self.size = 0

    def free(self) -> set[int]:
        return set(range(self.size)) - {b for start, n in self.taken.items() for b in range(start, start + n)}


def test_nothing_has_its_place_anywhere_and_takes_none():
    space = FreeSpace(4)
    nowhere = space.take(0)
    taken = space.take(4)
    space.give(nowhere, 0)
    space.give(taken, 4)
    assert (space.take(4), space.take(1), space.take(0)) == (0, None, 0)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "give", "grow"]), st.integers(1, 9)), max_size=40))
def test_free_space_against_brute_force(steps):
    space, model = FreeSpace(), Allotment()
    for kind, amount in steps:
        if kind == "grow":
            space.grow(amount)
            model.size += amount
        elif kind == "give" and model.taken:
            start = sorted(model.taken)[amount % len(model.taken)]
            space.give(start, model.taken.pop(start))
        elif kind == "take":
            start = space.take(amount)
            fits = [s for s in range(model.size) if set(range(s, s + amount)) <= model.free()]
            assert start == (fits[0] if fits else None), "first fit"
            if start is None:
                need = space.missing_bytes(amount)
                assert need > 0
                tail = next(
                    (n for n in range(model.size) if model.size - 1 - n not in model.free()), model.size
                )
                assert need == amount - tail
            else:
                model.taken[start] = amount
        covered = [b for start, n in space.stretches() for b in range(start, start + n)]
        assert sorted(covered) == sorted(model.free())
        assert len(covered) == space.free_bytes
        assert all(
            a + n < b for (a, n), (b, _) in zip(space.stretches(), space.stretches()[1:], strict=False)
        ), "neighbours are joined"


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["write", "read", "drop", "take_back", "collect"]), st.integers(0, 30_000)),
        max_size=40,
    )
)
def test_any_order_of_calls_against_a_dictionary(tmp_path_factory, steps):
    store = DiskStore(tmp_path_factory.getbasetemp(), threads=3)
    held: list[tuple[swap_places.Ticket, bytes]] = []
    try:
        for kind, number in steps:
            if kind == "write":
                storage = some_storage(number, number)
                held.append((store.write_async(storage), content(storage)))
            elif kind == "collect":
                store.collect()
            elif held:
                ticket, want = held.pop(number % len(held))
                if kind == "read":
                    assert fetched(store, ticket) == want
                    held.append((ticket, want))
                elif kind == "take_back":
                    back = store.take_back(ticket)
                    assert (content(back) if back is not None else fetched(store, ticket)) == want
        for ticket, want in held:
            store.wait(ticket)
            assert fetched(store, ticket) == want
        assert store.failure is None
    finally:
        store.close()


def test_no_thread_before_the_first_write(tmp_path):
    before = threading.active_count()
    store = DiskStore(tmp_path)
    assert threading.active_count() == before
    store.wait(store.write_async(some_storage(1)))
    assert threading.active_count() == before + 4
    store.close()
    assert threading.active_count() == before
