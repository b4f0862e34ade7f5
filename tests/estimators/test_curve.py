"""An estimate's curve: its highest point is the estimate, and every point is what an independent count finds there."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from memopt.cli.main import run as run_memopt
from memopt.errors import BadFile
from memopt.estimators.curve import MOST_POINTS, curve_of
from memopt.estimators.recording import Recording, StorageRow
from memopt.reports.inputs import load_any, read_inputs
from memopt.reports.page.html import page

CATEGORIES = ("parameter", "activation", "temporary")


def a_run(count: int, seed: int = 0) -> Recording:
    """Storages that come and go at random."""
    dice = random.Random(seed)
    rows = [
        StorageRow(dice.randrange(1, 5000), CATEGORIES[i % 3], ("forward", "backward")[i % 2], "", "op", i)
        for i in range(count)
    ]
    events: list[int] = []
    live: list[int] = []
    for number in range(count):
        events.append(number + 1)
        live.append(number)
        while live and dice.random() < 0.45:
            events.append(-(live.pop(dice.randrange(len(live))) + 1))
    return Recording(
        target="cpu", rows=rows, events=events, marks=[("step", 5), ("backward", 7), ("step", 11)]
    )


@pytest.mark.parametrize("count", [1, 30, 399, 400, 5000])
@pytest.mark.parametrize("seed", range(3))
def test_every_point_is_what_is_live_then(count: int, seed: int) -> None:
    recording = a_run(count, seed)
    most, at = recording.peak()
    curve = curve_of(recording, at)
    assert curve.events == len(recording.events)
    assert len(curve.at) == len(curve.phase) <= MOST_POINTS
    assert curve.at == sorted(set(curve.at))
    assert curve.steps == [5, 11]
    totals = [sum(parts) for parts in zip(*curve.by_category.values(), strict=True)]
    assert max(totals) == most
    assert at in curve.at
    for place in range(0, len(curve.at), 37):
        live = recording.live_after(curve.at[place])
        for name, column in curve.by_category.items():
            assert column[place] == sum(
                recording.rows[i].size_bytes for i in live if recording.rows[i].category == name
            )


def test_nothing_recorded_is_no_point() -> None:
    curve = curve_of(Recording(target="cpu", rows=[], events=[]), 0)
    assert (curve.at, curve.by_category, curve.events) == ([], {}, 0)


@pytest.mark.script
def test_the_command_writes_it_and_the_page_draws_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nnet = torch.nn.Linear(64, 64)\nopt = torch.optim.Adam(net.parameters())\n"
        "for _ in range(4):\n    net(torch.randn(8, 64)).sum().backward()\n    opt.step()\n    opt.zero_grad()\n"
    )
    assert run_memopt(["estimate", "--json", "--device", "cpu", str(tmp_path / "train.py")]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    totals = [sum(parts) for parts in zip(*found["curve"]["by_category"].values(), strict=True)]
    assert max(totals) == found["allocated_bytes"] == sum(found["by_category"].values())
    assert len(found["curve"]["steps"]) == 4
    assert len(text.splitlines()) < 120, "the curve stands on one line"
    path = tmp_path / "estimate.json"
    path.write_text(text)
    assert 'data-figure="estimated0"' in page(read_inputs([path]), ["estimate.json"])
    for broken in (
        {**found["curve"], "at": [1]},
        {**found["curve"], "by_category": {"<script>": []}},
        {**found["curve"], "steps": ["x"]},
        [],
        "x",
    ):
        path.write_text(json.dumps({**found, "curve": broken}))
        if broken:
            with pytest.raises(BadFile):
                load_any(path)
