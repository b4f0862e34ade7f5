"""What stops the script in the middle of something while state, gradients and saved tensors are away: nothing is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from memopt.enforcers.optimizer import gradients_elsewhere, paged
from memopt.enforcers.optimizer.piece import Piece
from memopt.enforcers.optimizer.state_elsewhere import StateElsewhere
from memopt.enforcers.session import ApplySession, Options
from memopt.enforcers.tiers.swap import SwapFailed
from memopt.enforcers.verify.digests import digest
from memopt.instrument.loop import forget_parents
from memopt.instrument.script.signals import held
from memopt.plan import Plan
from tests.enforcers.optimizer.test_gradients_elsewhere import plan
from tests.enforcers.test_optimizer_in_pieces import STEPS, net
from tests.support.enforced import SWAP, Loop, enforced, plan_of, recorded, seeded
from tests.support.stepping import everything


@pytest.fixture(autouse=True)
def _all_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients_elsewhere, "LEAST_BYTES", 1)


def interrupting(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: int) -> list[int]:
    """Ctrl-C comes when `owner.name` has been called so often; how often it was."""
    original, called = getattr(owner, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        called[0] += 1
        if called[0] == calls:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return called


def forgiving(steps: int) -> list[str]:
    """A loop that goes on after a Ctrl-C and looks at everything there is."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 3, 9, 9), more=True).square().mean()
        try:
            loss.backward()
        except KeyboardInterrupt:
            found.append("in backward")
        try:
            optimizer.step()
        except KeyboardInterrupt:
            found += [digest(p.grad) for p in model.parameters() if p.grad is not None]
        try:
            optimizer.state_dict()
        except KeyboardInterrupt:
            optimizer.state_dict()
        found.append(digest(loss))
    return [*found, *everything(model, optimizer)]


@pytest.mark.parametrize(("owner", "name", "calls"), [(paged, "step_slices", 45), (Piece, "lay", 4), (paged, "put_in_order", 60)])  # fmt: skip
def test_a_ctrl_c_comes_when_the_update_is_whole(
    owner: Any, name: str, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the midst of a piece, and of state that is brought back: the step is as if the signal had come just after it."""
    plain = seeded(forgiving, STEPS)
    called = interrupting(monkeypatch, owner, name, calls)
    computed, _ = enforced(forgiving, plan(), tmp_path, STEPS)
    assert called[0] > calls
    assert [each for each in computed if each in plain] == plain


def test_a_step_that_raises_leaves_state_and_gradients_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, called = paged.step_slices, [0]

    def fails(*args: Any) -> Any:
        called[0] += 1
        if called[0] == 100:
            raise RuntimeError("out of memory")
        return original(*args)

    monkeypatch.setattr(paged, "step_slices", fails)
    seen: list[dict[str, Any]] = []

    def loop(steps: int) -> list[str]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 3, 9, 9), more=True).square().mean().backward()
            try:
                optimizer.step()
            except RuntimeError:
                assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
                seen.append(optimizer.state_dict())
        seen.append(optimizer.state_dict())
        return [digest(each) for each in model.parameters()]

    enforced(loop, plan(), tmp_path, STEPS)
    broken, whole = seen
    shapes = [
        {
            (number, name): value.shape
            for number, inner in each["state"].items()
            for name, value in inner.items()
        }
        for each in (broken, whole)
    ]
    assert shapes[0] == shapes[1]
    assert all(v.isfinite().all() for inner in whole["state"].values() for v in inner.values())


def stopped_in_backward(stop: Callable[[], None]) -> Loop:
    """Every third backward call of the loop is stopped half-way; what has come of it is used."""

    def loop(steps: int) -> list[str]:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(40, 40), nn.GELU()) for _ in range(4)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        found, now = [], [0]

        def hook(gradient: Tensor) -> None:
            if now[0] % 3 == 2:
                stop()

        for step in range(steps):
            now[0] = step
            optimizer.zero_grad()
            hidden = model[:2](torch.randn(64, 40))
            hidden.register_hook(hook)
            loss = model[2:](hidden).square().mean()
            try:
                loss.backward()
            except (ValueError, KeyboardInterrupt) as error:
                found.append(type(error).__name__)
            found += [digest(each.grad) for each in model.parameters() if each.grad is not None]
            optimizer.step()
            found.append(digest(loss))
        return [*found, *everything(model, optimizer)]

    return loop


def _raise() -> None:
    raise ValueError("of the script")


def _ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("stop", [_raise, _ctrl_c])
def test_a_backward_that_is_stopped_half_way(stop: Callable[[], None], tmp_path: Path) -> None:
    loop = stopped_in_backward(stop)
    made = plan_of(
        recorded(loop, tmp_path, warmup=3), lambda problem: dict.fromkeys(problem.candidates, SWAP)
    )
    assert made.actions
    both: Plan = msgspec.structs.replace(made, script_actions=plan().script_actions)
    plain = seeded(loop, 9)
    computed, outcome = enforced(loop, both, tmp_path, 9)
    assert computed == plain
    assert outcome.actions.done == outcome.actions.planned


@pytest.mark.parametrize(("sent", "reached"), [(1, True), (2, False)])
@pytest.mark.script
def test_signals_wait_for_the_end_of_the_block_and_a_second_ctrl_c_does_not(sent: int, reached: bool) -> None:
    done = []

    def block() -> None:
        with held():
            for _ in range(sent):
                signal.raise_signal(signal.SIGINT)
            done.append("end")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert bool(done) is reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_swap_folder_that_is_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State and saved tensors that go there free nothing where the device is the host's memory."""
    _, outcome = enforced(forgiving, plan(), tmp_path, STEPS)
    assert not [note for note in outcome.notes if "tmpfs" in note]
    monkeypatch.setattr("memopt.enforcers.tiers.disk.is_in_memory", lambda folder: True)
    _, outcome = enforced(forgiving, plan(), tmp_path, STEPS)
    (note,) = [note for note in outcome.notes if "tmpfs" in note]
    assert note.startswith(str(tmp_path))


def test_a_forked_child_is_let_be(tmp_path: Path) -> None:
    """It has gradients, state and hooks of its parent's: what it computes by itself is plain, state is whole, gradients that are away are told
    of, nothing hangs."""
    session = ApplySession(plan(late=True), Options(swap_dir=tmp_path, measure=False))
    session.install()
    try:
        model, optimizer = _after_three_steps()
        child = os.fork()
        if child == 0:
            os._exit(_in_child(model, optimizer))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        digest(optimizer.state_dict()["state"][0]["exp_avg"])
    finally:
        session.finished()


def test_a_forked_child_that_trains_on_sends_no_state_away(tmp_path: Path) -> None:
    """It is whole since before the fork, and the tier is the parent's: a traceback of memopt's was told."""
    session = ApplySession(plan(late=False), Options(swap_dir=tmp_path, measure=False))
    session.install()
    try:
        _, optimizer = _after_three_steps()
        assert session.pieces is not None
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                session.pieces.goes_on()
            except SwapFailed:
                os._exit(3)
            os._exit(0 if float(optimizer.state_dict()["state"][0]["step"]) == 3 else 4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        session.finished()


def _after_three_steps() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 3, 9, 9), more=True).square().mean().backward()
        optimizer.step()
    return model, optimizer


def _in_child(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    signal.alarm(20)
    forget_parents(ApplySession)
    twin = net()
    twin(torch.randn(8, 3, 9, 9), more=True).square().mean().backward()
    torch.optim.AdamW(twin.parameters(), lr=0.01).step()
    if any(p.grad is None for p in twin.parameters() if p.requires_grad):
        return 3
    try:
        _ = model.first.weight.grad
    except SwapFailed as error:
        if "forked" not in str(error.why):
            return 4
    else:
        return 5
    state = optimizer.state_dict()["state"][0]
    return 0 if float(state["step"]) == 3 and float(state["exp_avg_sq"].sum()) > 0 else 6


def test_state_is_whole_where_the_script_forks_and_stays_away_where_a_loader_does() -> None:
    looks: list[str] = []
    state = StateElsewhere({}, lambda: looks.append("memopt"), lambda: looks.append("script"))
    assert list(DataLoader([1.0, 2.0], num_workers=1, multiprocessing_context="fork")) == [1.0, 2.0]  # type: ignore[arg-type]
    assert looks == []
    child = os.fork()
    if child == 0:
        os._exit(len(looks))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert looks == ["script"]
    del state
