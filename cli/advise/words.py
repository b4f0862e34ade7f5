"""The words of `memopt advise`: what was typed wrongly is refused before any file is looked at."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from memopt.cli.requests import AdviseRequest
from memopt.errors import BudgetInfeasible, UsageError, enough
from memopt.units import format_bytes

_ANY_PEAK_BYTES = 2**30
LOWEST = "min"
"""The budget that asks for the smallest peak that is found."""
_ZERO = re.compile(r"0+(\.0*)?\s*([kmgt]?i?b?|%)?")
_REPEATED = (
    ("strategies", "--strategy"), ("allow", "--allow"), ("deny", "--deny"), ("device", "--device"), ("batch_arg", "--batch-arg"),
    ("out_gbps", "--out-gbps"), ("in_gbps", "--in-gbps"), ("time_limit_s", "--time-limit"), ("output", "-o"), ("schedule", "--schedule"),
)  # fmt: skip
"""Options of a command that is told again, and what they are typed as."""
_NOT_OF_A_GRAPH = ("output", "device", "max_overhead", "pareto", "max_batch", "batch_arg", "explain")


def check_words(request: AdviseRequest) -> None:
    """Raise `UsageError` for what was typed wrongly, before any file is looked at."""
    from memopt.advisors.kinds import kinds_named
    from memopt.advisors.registry import counsels, find_strategy
    from memopt.units import parse_budget

    for name in request.strategies:
        if name not in counsels():
            find_strategy(name)
    kinds_named(request.allow), kinds_named(request.deny)
    typed = request.budget
    if typed is not None and not is_lowest(typed, request.strategies, max_batch=request.max_batch):
        parse_budget(typed, of_bytes=_ANY_PEAK_BYTES)
    if request.max_overhead is not None:
        parse_share(request.max_overhead)


def is_lowest(typed: str | None, strategies: Sequence[str], *, max_batch: bool = False) -> bool:
    """Does the budget `typed` ask for the smallest peak? Raises `UsageError` where that goes with something else."""
    budget = (typed or "").strip().lower()
    if _ZERO.fullmatch(budget):
        raise UsageError(
            f"a budget of {budget} cannot be met",
            why="whatever runs takes memory",
            try_="--budget min, for as little as can be, or --budget 16GB",
        )
    if budget != LOWEST:
        return False
    if len(strategies) > 1 or max_batch:
        raise UsageError(
            "--budget min asks for the smallest peak of one plan",
            why="the largest batch and a comparison of strategies need one budget",
            try_="--budget 16GB, or one --strategy",
        )
    return True


def with_command(error: BudgetInfeasible, request: AdviseRequest) -> BudgetInfeasible:
    """`error`, whose last line is the command for the nearest budget that a plan was found for; where that is the plain peak, `--strategy auto`
    in place of another one."""
    from memopt.advisors.profiles.blockers import Reached

    words = ["memopt", "advise", *(["--graph"] if request.graph else []), str(request.source)]
    words += ["--max-batch"] if request.max_batch else []
    words += enough(error.min_peak_bytes).split()
    for name, flag in _REPEATED:
        given = getattr(request, name)
        for each in given if isinstance(given, tuple) else () if given is None else (given,):
            words += [flag, f"{each:g}" if isinstance(each, float) else str(each)]
    if isinstance(error.reached, Reached) and error.reached.is_plain:
        error.try_ = "" if set(request.strategies) <= {"auto"} else "--strategy auto"
    else:
        error.try_ = shlex.join(words)
    error.what = _as_typed(error, request.budget or "")
    return error


def _as_typed(error: BudgetInfeasible, typed: str) -> str:
    """The refusal with the budget in the unit that it was typed in."""
    told = format_bytes(error.budget_bytes)
    same = typed.strip().lower().replace(" ", "") == told.lower().replace(" ", "")
    return (
        error.what
        if same or f"budget {told} " not in error.what
        else error.what.replace(told, f"{typed.strip()} ({told})", 1)
    )


def with_variant(strategies: tuple[str, ...], variant: str | None) -> tuple[str, ...]:
    """`vdnn` with `--variant all` is `vdnn-all`; those without that variant stay. Raises `UsageError` when none has it."""
    if variant is None:
        return strategies
    from memopt.advisors.registry import graph_strategies, profile_strategies, usual_name

    named = {name: usual_name(f"{name}-{variant}") for name in strategies}
    having = {name for name, full in named.items() if full in profile_strategies() | graph_strategies()}
    if not having:
        raise UsageError(
            f"no strategy that is asked for has a variant '{variant[:60]}'",
            why="vdnn has all, conv and dyn; dtr has eqclass, local and megengine; sublinear, on graphs, greedy",
            try_="--strategy vdnn --variant conv",
        )
    return tuple(named[name] if name in having else name for name in strategies)


def parse_share(text: str) -> float:
    """`10%` or `0.1`. Raises `UsageError`."""
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1e6:
        raise UsageError(
            f"'{text}' is not a share of time", why="it is told as a number from 0 up, or in %", try_="10%"
        )
    if share > 1 and not text.endswith("%"):
        raise UsageError(
            f"'{text}' may mean {share:g} % of the step or {share:g} times it",
            try_=f"{share:g}% or {share * 100:g}%",
        )
    return share


def check_graph_words(request: AdviseRequest) -> None:
    """Raise `UsageError` for what does not go with `--graph`."""
    if request.profile is not None:
        raise UsageError(
            "--graph is planned instead of a profile",
            why=f"{request.profile} was given too",
            try_="memopt advise --graph FILE --budget B, without a profile",
        )
    for name in _NOT_OF_A_GRAPH:
        if getattr(request, name):
            raise UsageError(
                f"--{name.replace('_', '-')} does not go with --graph",
                why="it is for profiles",
                try_="--schedule FILE, for what the planner decides" if name == "output" else "leave it out",
            )


def check_of_profiles(request: AdviseRequest) -> None:
    """Raise `UsageError` for what goes with `--graph` alone."""
    for name in ("schedule", "out_gbps", "in_gbps"):
        if getattr(request, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} goes with --graph", try_="--graph graph.json")


def check_goal(request: AdviseRequest) -> None:
    """Raise `UsageError` unless exactly one goal is set, and one that goes with the rest."""
    strategies = request.strategies
    goals = [goal for goal in (request.budget, request.max_overhead, request.pareto) if goal]
    if len(goals) != 1:
        what = "choose one goal" if goals else "--budget is missing"
        raise UsageError(
            what,
            why="a plan meets a budget, or a limit on the time it may cost, or shows the curve of both",
            try_="--budget 16GB, --max-overhead 10% or --pareto",
        )
    if len(strategies) > 1 and request.budget is None:
        raise UsageError(
            "several strategies are compared at one budget",
            why=f"{' and '.join(strategies)} were asked for",
            try_="--budget 16GB, or one --strategy",
        )
    if request.explain and (request.pareto or len(strategies) > 1):
        raise UsageError(
            "--explain tells of one plan", why="several are made", try_="one --strategy and one --budget"
        )
