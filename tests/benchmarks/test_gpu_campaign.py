"""The GPU campaign as far as a CPU can run it: its jobs, its file, and going on where it ended."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import campaign, jobs, replays, workspaces
from benchmarks.gpu.jobs import JOBS
from tests.support import warm


@pytest.fixture(autouse=True)
def _dry(monkeypatch):
    monkeypatch.setenv("MEMOPT_CAMPAIGN_DRY", "1")


def test_every_part_has_jobs_that_end_within_ten_minutes():
    assert {job.part for job in JOBS.values()} == {"correctness", "steps", "runs", "headline", "workspaces"}
    assert all(job.limit_s < 600 for job in JOBS.values())


@pytest.mark.parametrize("which", ["host", "disk"])
def test_storages_go_through_a_tier_and_come_back(which):
    found = jobs.tier(which)
    assert (found["wrong"], found["failure"]) == (0, "")
    assert found["read_bytes"] > 0


def test_an_op_that_does_not_repeat_is_found(monkeypatch):
    mode = replays._Again("cpu")
    with mode:
        torch.ones(8).cumsum(0)
    mode.run_again()
    assert dict(mode.ops) == {"aten.cumsum.default": 1}
    assert not mode.differ
    with mode:
        torch.rand(8).mul(2.0)
    monkeypatch.setattr(mode, "_once_more", lambda func, given, rng, grad, way: [way.encode()])
    mode.run_again()
    assert set(mode.differ) == {"aten.mul.Tensor"}


def test_calls_are_run_again_with_gradients_on_or_off_as_they_were():
    """oneDNN's recurrent layers give other bits without, from 128 inputs on."""
    mode = replays._Again("cpu")
    layer = torch.nn.LSTM(128, 128)
    with mode:
        layer(torch.randn(16, 4, 128))
    mode.run_again()
    ways = mode.differ.get("aten.mkldnn_rnn_layer.default", {})
    assert all("[3]" in way for way in ways), "only the workspace, of which nobody reads the padding"


def test_a_call_is_run_again_where_torch_lets_nobody_set_cudnns_flags(monkeypatch):
    """As after the import of torch's samples, which the job draws from: all its large calls had failed."""
    monkeypatch.setattr(torch.backends, "__allow_nonbracketed_mutation_flag", False)
    mode, seen = replays._Again("cpu"), []

    def work():
        seen.append(torch.backends.cudnn.benchmark)
        return torch.ones(2, 3).mm(torch.ones(3, 2))

    for tuned in (False, True):
        replays._thrice(mode, "mm", work, tuned=tuned)
    assert not mode.errors
    assert mode.ops["aten.mm.default"] == 6
    assert seen == 3 * [False] + 3 * [True]


def test_replays_say_which_ops_they_had_no_time_for(monkeypatch):
    monkeypatch.setenv("MEMOPT_CAMPAIGN_DRY", "1")
    monkeypatch.setattr(replays, "_DRY_LIMIT_S", 0.0)
    monkeypatch.setattr(replays, "_large", lambda *_: None)
    found = replays.replays("float32")
    assert found["infos"] == 0
    assert found["left out"] == f"{found['infos_left']} of {found['infos_left']} ops: 0 s were up"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:Default grid_sample")
def test_large_samples_run_in_half_precision_on_a_cpu():
    """Images of a GPU's size had taken more than the whole job's time there."""
    mode = replays._Again("cpu")
    replays._large(mode, "cpu", torch.float16)
    assert mode.errors.keys() <= {"large rrelu"}
    assert not mode.differ


def test_a_campaign_goes_on_where_it_ended_and_tells_what_failed(tmp_path, monkeypatch, capsys):
    ran = []

    def alone(job, limit_s):
        ran.append(job.name)
        return ({"failed": "it broke"}, "why it broke") if job.name == "links" else ({"figure": 1}, "")

    monkeypatch.setattr(campaign, "_alone", alone)
    chosen = [JOBS["environment"], JOBS["links"]]
    assert campaign._campaign(chosen, "correctness", tmp_path, 100.0, 2) == 1
    assert campaign._campaign(chosen, "correctness", tmp_path, 100.0, 2) == 0
    assert ran == ["environment", "links"]
    lines = [json.loads(line) for line in (tmp_path / "correctness.jsonl").read_text().splitlines()]
    assert [line["job"] for line in lines] == ["environment", "links"]
    assert "why it broke" in (tmp_path / "correctness.log").read_text()
    assert "1 of 2 failed: links" in capsys.readouterr().out


def test_any_job_may_fail_and_the_campaign_goes_on(tmp_path, monkeypatch, capsys):
    """`cudnn attention` puts what it found into words of its own, and the end of its time had ended the campaign."""
    monkeypatch.setattr(campaign, "_alone", lambda job, limit_s: ({"failed": "not done in 1 s"}, ""))
    assert campaign._campaign(list(JOBS.values()), "correctness", tmp_path, 100.0, 2) == len(JOBS)
    assert capsys.readouterr().out.count("FAILED: not done in 1 s") == len(JOBS)


@pytest.mark.script
def test_every_kind_of_plan_runs_on_the_late_device(monkeypatch):
    """In small: one example, the kinds that copy. `--dry-run` does all of them."""
    monkeypatch.setattr(jobs, "KINDS", ("swap-host", "mixed"))
    run = lambda command, *, cwd, env, **_: warm.python(command[1:], cwd=cwd, env=env)  # noqa: E731
    monkeypatch.setattr(jobs, "subprocess", SimpleNamespace(run=run))
    found = jobs.plans("lstm")
    assert "failed" not in found, found
    for kind in jobs.KINDS:
        assert found[kind]["actions"]["done"] > 10
        assert found[kind]["moved"] > 10
        assert found[kind]["verify"] == "identical"


def test_a_gpus_attention_is_looked_at_in_all_its_forms(monkeypatch):
    monkeypatch.setattr(replays, "SHAPES", ((64, 128),))
    found = replays.attention()
    assert len(found) == 8
    assert all(each["ops"] and not each["differ"] for each in found.values())
    assert replays.attention_words(found).startswith("0 of 8 ran")


def test_a_job_that_needs_a_gpu_says_why_it_is_left_out():
    assert "GPU" in jobs.links()["left out"]
    assert "GPU" in workspaces.stages()["left out"]


def test_a_dry_run_does_every_job_of_every_part(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(campaign, "_alone", lambda job, limit_s: ran.append(job.name) or ({"figure": 1}, ""))
    monkeypatch.setattr("sys.argv", ["campaign", "--dry-run", "--limit-s", "0"])
    monkeypatch.setattr(jobs.Job, "words", lambda self, found: "done", raising=False)
    assert campaign.main() == 0
    assert sorted(ran) == sorted(JOBS)
    assert capsys.readouterr().out.count("none failed") == 5
