"""`memopt advise`: what to swap, recompute or compress so that a script fits a budget."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memopt.cli.advise.given import on_device, room_as_budget, script_stem
from memopt.cli.advise.words import (
    check_goal,
    check_graph_words,
    check_words,
    is_lowest,
    parse_share,
    with_command,
    with_variant,
)
from memopt.cli.shared.device_name import DeviceName
from memopt.cli.shared.numbers import Real
from memopt.errors import BudgetInfeasible, MemoptError, UsageError

if TYPE_CHECKING:
    from memopt.advisors.advise import Adviser
    from memopt.advisors.explain import Explanation
    from memopt.advisors.frontier import Point
    from memopt.advisors.lints.registry import Lint
    from memopt.cli.advise.comparison import Row
    from memopt.estimators.hidden.beside_tensors import Budget
    from memopt.plan import Plan

_KINDS = "recompute, swap-host, swap-disk (swap: both), compress, optimizer, in-place"


@click.command()
@click.option("--budget", "-b", metavar="BYTES", help="Most that may be on the device: 16GB, 16GiB, 60% of the unplanned peak; min: as little as can be.")  # fmt: skip
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="Where to write the plan.  [default: memopt-SCRIPT.plan.json]")  # fmt: skip
@click.option("-f", "--force", is_flag=True, help="Overwrite the file, whoever wrote it.")
@click.option("--device", type=DeviceName(), metavar="NAME", help="Plan for this GPU with modelled times, such as a100-40gb; without --budget for what it has room for.")  # fmt: skip
@click.option("--strategy", "strategies", metavar="NAME", multiple=True, help="Who plans (memopt strategies lists them); several: a comparison.  [default: auto]")  # fmt: skip
@click.option("--variant", metavar="NAME", help="With --strategy vdnn: all, conv or dyn; with dtr: eqclass, local or megengine.")  # fmt: skip
@click.option(
    "--allow",
    metavar="KINDS",
    multiple=True,
    help=f"Only these kinds of action: {_KINDS}; besides them lossy (no action is) and model-change (ctdr's advice).",
)
@click.option("--deny", metavar="KINDS", multiple=True, help="None of these kinds of action.")
@click.option("--time-limit", "time_limit_s", type=Real(min=0.1, max=86400), default=None, metavar="SECONDS", help="How long to search.  [default: 8, more beyond 8,000 ops]")  # fmt: skip
@click.option("--max-overhead", metavar="SHARE", help="Find the lowest peak that costs at most this much time: 10%.")  # fmt: skip
@click.option("--pareto", is_flag=True, help="Plan for budgets from 90% down and show peak against step time.")  # fmt: skip
@click.option("--max-batch", is_flag=True, help="Find the largest batch that fits the budget, without a plan and with one.")  # fmt: skip
@click.option("--batch-arg", metavar="FLAG", help="With --max-batch: the script's own flag for the batch size, such as --batch-arg=--bs.")  # fmt: skip
@click.option("--explain", metavar="TENSOR", help="Also say why this tensor is treated as it is (part of its name, or its number).")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Write the figures as JSON.")
@click.option(
    "--top", metavar="N", type=click.IntRange(min=1), default=10, show_default=True, help="Rows a table."
)
@click.option("--graph", metavar="FILE", type=click.Path(path_type=Path), help="Plan a plain graph (memopt.graph/1) instead of a profile.")  # fmt: skip
@click.option("--schedule", metavar="FILE", type=click.Path(path_type=Path), help="With --graph: where to write the schedule.")  # fmt: skip
@click.option("--out-gbps", metavar="RATE", type=Real(min=0), help="With --graph: link to the host, GB/s.  [default: as --in-gbps, else no link]")  # fmt: skip
@click.option("--in-gbps", metavar="RATE", type=Real(min=0), help="With --graph: link from the host, GB/s.  [default: as --out-gbps, else no link]")  # fmt: skip
@click.argument("profile", required=False, type=click.Path(path_type=Path))
def advise(profile: Path | None, **options: Any) -> int:
    """Find what to swap, recompute or compress so that a script fits a budget.

    PROFILE is what memopt profile wrote; left out, the newest one in the current folder is taken.
    """
    options["strategies"] = with_variant(options["strategies"], options["variant"])
    if options["graph"] is not None:
        return _advise_graph(profile, options)
    check_words(options)
    for name in ("schedule", "out_gbps", "in_gbps"):
        if options[name] is not None:
            raise UsageError(f"--{name.replace('_', '-')} goes with --graph", try_="--graph graph.json")
    from memopt.advisors.registry import counsels

    advises = len(options["strategies"]) == 1 and options["strategies"][0] in counsels()
    room_as_budget(options)
    if not advises and not options["max_batch"]:
        if options["batch_arg"]:
            raise UsageError("--batch-arg goes with --max-batch", try_="--max-batch --budget 16GB")
        check_goal(options, options["strategies"] or ("auto",))
    path = profile or newest_profile(Path.cwd())
    if advises:
        from memopt.cli.advise.counsel import study

        return study(path, options)
    if options["max_batch"]:
        from memopt.cli.advise.max_batch import max_batch

        return max_batch(path, options)
    return _Advise(path, options).run()


def newest_profile(folder: Path) -> Path:
    """The profile in `folder` that was written last, which is said on stderr. Raises `UsageError` when there is none."""
    found = sorted(folder.glob("*.profile.json.gz"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UsageError(
            "there is no profile in the current folder",
            why="*.profile.json.gz is what memopt profile writes",
            try_="memopt profile SCRIPT, or memopt advise PROFILE",
        )
    from memopt.cli.shared.console import say

    say(f"using {found[-1].name}, the newest profile here")
    return found[-1].relative_to(folder)


def _advise_graph(profile: Path | None, options: dict[str, Any]) -> int:
    check_graph_words(profile, options)
    from memopt.cli.advise.graph_plan import advise_graph

    names = (
        "schedule",
        "out_gbps",
        "in_gbps",
        "allow",
        "deny",
        "strategies",
        "time_limit_s",
        "force",
        "as_json",
    )
    given = {name: options[name] for name in names}
    try:
        return advise_graph(options["graph"], budget=_required_budget(options), **given)
    except BudgetInfeasible as error:
        raise with_command(error, options["graph"], options) from None


def _required_budget(options: dict[str, Any]) -> str:
    if options["budget"] is None:
        raise UsageError("--budget is missing", try_="--budget 16GB, or --budget 60% of the unplanned peak")
    return str(options["budget"])


class _Advise:
    """One call of the command on a profile."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.path, self.options = path, options
        self.strategies: tuple[str, ...] = options["strategies"] or ("auto",)
        self.lints: list[Lint] = []
        self.budget: Budget | None = None

    def run(self) -> int:
        from memopt.advisors.advise import Adviser
        from memopt.advisors.lints.find import find_lints
        from memopt.advisors.profiles.problem import allowed, usual_limit_s
        from memopt.cli.shared.own_files import refuse_foreign
        from memopt.trace import load_trace

        options = self.options
        allow = allowed(options["allow"], options["deny"])
        trace = on_device(load_trace(self.path), options["device"])
        kind = "pareto" if options["pareto"] else "plan"
        self.output: Path = options["output"] or Path(f"memopt-{script_stem(trace)}.{kind}.json")
        refuse_foreign(self.output, f"memopt.{kind}", script=trace.script, force=options["force"])
        limit = options["time_limit_s"] or usual_limit_s(trace.op_count)
        adviser = Adviser(trace, allow, limit, str(self.path))
        self.lints = [] if trace.partial else find_lints(trace)
        if options["pareto"]:
            return self._pareto(adviser)
        if len(self.strategies) > 1:
            return self._compare(adviser)
        from memopt.cli.shared.console import progress

        try:
            with progress(f"planning {trace.op_count} ops", short=True):
                plan, explanation = self._plan(adviser)
        except BudgetInfeasible as error:
            error = error if self.budget is None else self.budget.told(error)
            self._print_infeasible(error, adviser, None)
            raise with_command(error, self.path, options) from None
        return self._done(adviser, plan, explanation, None)

    def _budget(self, adviser: Adviser) -> int:
        """Bytes that tensors may have."""
        from memopt.estimators.hidden.beside_tensors import parse_budget

        self.budget = parse_budget(
            self.options["budget"], adviser.trace, unplanned_bytes=adviser.unplanned_peak_bytes
        )
        return self.budget.tensors_bytes

    def _plan(self, adviser: Adviser) -> tuple[Plan, Explanation | None]:
        from memopt.advisors.explain import explain, matching
        from memopt.advisors.frontier import lowest_peak

        tensor, strategy = self.options["explain"], self.strategies[0]
        if tensor is not None:
            matching(adviser.problem(1), tensor)
        if self.options["max_overhead"]:
            found = lowest_peak(adviser, parse_share(self.options["max_overhead"]), strategy)
        elif is_lowest(self.options):
            found = adviser.lowest(strategy)
        else:
            found = adviser.decide(self._budget(adviser), strategy)
        problem, decisions, notes = found
        explanation = explain(problem, decisions, tensor) if tensor is not None else None
        return adviser.write(problem, decisions, strategy, notes), explanation

    def _compare(self, adviser: Adviser) -> int:
        from memopt.advisors.profiles.problem import kinds_named
        from memopt.cli.advise.comparison import best_of, compare, failure

        budget = self._budget(adviser)
        rows = compare(adviser, budget, self.strategies, kinds_named(self.options["allow"]))
        best = best_of(rows)
        if best is not None:
            return self._done(adviser, best, None, rows)
        error = failure(rows, budget)
        self._print_infeasible(error, adviser, rows)
        if isinstance(error, BudgetInfeasible):
            assert self.budget is not None
            raise with_command(self.budget.told(error), self.path, self.options)
        if error is not None:
            raise error
        return 0

    def _done(
        self, adviser: Adviser, plan: Plan, explanation: Explanation | None, rows: list[Row] | None
    ) -> int:
        import msgspec

        from memopt.cli.shared.console import say

        trace = adviser.trace
        if trace.device.modelled:
            plan = msgspec.structs.replace(plan, notes=[*plan.notes, trace.notes[-1]])
        if self.budget is not None:
            plan = self.budget.noted(plan)
        plan.save(self.output)
        self._print(plan, explanation, rows, adviser)
        say(f"wrote {self.output}")
        if plan.actions or plan.script_actions:
            say(f"next: memopt apply {shlex.quote(str(self.output))}")
        else:
            say("next: run the script as it is")
        return 0

    def _print(
        self, plan: Plan, explanation: Explanation | None, rows: list[Row] | None, adviser: Adviser
    ) -> None:
        from memopt.cli.advise.tables import explanation_table, lints_table, strategies_table
        from memopt.cli.shared.console import out

        if self.options["as_json"]:
            import msgspec

            from memopt.reports.formats.summary import encode, summarize_plan

            figures = summarize_plan(plan, top=self.options["top"]) | {"plan": str(self.output)}
            figures |= self._figures(adviser, rows)
            if explanation is not None:
                figures["explanation"] = msgspec.to_builtins(explanation)
            click.echo(encode(figures))
            return
        from memopt.reports.tables import words
        from memopt.reports.terminal import render_plan

        if rows is not None:
            out().print(strategies_table(rows))
        out().print(render_plan(plan, top=self.options["top"]))
        if plan.actions or plan.script_actions:
            out().print(words(f"{adviser.floor.words[:1].upper()}{adviser.floor.words[1:]}."))
        if explanation is not None:
            out().print(explanation_table(explanation, plan))
        if self.lints:
            out().print(lints_table(self.lints))

    def _figures(self, adviser: Adviser, rows: list[Row] | None) -> dict[str, Any]:
        """What a program is told whether there is a plan or not."""
        import msgspec

        figures: dict[str, Any] = {
            "floor_bytes": adviser.floor.bytes,
            "floor": adviser.floor.words,
            "lints": msgspec.to_builtins(self.lints),
        }
        if rows is not None:
            figures["strategies"] = [row.figures() for row in rows]
        return figures

    def _print_infeasible(self, error: MemoptError | None, adviser: Adviser, rows: list[Row] | None) -> None:
        """What there is to say beside the error: each strategy's own smallest peak on stdout, the lints on stderr."""
        from memopt.cli.advise.tables import lints_table, strategies_table
        from memopt.cli.shared.console import err, out

        if self.options["as_json"]:
            from memopt.reports.formats.summary import encode

            figures: dict[str, Any] = {"kind": "no plan", "plan": None}
            if isinstance(error, BudgetInfeasible):
                figures["budget_bytes"] = error.budget_bytes
                figures["min_peak_bytes"] = error.min_peak_bytes
                figures["blockers"] = list(error.blockers)
            click.echo(encode(figures | self._figures(adviser, rows)))
            return
        if rows is not None:
            out().print(strategies_table(rows))
        if self.lints:
            err().print(lints_table(self.lints))

    def _pareto(self, adviser: Adviser) -> int:
        from memopt.advisors.frontier import frontier, without_dominated
        from memopt.cli.advise.tables import lints_table, pareto_figures, pareto_table
        from memopt.cli.shared.console import out, progress, say
        from memopt.files import write_atomic
        from memopt.reports.formats.summary import encode

        points: list[Point] = []
        from memopt.advisors.frontier import SHARES

        with progress("planning for budgets from 90 % down", total=len(SHARES), unit="point") as step:
            for point in frontier(adviser, self.strategies[0]):
                points.append(point)
                step(1)
        points = without_dominated(points)
        figures = pareto_figures(points, adviser.unplanned_peak_bytes, adviser.trace.script) | self._figures(
            adviser, None
        )
        write_atomic(self.output, encode(figures).encode() + b"\n")
        if self.options["as_json"]:
            click.echo(encode(figures))
        else:
            out().print(pareto_table(points, adviser.unplanned_peak_bytes))
            if self.lints:
                out().print(lints_table(self.lints))
        say(f"wrote {self.output}")
        return 0
