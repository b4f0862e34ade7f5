"""What a script does only after the steps that are always followed: counted where that is quick and harms nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from memopt.errors import MemoptError
from memopt.estimators.estimate import Estimate, estimate_script
from memopt.estimators.fake.script import aside as aside_module
from memopt.estimators.fake.script.aside import Aside
from memopt.reports.estimate import print_estimate

HEAD = """
import json, sys, torch
model = torch.nn.Linear(1000, 1000, bias=False)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def step(rows):
    optimizer.zero_grad()
    model(torch.randn(rows, 1000)).sum().backward()
    optimizer.step()
"""
ALIKE = HEAD + "for _ in range(6): step(100)\n"
WEIGHTS, ROW = 2 * 4_000_000, 4_000
"""Of the weight and its gradient; of a row of the batch, or of what comes out."""


@pytest.fixture
def estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(tmp_path)

    def run(text: str, **more: Any) -> Estimate:
        Path("train.py").write_text(text)
        return estimate_script(["train.py"], device="cpu", **more)

    return run


def peak(found: Estimate) -> int:
    return found.allocated_bytes


def test_the_largest_of_batches_of_different_sizes_may_come_late(estimated: object) -> None:
    """The gradient of a sum is one number, expanded, which the product with it copies: two of what comes out."""
    text = HEAD + "for rows in (100, 200, 150, 300, 250, 700, 50): step(rows)\n"
    assert peak(estimated(text)) - peak(estimated(text, steps=3)) == 2 * ROW * (700 - 200)  # type: ignore[operator]


def test_an_evaluation_after_training_counts(estimated: object) -> None:
    text = ALIKE + "with torch.no_grad(): model(torch.randn(5000, 1000))\n"
    late = estimated(text)  # type: ignore[operator]
    assert peak(late) == WEIGHTS + 2 * ROW * 5000
    assert late.unfollowed == ""
    early = estimated(text, steps=3)  # type: ignore[operator]
    assert peak(early) < peak(late)
    assert early.unfollowed.startswith("followed up to optimizer step 3: what only comes after that")
    assert peak(estimated(text, steps=3, further=True)) == peak(late)  # type: ignore[operator]


@pytest.mark.parametrize(
    "before",
    [
        "for _ in range(8): torch.nn.Linear(10, 10)(torch.ones(3, 10)).sum().backward()\n",
        "torch.autograd.gradcheck(torch.sin, (torch.ones(5, 4, dtype=torch.double, requires_grad=True),))\n",
    ],
)
def test_backward_calls_before_the_optimizer_is_made_are_not_the_training(
    estimated: object, before: str
) -> None:
    assert peak(estimated("import torch\n" + before + ALIKE)) == peak(estimated(ALIKE))  # type: ignore[operator]


EVALUATE = """
import atexit, functools, threading
from concurrent.futures import ThreadPoolExecutor
def evaluate(rows):
    with torch.no_grad(): model(torch.randn(rows, 1000))
class Evaluation(threading.Thread):
    def run(self): evaluate(5000)
def in_a_thread(target):
    thread = threading.Thread(target=target, args=(5000,))
    thread.start()
    thread.join()
"""
ASIDE = {
    "a thread": "in_a_thread(evaluate)",
    "a thread of its own class": "thread = Evaluation(); thread.start(); thread.join()",
    "a thread that nobody waits for": "threading.Thread(target=functools.partial(evaluate, 5000)).start()",
    "at exit": "atexit.register(evaluate, 5000); atexit.register(evaluate, 10)",
    "at exit, by name": "atexit.register(functools.partial(evaluate, 5000)); sys.exit(0)",
    "a thread at exit": "atexit.register(in_a_thread, evaluate)",
}


@pytest.mark.parametrize("how", ASIDE)
def test_an_evaluation_in_a_thread_or_at_exit_counts(how: str, estimated: object) -> None:
    found = estimated(ALIKE + EVALUATE + ASIDE[how])  # type: ignore[operator]
    assert peak(found) == WEIGHTS + 2 * ROW * 5000
    assert found.unfollowed == ""
    assert not found.partial


def test_what_is_no_longer_to_be_done_at_exit_does_not_count(estimated: object) -> None:
    more = "atexit.register(evaluate, 5000); atexit.unregister(evaluate); atexit.register(evaluate, 4000)\n"
    found = estimated(ALIKE + EVALUATE + more)  # type: ignore[operator]
    assert peak(found) == WEIGHTS + 2 * ROW * 4000


def test_a_handler_that_fails_is_told_as_not_followed(estimated: object) -> None:
    text = ALIKE + EVALUATE + "atexit.register(lambda: evaluate(5000) or 1 / 0)\n"
    assert estimated(text).unfollowed.startswith("followed up to optimizer step 3:")  # type: ignore[operator]


def test_a_thread_that_waits_for_its_starter_ends_the_run(estimated: object) -> None:
    """Not for long, and what was seen before counts."""
    text = ALIKE + EVALUATE + (
        "evaluate(3000)\n"
        "event = threading.Event()\n"
        "threading.Thread(target=lambda: event.wait() and evaluate(5000), daemon=True).start()\n"
        "event.set()\n"
    )  # fmt: skip
    found = estimated(text)  # type: ignore[operator]
    assert peak(found) == WEIGHTS + 2 * ROW * 3000
    assert found.unfollowed.startswith("followed up to optimizer step 6:")


def test_who_waits_for_a_thread_that_failed_is_told_while_the_script_runs_only(monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """What was recorded may take longer to be put together than a script is given."""
    told: list[int] = []
    monkeypatch.setattr(aside_module.signal, "pthread_kill", lambda thread, signal: told.append(signal))
    monkeypatch.setattr(aside_module, "_AFTER_FAILURE_S", 0.0)
    for is_over in (True, False):
        aside = Aside(SimpleNamespace(op_count=5))  # type: ignore[arg-type]
        if is_over:
            aside.end()
        aside._end_if_all_waits(ValueError())
        assert (aside.failure is None) == is_over
        assert len(told) == (not is_over)


def test_a_script_that_waits_for_a_thread_that_failed_is_not_waited_for(estimated: object) -> None:
    """For batches that it was to prepare; what it asks for here, no fake tensor has."""
    text = HEAD + (
        "import queue, threading\n"
        "batches, data = queue.Queue(), torch.randn(4000, 1000)\n"
        "threading.Thread(target=lambda: batches.put(data[: int(data.sum().item())]), daemon=True).start()\n"
        "while True: step(len(batches.get()))\n"
    )
    with pytest.raises(MemoptError, match="could not be followed") as raised:
        estimated(text)  # type: ignore[operator]
    assert "train.py:11: threading.Thread(target=lambda" in str(raised.value)


@pytest.mark.parametrize(
    "how",
    ["in_a_thread(evaluate)\nfor _ in range(6): step(100)\n",
     "for _ in range(6): step(100)\nwith ThreadPoolExecutor(1) as pool: pool.submit(evaluate, 5000).result()\n"],
    ids=["before the loop", "in a pool"],
)  # fmt: skip
def test_a_thread_that_is_not_followed_is_told_in_the_first_line(how: str, estimated: object) -> None:
    found = estimated(HEAD + EVALUATE + how)  # type: ignore[operator]
    line = (HEAD + EVALUATE).splitlines().index(
        "    with torch.no_grad(): model(torch.randn(rows, 1000))"
    ) + 1
    assert found.unfollowed == f"what the script computes in a thread (train.py:{line}) is not counted"


def test_memory_of_numpys_counts_where_an_op_reads_it(estimated: object) -> None:
    """As `memopt profile` counts it: a storage is a storage, whoever allocated it."""
    own, foreign = "torch.randn(3000, 1000)", "torch.from_numpy(numpy.zeros((3000, 1000), numpy.float32))"
    text = (
        "import numpy\n"
        + HEAD
        + "x = ROWS\nfor _ in range(4):\n    model(x).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
    )
    assert peak(estimated(text.replace("ROWS", own))) == peak(estimated(text.replace("ROWS", foreign)))  # type: ignore[operator]


LARGE = """
def large(rows):
    with torch.no_grad():
        for _ in range(400): torch.ones(2) + torch.ones(2)
    step(rows)
"""


def test_an_evaluation_after_large_steps_counts(estimated: object) -> None:
    """The second step leaves memory as the first did: steps are known by then, and the evaluation is not."""
    text = (
        HEAD
        + LARGE
        + "for _ in range(3): large(100)\n"
        + "with torch.no_grad(): model(torch.randn(5000, 1000))\n"
    )
    found = estimated(text)  # type: ignore[operator]
    assert peak(found) == WEIGHTS + 2 * ROW * 5000
    assert found.unfollowed == ""


def test_an_evaluation_after_an_epoch_of_many_batches_counts(estimated: object) -> None:
    text = (
        HEAD
        + LARGE
        + (
            "loader = torch.utils.data.DataLoader(torch.ones(5000, 1), batch_size=1)\n"
            "for _ in loader: large(100)\n"
            "with torch.no_grad():\n"
            "    for batch in torch.utils.data.DataLoader(torch.ones(12, 1), batch_size=4): model(torch.randn(1000 * len(batch), 1000))\n"
            "for _ in range(100): large(100)\n"
        )
    )
    found = estimated(text)  # type: ignore[operator]
    assert peak(found) >= WEIGHTS + 2 * ROW * 4000
    assert any("epochs were cut short" in note for note in found.notes)
    assert found.unfollowed.startswith("followed up to optimizer step ")


def test_the_first_line_says_up_to_where_a_script_was_followed(
    estimated: object, capsys: pytest.CaptureFixture[str]
) -> None:
    found = estimated(ALIKE, steps=3)  # type: ignore[operator]
    print_estimate(Console(width=200), found, "train.py")
    first = capsys.readouterr().out.splitlines()[0]
    assert first == (
        "train.py on cpu, followed up to optimizer step 3: what only comes after that (evaluation, checkpoints) is not counted"
    )


def test_steps_after_a_long_rollout_do_not_end_the_run(estimated: object) -> None:
    rollout = "with torch.no_grad():\n    for _ in range(2500): torch.ones(2)\n"
    text = HEAD + rollout + "step(100)\nstep(100)\n" + rollout + "step(100)\nstep(3000)\n"
    assert peak(estimated(text)) > WEIGHTS + ROW * 3000  # type: ignore[operator]


def test_nothing_is_written_after_the_steps_asked_for(estimated: object) -> None:
    Path("results.json").write_text("real")
    text = ALIKE + (
        "y = model(torch.randn(3000, 1000)).detach()\n"
        "print(sys.path, file=open('/dev/null', 'w'))\n"
        "try:\n    json.dump({}, open('results.json', 'w'))\nexcept Exception: pass\n"
        "model(torch.randn(9000, 1000))\n"
    )
    found = estimated(text)  # type: ignore[operator]
    assert Path("results.json").read_text() == "real"
    assert peak(found) == WEIGHTS + ROW * 2 * 3000
    assert not found.partial


@pytest.mark.parametrize(
    "later",
    [
        "model(torch.randn(9000, 999))",
        "x = torch.randn(9000, 1000); model(x[x[:, 0] > 0])",
        "import time\nwhile True: time.sleep(0.01)",
    ],
    ids=["fails", "depends on data", "does not end"],
)
def test_what_comes_later_is_left_out_where_it_cannot_be_told(
    estimated: object, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    text = ALIKE + "torch.ones(9000, 1000)\n" + later
    asked = estimated(text, steps=3)  # type: ignore[operator]
    if "sleep" in later:
        text = text.replace("import json", "from memopt.estimators.fake.script import ending; ending._SECONDS = 0.2\nimport json")  # fmt: skip
    found = estimated(text)  # type: ignore[operator]
    assert (peak(found), found.partial, found.bounded) == (peak(asked), False, [])
    assert found.left_out == asked.left_out


def test_one_more_large_step_like_those_before_is_the_last(estimated: object) -> None:
    text = HEAD + LARGE + "for _ in range(50): large(100)\ntorch.ones(9000, 1000)\n"
    found = estimated(text)  # type: ignore[operator]
    assert found.unfollowed.startswith("followed up to optimizer step 3:")
    assert peak(found) < WEIGHTS + 2 * ROW * 1000
