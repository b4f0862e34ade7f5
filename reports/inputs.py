"""Files -> what a report can show, told apart by what is inside them: profiles, plans, outcomes, estimates, curves, torch's snapshots."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import msgspec

from memopt.errors import BadFile, MemoptError, UsageError
from memopt.files import read_bytes
from memopt.outcome import Outcome, load_outcome
from memopt.plan import Plan, load_plan
from memopt.trace import CATEGORIES, Csr, Ops, Trace, load_trace
from memopt.versioned import schema_of

if TYPE_CHECKING:
    from memopt.advisors.profiles.plan_reader import ReadPlan
    from memopt.reports.page.allocator_view import AllocatorView

_PICKLES = (b"\x80", b"PK\x03\x04")
_WRITTEN = "a file that memopt profile, advise, apply --outcome, or estimate --json wrote, torch's memory snapshot, or a benchmark's lines"


@dataclass(frozen=True, slots=True)
class Run:
    """A profile, and the plan for it where there is one."""

    name: str
    trace: Trace
    planned: ReadPlan | None = None
    layout: AllocatorView | None = None
    """Of a snapshot: its segments as they were written."""
    moved: bool = False
    """`trace` is the run as the plan has it, its optimizer stepping where the plan lets it."""

    @property
    def drawn_with_plan(self) -> bool:
        """Whether the plan's bytes can be laid op by op on those of `trace`."""
        return self.planned is not None and (self.moved or not self.planned.moves_the_optimizer)

    def with_optimizer_moved(self) -> Run | None:
        """The run whose ops are those of the plan, where that moves the optimizer."""
        if self.planned is None or not self.planned.moves_the_optimizer:
            return None
        return Run(f"{self.name}, optimizer moved", self.planned.problem.view.trace, self.planned, moved=True)


@dataclass(slots=True)
class Inputs:
    """What the files hold, in the order in which they were given."""

    runs: list[Run] = field(default_factory=list)
    plans: list[tuple[str, Plan]] = field(default_factory=list)
    """Plans whose profile is not at hand."""
    outcomes: list[tuple[str, Outcome]] = field(default_factory=list)
    estimates: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    curves: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """What `advise --pareto` wrote."""
    comparisons: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """What `advise --strategy A --strategy B --json` wrote."""
    benchmarks: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)
    """Jobs of a benchmark."""
    notes: list[str] = field(default_factory=list)


def load_any(path: Path) -> Trace | Plan | Outcome | dict[str, Any]:
    """The file at `path`; an estimate or a curve as its JSON object. Raises `BadFile`, `UsageError`."""
    return _load(path)[0]


def _load(path: Path) -> tuple[Trace | Plan | Outcome | dict[str, Any], AllocatorView | None]:
    """What `load_any` gives, and the segments where the file is a snapshot."""
    data = read_bytes(path, "file")
    if not data.strip():
        raise BadFile(
            f"{path} is empty", why="nothing was written to it, or its writer was stopped", try_=_WRITTEN
        )
    if not data.startswith(_PICKLES):
        return _decoded(path, data), None
    del data
    from memopt.estimators.snapshot.trace import read_as_trace
    from memopt.reports.page.allocator_view import of_snapshot

    read = read_as_trace(path)
    return read.trace, of_snapshot(read.device, read.trace, read.storage_at)


def _decoded(path: Path, data: bytes) -> Trace | Plan | Outcome | dict[str, Any]:
    from memopt.reports.benchmarks import read_jobs

    jobs = read_jobs(data)
    if jobs is not None:
        return {"jobs": jobs}
    try:
        schema = schema_of(data).rpartition("/")[0]
        if schema == "memopt.plan" and _is_comparison(found := json.loads(data)):
            return dict(found)
        if schema == "memopt.trace":
            return load_trace(path)
        if schema == "memopt.plan":
            return load_plan(path)
        if schema == "memopt.outcome":
            return load_outcome(path)
        found = json.loads(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadFile(
            f"{path} is nothing that a report can show", why=str(error)[:200], try_=_WRITTEN
        ) from error
    if not isinstance(found, dict) or not (_is_estimate(found) or _is_curve(found)):
        raise BadFile(
            f"{path} is nothing that a report can show",
            why=f"its schema is '{schema[:60]}'" if schema else "it has no schema",
            try_=_WRITTEN,
        )
    return found


def _is_estimate(found: dict[str, Any]) -> bool:
    return (
        str(found.get("schema", "")).startswith("memopt.estimate/")
        and _has(found, {"allocated_bytes": int, "by_category": dict, "by_module": dict, "error": dict, "fits": list, "left_out": list, "notes": list})
        and (not found.get("curve") or _is_course(found["curve"]))
    )  # fmt: skip


def _is_course(curve: object) -> bool:
    """Bytes over an estimate's run: columns of one length, of the categories that there are."""
    if not isinstance(curve, dict) or not _has(curve, {"at": list, "by_category": dict, "steps": list}):
        return False
    columns = [curve["at"], *curve["by_category"].values()]
    known = set(curve["by_category"]) <= {*CATEGORIES, "workspace"}
    return known and all(
        isinstance(row, list) and len(row) == len(curve["at"]) and all(isinstance(each, int) and 0 <= each < 2**62 for each in row)
        for row in columns
    ) and all(isinstance(each, int) for each in curve["steps"])  # fmt: skip


def _is_curve(found: dict[str, Any]) -> bool:
    if found.get("kind") != "pareto" or not _has(found, {"unplanned_peak_bytes": int, "points": list}):
        return False
    wanted = {"budget_bytes": int, "feasible": bool, "predicted_peak_bytes": int}
    return all(isinstance(point, dict) and _has(point, wanted) for point in found["points"])


def _is_comparison(found: object) -> bool:
    if not isinstance(found, dict) or not _has(found, {"strategies": list, "budget_bytes": int}):
        return False
    numbers = all(
        isinstance(found.get(name), (int, float)) for name in ("plain_step_ms", "unplanned_peak_bytes")
    )
    return numbers and all(isinstance(row, dict) and _is_strategy(row) for row in found["strategies"])


def _is_strategy(row: dict[str, Any]) -> bool:
    peak, step = row.get("predicted_peak_bytes"), row.get("predicted_step_ms")
    return (
        _has(row, {"strategy": str})
        and isinstance(peak, (int, NoneType))
        and isinstance(step, (int, float, NoneType))
    )


def _has(found: dict[str, Any], wanted: dict[str, type]) -> bool:
    return all(isinstance(found.get(name), kind) for name, kind in wanted.items())


def read_inputs(paths: list[Path]) -> Inputs:
    """What the files at `paths` hold. A plan is laid on the profile that it was made from, which is looked for where the plan says."""
    inputs = Inputs()
    traces: list[tuple[Path, Trace]] = []
    plans: list[tuple[Path, Plan]] = []
    layouts: dict[int, AllocatorView | None] = {}
    for path in paths:
        found, layout = _load(path)
        if isinstance(found, Trace):
            traces.append((path, found))
            layouts[len(traces) - 1] = layout
        elif isinstance(found, Plan):
            plans.append((path, found))
        elif isinstance(found, Outcome):
            inputs.outcomes.append((path.name, found))
        elif "jobs" in found:
            inputs.benchmarks.append((path.name, found["jobs"]))
        elif "strategies" in found:
            inputs.comparisons.append((path.name, found))
        elif _is_curve(found):
            inputs.curves.append((path.name, found))
        else:
            inputs.estimates.append((path.name, found))
    read: dict[int, ReadPlan] = {}
    for path, plan in plans:
        place = _lay(inputs, path, plan, traces, read)
        if place is None:
            inputs.plans.append((path.name, plan))
    inputs.runs = [
        Run(short_name(path), with_a_moment(trace), read.get(i), layouts.get(i))
        for i, (path, trace) in enumerate(traces)
    ]
    return inputs


def _lay(
    inputs: Inputs, path: Path, plan: Plan, traces: list[tuple[Path, Trace]], read: dict[int, ReadPlan]
) -> int | None:
    """The index in `traces` of the profile that `plan` was laid on; one that was found on the disk is added to them."""
    from memopt.advisors.profiles.plan_reader import read_plan

    why = ""
    for place, (_, trace) in enumerate(traces):
        if place not in read:
            try:
                read[place] = read_plan(plan, trace)
                return place
            except MemoptError as error:
                why = error.why
    beside = _profile_of(path, plan)
    if not traces and beside is not None:
        try:
            trace = load_trace(beside)
            read[0] = read_plan(plan, trace)
        except MemoptError as error:
            why = error.why
        else:
            traces.append((beside, trace))
            return 0
    inputs.notes.append(
        f"{path.name} is shown without its profile {plan.profile}: {why or 'there is no such file here'}"
    )
    return None


def with_a_moment(trace: Trace) -> Trace:
    """`trace`; one without ops (what was on the device when a script died) gets a row that stands for its moment."""
    if trace.op_count:
        return trace
    strings = [*trace.strings, "memopt.moment", "@", ""]
    name, module, line = range(len(trace.strings), len(strings))
    named = sum(trace.storages.size_bytes)
    rest = max(0, trace.peak_bytes - named)
    none = Csr.of([[]])
    ops = Ops(
        name=[name], module=[module], ordinal=[0], phase=[3], flags=[0], line=[line], time_us=[0.0], live_bytes=[named],
        extra_bytes=[rest], workspace_bytes=[rest], reads=none, writes=none, forward_op=[-1],
    )  # fmt: skip
    return msgspec.structs.replace(trace, ops=ops, strings=strings)


def short_name(path: Path) -> str:
    """`train` of `runs/memopt-train.profile.json.gz`."""
    name = path.name.removesuffix(".gz").removesuffix(".json").removesuffix(".profile")
    return name.removeprefix("memopt-") or path.name


def _profile_of(path: Path, plan: Plan) -> Path | None:
    """The profile that `plan` names, beside the plan or in the current folder."""
    if not plan.profile or "\0" in plan.profile:
        return None
    for folder in (path.parent, Path.cwd()):
        for name in (plan.profile, Path(plan.profile).name):
            if (folder / name).is_file():
                return folder / name
    return None


def one_run(inputs: Inputs) -> Run:
    """The one profile among `inputs`, for formats that show one. Raises `UsageError`."""
    if len(inputs.runs) == 1:
        return inputs.runs[0]
    many = f"{len(inputs.runs)} profiles were given" if inputs.runs else "no profile is among the files"
    raise UsageError("this format shows one profile", why=many, try_="memopt report --format ... PROFILE")
