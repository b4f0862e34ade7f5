"""`profile --offload` records the same iteration as without, with the saved tensors out of the way meanwhile."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memopt.enforcers.tiers.disk import DiskStore
from memopt.enforcers.tiers.swap_places import Ticket
from memopt.instrument import one_stream
from memopt.instrument.script.command import Command
from memopt.instrument.script.runner import StopScript
from memopt.profiler import offload
from memopt.profiler.recordings import Wanted
from memopt.profiler.session import ProfileSession
from memopt.trace import Trace
from tests.enforcers.test_second_derivatives import forces, meta_learning, physics_informed
from tests.support.enforced import Loop, problem_of, recorded, seeded


def _loop(steps: int) -> list[str]:
    blocks = [
        nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)
    ]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(512, 128)).pow(2).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item().hex())
    return found


def _offloaded(folder: Path, seen: list[str], loop: Loop = _loop, **wanted: int) -> tuple[Trace, DiskStore]:
    script = folder / "loop.py"
    script.write_text("# run in process\n")
    stores: list[DiskStore] = []

    def open_tier() -> DiskStore:
        stores.append(DiskStore(folder))
        return stores[0]

    session = ProfileSession(
        Command((str(script),)), Wanted(swap_dir=folder, offload=open_tier, keep_running=True, **wanted)
    )
    session.install()
    with contextlib.suppress(StopScript):
        seen += seeded(loop, 5)
    trace = session.finished()
    assert trace is not None
    return trace, stores[0]


@pytest.mark.filterwarnings("ignore")
def test_the_trace_is_the_same_and_so_are_the_losses(tmp_path: Path) -> None:
    plain = recorded(_loop, tmp_path)
    seen: list[str] = []
    trace, store = _offloaded(tmp_path, seen)
    assert seen == seeded(_loop, 5)
    assert not trace.partial
    assert store.written_bytes > 3 * 10 * 512 * 128 * 4
    assert [trace.op_name(op) for op in range(trace.op_count)] == [
        plain.op_name(op) for op in range(plain.op_count)
    ]
    assert list(trace.ops.flags) == list(plain.ops.flags)  # what comes back was written by nobody
    mine, theirs = _made(trace), _made(plain)
    assert [row[:2] for row in mine] == [row[:2] for row in theirs]
    assert max(abs(a[2] - b[2]) for a, b in zip(mine, theirs, strict=True)) <= 2
    assert abs(trace.peak_bytes - plain.peak_bytes) <= 0.03 * plain.peak_bytes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loop", [physics_informed, forces, meta_learning])
def test_what_a_backward_saves_that_makes_a_graph_is_sent_away_too(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 1024)
    plain = recorded(loop, tmp_path)
    seen: list[str] = []
    trace, store = _offloaded(
        tmp_path, seen, loop, under_way_bytes=0
    )  # or copies hold some ops longer what they copy
    assert seen == seeded(loop, 5)
    assert store.written_bytes > plain.peak_bytes / 2
    for name in ("ordinal", "packed_before", "unpacks", "plain", "shape"):
        assert getattr(trace.slots, name) == getattr(plain.slots, name), name
    assert trace.ops.flags == plain.ops.flags
    floor, its_floor = problem_of(trace)[1].floor_bytes, problem_of(plain)[1].floor_bytes
    assert abs(floor - its_floor) < 0.12 * plain.peak_bytes
    assert its_floor < 0.7 * plain.peak_bytes


def _made(trace: Trace) -> list[tuple[int, int, int]]:
    """(birth, bytes, death) of what the iteration made."""
    storages = trace.storages
    rows = zip(storages.birth_op, storages.size_bytes, storages.death_op, strict=True)
    return [row for row in rows if row[0] >= 0]


@pytest.mark.filterwarnings("ignore")
def test_a_script_that_runs_ahead_of_the_copies_is_held_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 3 * 512 * 128 * 4
    write, write_piece = DiskStore.write_async, DiskStore._write_piece
    tickets: list[Ticket] = []
    under_way: list[int] = []

    def counted(store: DiskStore, storage: torch.UntypedStorage) -> Ticket:
        under_way.append(sum(ticket.nbytes for ticket in tickets if ticket.source is not None))
        tickets.append(write(store, storage))
        return tickets[-1]

    def slow(*args: Any) -> None:
        time.sleep(0.01)
        write_piece(*args)

    monkeypatch.setattr(DiskStore, "write_async", counted)
    monkeypatch.setattr(DiskStore, "_write_piece", slow)
    seen: list[str] = []
    trace, _ = _offloaded(tmp_path, seen, under_way_bytes=most)
    assert not trace.partial
    assert len(tickets) > 20
    assert 0 < max(under_way) <= most


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("another", ["saves", "goes on"])
def test_what_a_second_stream_has_to_do_with_stays(
    another: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy waits for the stream that is current, which need not have waited for the one that made the tensor, or that reads it."""
    _, alone = _offloaded(tmp_path, [])
    pack, here = offload.OffloadingRecorder.pack, ["first"]

    def packed(recorder: Any, tensor: torch.Tensor) -> Any:
        here[0] = "second" if another == "saves" and recorder.slots else "first"
        try:
            return pack(recorder, tensor)
        finally:
            here[0] = "first" if another == "saves" else "second"

    monkeypatch.setattr(offload.OffloadingRecorder, "pack", packed)
    monkeypatch.setattr(one_stream, "current_stream", lambda device: here[0])
    seen: list[str] = []
    trace, store = _offloaded(tmp_path, seen)
    assert seen == seeded(_loop, 5)
    assert store.written_bytes < 0.2 * alone.written_bytes, "no more than the first of each iteration"
    assert any("several streams" in note for note in trace.notes)
