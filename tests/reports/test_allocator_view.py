"""The map of the allocator's memory: the bytes are the snapshot's own, and of a profile those that the model places at its peak."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from memopt.device import Device
from memopt.estimators.snapshot.read import read_snapshot
from memopt.reports.inputs import Inputs, Run, read_inputs
from memopt.reports.page import allocator_figure
from memopt.reports.page.allocator_view import FREE, ROUNDING, AllocatorView, at_the_peak
from memopt.reports.page.html import page
from memopt.reports.page.moment import peak_of
from memopt.trace import CATEGORIES, Trace
from tests.estimators.test_snapshot import snapshot_of
from tests.support.large_trace import large_trace
from tests.support.layers_trace import build, chain
from tests.support.toy_trace import toy_trace

MIB = 1 << 20


def on_a_gpu(trace: Trace, settings: str = "") -> Trace:
    return msgspec.structs.replace(trace, device=Device(kind="cuda", allocator=settings))


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> tuple[AllocatorView, Path]:
    path = snapshot_of(tmp_path_factory.mktemp("snapshot"), "medium_512_training")
    found = read_inputs([path]).runs[0].layout
    assert found is not None
    return found, path


def test_the_map_of_a_snapshot_is_the_snapshot(view: tuple[AllocatorView, Path]) -> None:
    found, path = view
    device = max(read_snapshot(path).devices, key=lambda each: each.reserved_bytes)
    assert not found.modelled
    assert len(found.segments) == len(device.segments)
    assert found.total_bytes() == device.reserved_bytes
    assert found.total_bytes(*CATEGORIES, ROUNDING) == device.allocated_bytes
    assert found.fragmentation == 1 - found.total_bytes(*CATEGORIES) / device.reserved_bytes
    free = [b.size_bytes for s in device.segments for b in s.blocks if not b.live]
    assert found.largest_free_bytes == max(free)


def test_the_picture_has_every_byte_once_and_within_its_row(view: tuple[AllocatorView, Path]) -> None:
    figure = allocator_figure.drawn(view[0])
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert sum(sum(trace.x) for trace in bars) == view[0].total_bytes()
    width = figure.layout.xaxis.range[1]
    rows: dict[int, list[tuple[int, int]]] = {}
    for trace in bars:
        for row, start, length in zip(trace.y, trace.base, trace.x, strict=True):
            rows.setdefault(row, []).append((start, start + length))
    for spans in rows.values():
        spans.sort()
        assert all(end <= after for (_, end), (after, _) in itertools.pairwise(spans))
        assert spans[0][0] >= 0
        assert spans[-1][1] <= width
    assert len(rows) == 16


def test_a_profile_of_a_gpu_is_placed_by_the_model() -> None:
    trace = on_a_gpu(build(chain([5 * MIB, 700, 30 * MIB, 512])))
    found = at_the_peak(trace)
    assert found is not None
    assert found.modelled
    peak = peak_of(trace)
    placed = sorted(piece.storage for piece in found.pieces() if piece.storage >= 0)
    assert placed == sorted(held.storage for held in peak.held if held.size_bytes)
    assert found.total_bytes(*CATEGORIES) == peak.named_bytes
    assert found.total_bytes(ROUNDING) == sum(-held.size_bytes % 512 for held in peak.held)
    assert {segment.size_bytes for segment in found.segments} <= {2 * MIB, 20 * MIB, 30 * MIB, 32 * MIB}


@pytest.mark.parametrize("settings", ["native", "", "expandable_segments:True", "max_split_size_mb:64"])
def test_any_settings_place_the_same_tensors(settings: str) -> None:
    trace = on_a_gpu(large_trace(300), settings)
    found = at_the_peak(trace)
    assert found is not None
    assert found.total_bytes(*CATEGORIES) == peak_of(trace).named_bytes
    assert found.total_bytes() >= found.total_bytes(*CATEGORIES, ROUNDING)


def test_where_no_such_allocator_was_there_is_no_map() -> None:
    assert at_the_peak(toy_trace()) is None
    assert at_the_peak(on_a_gpu(toy_trace(), "cudaMallocAsync")) is None
    text = page(Inputs(runs=[Run("toy", toy_trace())]), ["toy"])
    assert 'id="allocator-card"' not in text


def test_the_page_tells_what_is_free_and_what_it_is_a_model_of(view: tuple[AllocatorView, Path]) -> None:
    text = page(read_inputs([view[1]]), ["snapshot.pickle"])
    card = text[text.index('id="allocator-card"') :][:6000]
    assert "when the snapshot was written" in card
    assert "expandable_segments:True is worth trying" in card
    assert "model of PyTorch" not in card
    text = page(Inputs(runs=[Run("toy", on_a_gpu(toy_trace()))]), ["toy"])
    assert "model of PyTorch" in text[text.index('id="allocator-card"') :]


def test_too_small_to_be_seen_is_drawn_together() -> None:
    from memopt.reports.page.allocator_view import Piece, Segment

    pieces = tuple(Piece(512, ("activation", FREE)[i % 2]) for i in range(40_000))
    view = AllocatorView("then", modelled=False, segments=(Segment(512 * 40_000, True, pieces),))
    figure = allocator_figure.drawn(view)
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert sum(len(trace.x) for trace in bars) < 15_000
    assert sum(sum(trace.x) for trace in bars) == view.total_bytes()
