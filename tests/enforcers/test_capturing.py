"""While CUDA records a graph nothing is taken away, no copy is queued and no event is asked."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from memopt.enforcers.capturing import Capturing
from memopt.enforcers.session import ApplySession, Options
from memopt.enforcers.tiers.disk import DiskStore
from tests.support.enforced import everything, plan_of, recorded, seeded


def test_a_cpu_captures_nothing_and_a_gpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    assert not Capturing("cpu").now()
    assert Capturing("cpu").why_keep() == ""
    gpu = Capturing("cuda")
    assert gpu.now()
    assert gpu.why_keep() == "a CUDA graph was being captured"
    capturing[0] = False
    assert not gpu.now()
    assert gpu.why_keep() == ""


def test_memory_that_compiled_graphs_share_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    container = SimpleNamespace(tree_manager=None)
    trees = SimpleNamespace(local=SimpleNamespace(tree_manager_containers={0: container}))
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    assert Capturing("cuda").why_keep() == ""
    container.tree_manager = object()
    assert "cudagraph trees" in Capturing("cuda").why_keep()
    assert not Capturing("cuda").now()
    assert Capturing("cpu").why_keep() == ""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_names_that_are_asked_are_torchs() -> None:
    from torch._inductor import cudagraph_trees

    assert cudagraph_trees.local.tree_manager_containers == {}
    assert "tree_manager" in vars(cudagraph_trees.TreeManagerContainer(0))


@pytest.mark.parametrize("kind", ["swap", "recompute"])
def test_a_captured_iteration_runs_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    recording = [False]
    monkeypatch.setattr(Capturing, "now", lambda self: recording[0])
    monkeypatch.setattr(
        Capturing, "why_keep", lambda self: "a CUDA graph was being captured" if recording[0] else ""
    )
    for name in ("write_async", "read_async", "wait", "collect", "take_back"):
        original = getattr(DiskStore, name)
        monkeypatch.setattr(DiskStore, name, lambda *args, call=original: (touched(), call(*args))[1])

    def touched() -> None:
        assert not recording[0], "the tier was touched"

    def loop(steps: int, captured: tuple[int, ...] = ()) -> list[str]:
        model = torch.nn.Sequential(
            *[layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
        )
        optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(512, 64)
        found = []
        for step in range(steps):
            recording[0] = step in captured
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item().hex())
        recording[0] = False
        return found

    plan = plan_of(recorded(loop, tmp_path), everything(kind))
    plain = seeded(loop, 6)
    for captured in ((2, 3), (0, 1, 2, 3, 4, 5)):
        session = ApplySession(plan, Options(swap_dir=tmp_path, measure=False))
        session.install()
        enforced = seeded(functools.partial(loop, captured=captured), 6)
        outcome = session.finished()
        assert enforced == plain
        assert outcome is not None
        assert (outcome.actions.done > 0) == (captured == (2, 3))
    assert any("a CUDA graph was being captured" in note for note in outcome.notes)
