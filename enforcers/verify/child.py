"""The program of the processes that are compared: `python -c BOOTSTRAP plan plain|enforced[-deterministic] N out swap-dir copied-folder since arguments`.

The folder is empty where the runs are not in copies of one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from memopt.enforcers.verify.digests import Digests
from memopt.enforcers.verify.own_files import OwnFiles
from memopt.instrument.script.command import Command
from memopt.instrument.script.on_import import call_after_import
from memopt.instrument.script.runner import run
from memopt.plan import Plan, load_plan


def child() -> None:
    """Run the script of the plan that the command line names, and leave digests of it there, and the outcome beside them."""
    plan_path, mode, steps, out, swap_dir, source, since, *argv = sys.argv[1:]
    plan = load_plan(Path(plan_path))
    digests = Digests(Path(out), int(steps))
    if source:
        OwnFiles(Path(source), float(since), Path(out)).install()
    mode, _, deterministic = mode.partition("-")
    if deterministic:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":16:8"
        )  # cuDNN's recurrent layers repeat themselves with this one only
        call_after_import("torch", _use_deterministic_algorithms)
    if mode == "enforced":
        from memopt.enforcers.session import ApplySession, Options

        session = ApplySession(plan, Options(swap_dir=Path(swap_dir), measure=False), also=digests)
        digests.gradient_of = session.gradient_of
        session.install()
    else:
        session = None
        digests.install(plan.optimizers)
    call_after_import("torch", _seed)
    code = run(command_of(plan, argv))
    outcome = session.finished() if session is not None else None
    if outcome is not None:
        outcome.save(outcome_beside(Path(out)))
    sys.exit(code)


def command_of(plan: Plan, argv: list[str]) -> Command:
    """The command that `plan` was made from, or the same script with other arguments."""
    return Command(tuple(argv or plan.script.argv), plan.script.as_module)


def _use_deterministic_algorithms() -> None:
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


def _seed() -> None:
    import random

    import torch

    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def outcome_beside(digests: Path) -> Path:
    """Where the enforced run writes its outcome."""
    return digests.with_name("outcome.json")
