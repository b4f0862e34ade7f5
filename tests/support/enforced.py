"""Run a training loop plain, profiled and enforced in this process, and give back what it computed, as digests."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memopt.advisors.advise import Adviser
from memopt.advisors.kinds import allowed
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.device import Device
from memopt.enforcers.session import ApplySession, Options
from memopt.enforcers.verify.digests import digest
from memopt.estimators.simulator.decision import RECOMPUTE_AGAIN, Decision
from memopt.instrument.as_plain import PlainForms
from memopt.instrument.frames import Frames
from memopt.instrument.iterations import Iterations
from memopt.instrument.loop import Loop as Watched
from memopt.instrument.script.command import Command
from memopt.instrument.script.runner import StopScript
from memopt.outcome import Outcome
from memopt.plan import Plan, ScriptAction
from memopt.profiler.recordings import Wanted
from memopt.profiler.session import ProfileSession
from memopt.profiler.timing import bandwidth
from memopt.trace import Script, Trace
from tests.support.profiled import measured_once

Loop = Callable[[int], list[str]]
"""steps -> digests of everything that the loop computed"""
_measured = measured_once(bandwidth.measure_device)


def seeded(loop: Loop, steps: int) -> list[str]:
    gc.collect()  # tensors and optimizers of earlier loops, which the exceptions that stopped them hold, are no part of this one
    random.seed(0)
    torch.manual_seed(0)
    return loop(steps)


def recorded(loop: Loop, folder: Path, *, warmup: int = 2) -> Trace:
    """The trace of the third iteration of `loop`."""
    script = folder / "loop.py"
    script.write_text("# run in process\n")
    session = ProfileSession(Command((str(script),)), Wanted(warmup=warmup, swap_dir=folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bandwidth, "measure_device", _measured)
        session.install()
        with contextlib.suppress(StopScript):
            seeded(loop, warmup + 2)
        trace = session.finished()
    assert trace is not None
    assert not trace.partial, trace.partial
    return trace


def problem_of(trace: Trace, budget_bytes: int = 1) -> tuple[Adviser, Problem]:
    adviser = Adviser(trace, allowed((), ()))
    return adviser, adviser.problem(budget_bytes)


def plan_of(trace: Trace, choose: Callable[[Problem], Decisions]) -> Plan:
    """A plan with the decisions of `choose`, good or bad."""
    adviser, problem = problem_of(trace)
    return adviser.write(problem, choose(problem), "chosen by a test")


def plan_with(action: ScriptAction) -> Plan:
    """A plan that makes one decision about the run, and none about tensors."""
    return Plan(
        memopt="",
        created="",
        script=Script(argv=["x"], cwd="."),
        device=Device(),
        profile="",
        strategy="chosen by a test",
        budget_bytes=1,
        unplanned_peak_bytes=1,
        predicted_peak_bytes=1,
        plain_step_ms=1.0,
        predicted_step_ms=1.0,
        actions=[],
        script_actions=[action],
    )


def enforced(
    loop: Loop, plan: Plan, folder: Path, steps: int, *, measure: bool = False, holds_bytes: int = 0
) -> tuple[list[str], Outcome]:
    session = ApplySession(plan, Options(swap_dir=folder, measure=measure, holds_bytes=holds_bytes))
    session.install()
    try:
        computed = seeded(loop, steps)
    finally:
        outcome = session.finished()
    assert outcome is not None
    return computed, outcome


def enforced_from(
    loop: Loop,
    plan: Plan,
    folder: Path,
    steps: int,
    *,
    begins_after: int,
    ends_after: int = 0,
    holds_bytes: int = 0,
) -> tuple[list[str], Outcome]:
    """As `enforced`, in a loop that is watched already: the plan is there once `begins_after` iterations have ended, as in `memopt run`, and,
    if so, gone after `ends_after`."""
    session = ApplySession(plan, Options(swap_dir=folder, measure=True, holds_bytes=holds_bytes))

    class Late:
        """Listens to the loop, and hands it to the session."""

        begun = False
        retired: Any = None

        def iteration_ended(self, count: int, milliseconds: float) -> None:
            if count == ends_after:
                session.iteration_ended(count, milliseconds)
                self.begun, (self.outcome, self.retired, _) = False, session.retire()
            elif self.begun:
                session.iteration_ended(count, milliseconds)
                return
            frames.new_iteration()
            if count == begins_after:
                self.begun = True
                session.begin_in(watched)

        def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
            for each in (self.retired, session if self.begun else None):
                if each is not None:
                    each.step_begins(optimizer)

        def __getattr__(self, name: str) -> Any:
            return getattr(session, name) if self.begun else lambda *_, **__: None

    late = Late()
    frames, forms = Frames(), PlainForms()
    iterations = Iterations(late, frames.thread)
    watched = Watched(frames, iterations, forms)
    for part in (frames, forms, iterations):
        part.install()
    try:
        computed = seeded(loop, steps)
    finally:
        outcome = late.outcome if ends_after else session.finished()
        if late.retired is not None:
            late.retired.remove()
        watched.remove()
    assert outcome is not None
    return computed, outcome


def everything(kind: str) -> Callable[[Problem], Decisions]:
    """Every storage that can have an action of `kind` has it."""

    def choose(problem: Problem) -> Decisions:
        chosen = {}
        for storage, candidate in problem.candidates.items():
            option = SWAP if kind == "swap" else candidate.option(kind)
            if option is not None:
                chosen[storage] = option
        return chosen

    return choose


def all_again(problem: Problem) -> Decisions:
    """Everything that can be recomputed is, and nothing is held that was made on the way to something else."""
    return {s: RECOMPUTE_AGAIN for s, c in problem.candidates.items() if c.option("recompute") is not None}


SWAP = Decision(kind="swap", tier="disk")
"""However small the storage is."""


def any_mixture(seed: int) -> Callable[[Problem], Decisions]:
    """A random action, or none, for each storage."""

    def choose(problem: Problem) -> Decisions:
        draw = random.Random(seed)
        chosen = {}
        for storage, candidate in problem.candidates.items():
            options = [None, SWAP, *candidate.options]
            if candidate.option("recompute") is not None:
                options.append(RECOMPUTE_AGAIN)
            picked = draw.choice(options)
            if picked is not None:
                chosen[storage] = picked
        return chosen

    return choose


def state_digests(*modules: torch.nn.Module) -> list[str]:
    found = []
    for module in modules:
        for tensor in [*module.parameters(), *module.buffers()]:
            found.append(digest(tensor))
            if tensor.grad is not None:
                found.append(digest(tensor.grad))
    return found
