"""The examples under plans that swap, on the late device: the same bits, and no race, whenever the copies come."""

from __future__ import annotations

import contextlib
import functools
import io
import random
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.enforcers.tiers import host, swapped
from memopt.enforcers.verify.digests import digest
from memopt.estimators.simulator.decision import Decision
from memopt.plan import Plan
from tests.cli.test_apply_cli import ROOT
from tests.late.late_device import Race, World
from tests.late.late_session import LateCpu, run_late
from tests.memopt.test_examples import EXAMPLES, SMALL
from tests.support.enforced import Loop, plan_of, recorded, seeded
from tests.support.mutants import mutant

STEPS = 4
SHORT = ("dcgan", "lstm", "resnet")
"""All of them, with more seeds: `benchmarks.late_schedules --sessions`."""
LSTM = ROOT / "examples" / "lstm.py"

pytestmark = pytest.mark.filterwarnings("ignore")


def example(script: Path) -> Loop:
    """steps -> what it prints, and digests of all parameters and gradients at each step."""

    def loop(steps: int) -> list[str]:
        seen: list[str] = []

        def stepped(optimizer: Optimizer, *_: object) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    seen.append(digest(parameter.detach()))
                    if parameter.grad is not None:
                        seen.append(digest(parameter.grad))

        hook = register_optimizer_step_post_hook(stepped)
        before, sys.argv = sys.argv, [str(script), "--steps", str(steps), *SMALL[script.name]]
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                runpy.run_path(str(script), run_name="__main__")
        finally:
            hook.remove()
            sys.argv = before
        return [*seen, printed.getvalue()]

    return loop


def swapped_anyhow(seed: int) -> Callable[[Problem], Decisions]:
    """Most storages are swapped, to either tier, and come back at any trigger."""

    def choose(problem: Problem) -> Decisions:
        draw = random.Random(seed)
        chosen = {}
        for storage in problem.candidates:
            use = problem.view.saved[storage].first_use
            triggers = [-1, *(int(op) for op in problem.triggers if op <= use)][-6:]
            if draw.random() < 0.8:
                tier = "host" if draw.random() < 0.7 else "disk"
                chosen[storage] = Decision(kind="swap", tier=tier, prefetch_op=draw.choice(triggers))
        return chosen

    return choose


def planned(script: Path, folder: Path, seed: int = 0) -> tuple[Loop, Plan]:
    """The example as a loop, and a plan for it on a machine with links."""
    loop = example(script)
    trace = recorded(loop, folder)
    links = ("host_out_bytes_per_s", "host_in_bytes_per_s", "disk_out_bytes_per_s", "disk_in_bytes_per_s")
    device = msgspec.structs.replace(trace.device, **dict.fromkeys(links, 1e10))
    return loop, plan_of(msgspec.structs.replace(trace, device=device), swapped_anyhow(seed))


@pytest.fixture(scope="module")
def lstm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Loop, Plan, list[str]]:
    """The loop, a plan for it, and what a plain run of it computes."""
    loop, plan = planned(LSTM, tmp_path_factory.mktemp("lstm"))
    return loop, plan, seeded(loop, STEPS)


@pytest.mark.parametrize(
    "script", [path for path in EXAMPLES if path.stem in SHORT], ids=lambda path: path.stem
)
def test_an_example_computes_the_same_whenever_the_copies_come(script: Path, tmp_path: Path) -> None:
    same_bits(script, tmp_path, seed=1)


def same_bits(script: Path, folder: Path, seed: int) -> int:
    """The swaps of a plan under which the example computes what it computes plain."""
    loop, plan = planned(script, folder, seed)
    plain = seeded(loop, STEPS)
    with pytest.MonkeyPatch.context() as patch:
        computed, outcome, device, kernels = run_late(loop, plan, folder, STEPS, patch, seed)
    assert computed == plain
    assert outcome.actions.done == len(plan.actions) >= 10
    assert {action.tier for action in plan.actions} == {"host", "disk"}
    assert kernels.noted > 100 * STEPS
    assert device.uses_told > STEPS * len(plan.actions)
    return len(plan.actions)


def test_out_of_memory_in_prefetches_costs_no_bit(
    lstm: tuple[Loop, Plan, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, plan, plain = lstm
    asked, refused = [0], [0]

    def allocate(nbytes: int, device: torch.device) -> torch.UntypedStorage:
        asked[0] += 1
        if asked[0] % 3 == 0:  # whoever asks again has it
            refused[0] += 1
            raise torch.OutOfMemoryError("out of memory, as the test wants it")
        return torch.UntypedStorage(nbytes, device=device)

    monkeypatch.setattr(swapped, "UntypedStorage", allocate)
    computed, outcome, _, _ = run_late(loop, plan, tmp_path, STEPS, monkeypatch, seed=2)
    assert computed == plain
    assert outcome.actions.done == len(plan.actions)
    assert refused[0] > STEPS


def test_while_a_graph_is_captured_the_tiers_are_left_alone(
    lstm: tuple[Loop, Plan, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The late device bears neither a copy nor a question then."""
    loop, plan, plain = lstm
    worlds: list[World] = []
    steps = [0]

    def stepped(*_: object) -> None:
        steps[0] += 1
        if worlds:
            worlds[0].capturing = steps[0] in (2,)

    hook = register_optimizer_step_post_hook(stepped)
    try:
        computed, outcome, _, _ = run_late(
            loop, plan, tmp_path, STEPS, monkeypatch, seed=3, told=lambda device: worlds.append(device.world)
        )
    finally:
        hook.remove()
    assert computed == plain
    assert steps[0] == STEPS
    assert outcome.actions.done > 0


BROKEN = {
    "who asks waits for the arrival": ("stream.wait_event(self.copy.event)", "pass"),
    "dropping at once has the stream wait": ("self._users.current().wait_event(ticket.copied)", "pass"),
    "copies out wait for the kernels before them": ("self._out.wait_event(ready)", "pass"),
    "copies in wait for the memory's former owner": ("self._in.wait_event(ready)", "pass"),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_run_without_one_of_the_tiers_rules_fails(
    rule: str, lstm: tuple[Loop, Plan, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, plan, plain = lstm
    changed: Any = mutant(host, *BROKEN[rule])

    def run() -> None:
        for seed in range(6):
            told = functools.partial(set_row_of, changed)
            computed, *_ = run_late(loop, plan, tmp_path, STEPS, monkeypatch, seed, told=told)
            assert computed == plain

    monkeypatch.setattr(host, "HostStore", changed.HostStore)
    with pytest.raises((AssertionError, Race)):
        run()


def set_row_of(module: Any, device: LateCpu) -> None:
    module.row_of = device.row_of


@pytest.mark.parametrize("seed", range(2))
def test_starts_that_move_from_one_iteration_to_the_next_change_nothing(
    lstm: tuple[Loop, Plan, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    loop, plan, plain = lstm
    roomy = [msgspec.structs.replace(each, room_bytes=1 << 40) for each in plan.moments]
    plan = msgspec.structs.replace(plan, moments=roomy, budget_bytes=1 << 40)
    computed, outcome, _, _ = run_late(loop, plan, tmp_path, STEPS, monkeypatch, seed)
    assert computed == plain
    assert any("earlier than planned" in note for note in outcome.notes)
