"""The one error tree. Each error carries its exit code; only `cli/` catches.

    MemoptError (1)
    ├── UsageError (2)            what was typed cannot be meant; a file that is named is not there
    ├── BadFile (1)               a file is truncated, hostile, or of another version
    ├── BudgetInfeasible (3)      no plan meets the budget; carries the smallest peak found
    ├── GateFailed (3)            a CI gate (`--fail-over`) did not hold
    ├── VerifyFailed (1)          `apply --verify` saw a difference
    ├── NotEnforced (4)           `apply --strict`: the script ran, and nothing of its plan was enforced
    ├── NotPossibleHere (1)       the machine, the script or the torch version cannot do it
    └── RunFailed (70)            memopt itself failed while running somebody's script

The text has three parts: what happened, why, what to do. What a hostile file smuggles into it (escape sequences) is shown as `?`.
"""

from __future__ import annotations

from memopt.words import format_bytes, typed_bytes


class MemoptError(Exception):
    """What happened, `why`, and what to `try_` next; `exit_code` is what the process ends with."""

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", try_: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.try_ = try_

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  {self.why}")
        if self.try_:
            lines.append(f"  try: {self.try_}")
        return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in "\n".join(lines))


class UsageError(MemoptError):
    """The command line or a configuration value cannot be meant."""

    exit_code = 2


class BadFile(MemoptError):
    """A file that should be a profile, plan, graph, model or snapshot is not one."""


class BudgetInfeasible(MemoptError):
    """No plan meets the budget. `min_peak_bytes` is the smallest peak found; `blockers` what stops it, a line each.

    `reached`: the problem and the decisions that have that peak, where a planner of profiles says so.
    """

    exit_code = 3

    def __init__(
        self,
        budget_bytes: int,
        min_peak_bytes: int,
        blockers: tuple[str, ...] = (),
        *,
        try_: str = "",
        reached: object = None,
    ) -> None:
        super().__init__(
            f"budget {format_bytes(budget_bytes)} cannot be met: the smallest peak found is {format_bytes(min_peak_bytes)}",
            why="\n  ".join(blockers),
            try_=try_ or enough(min_peak_bytes),
        )
        self.budget_bytes = budget_bytes
        self.min_peak_bytes = min_peak_bytes
        self.blockers = blockers
        self.reached = reached


def enough(peak_bytes: int) -> str:
    """`--budget 43.8MiB`: what a plan of this peak meets, with the margin."""
    return f"--budget {typed_bytes(peak_bytes * 1006 // 1000 + 1)}"


class GateFailed(MemoptError):
    """A threshold that the user asked for did not hold."""

    exit_code = 3


class VerifyFailed(MemoptError):
    """Enforced and plain runs differ, or could not be compared."""


class NotEnforced(MemoptError):
    """The script ran under a plan of which no action was taken."""

    exit_code = 4


class NotPossibleHere(MemoptError):
    """This machine, script or torch version cannot do what was asked."""


class RunFailed(MemoptError):
    """memopt itself failed around a script that it was running (EX_SOFTWARE)."""

    exit_code = 70


def reason(error: Exception) -> str:
    """Why a file could not be used: the system's words where `error` has them (a zero byte in a name is a mere `ValueError`)."""
    return getattr(error, "strerror", None) or str(error)
