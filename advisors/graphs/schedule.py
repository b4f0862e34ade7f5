"""What a graph strategy returns, and `schedule.json` (shared form memopt.schedule/1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from memopt.advisors.graphs.graph import Graph
from memopt.errors import BadFile
from memopt.files import read_bytes, write_atomic

SCHEMA: Final = "memopt.schedule/1"

RUN, FREE, OUT, IN = range(4)
VERBS: Final = ("run", "free", "out", "in")

Step = tuple[int, int]
"""A verb (`RUN`, `FREE`, `OUT`, `IN`) and the op (for `RUN`) or tensor index that it is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A plan for a graph that was replayed by `judge` and found valid."""

    graph_name: str
    strategy: str
    budget_bytes: int
    out_gbps: float
    in_gbps: float
    steps: list[Step]
    overhead: float
    """End of the compute lane over the plain time, less one."""
    peak_bytes: int
    recompute_ms: float
    exposed_ms: float
    floor_bytes: int = 0
    """No plan can have a smaller peak."""
    overhead_bound: float = 0.0
    """No plan under this budget can have less overhead."""
    stats: dict[str, float | int | str] = field(default_factory=dict)

    @property
    def reruns(self) -> int:
        """Runs beyond the first of each op."""
        runs = [argument for verb, argument in self.steps if verb == RUN]
        return len(runs) - len(set(runs))

    @property
    def swaps(self) -> int:
        """Copies to the host."""
        return sum(verb == OUT for verb, _ in self.steps)


class ScheduleFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file as it lies on disk; tensors by the graph file's own ids."""

    schema: str
    graph: str
    budget_bytes: int
    out_gbps: float
    in_gbps: float
    steps: list[tuple[str, int]]


def encode_schedule(schedule: Schedule, graph: Graph) -> bytes:
    """`schedule` as JSON text."""
    ids = graph.tensor_ids.tolist()
    steps = [(VERBS[verb], what if verb == RUN else ids[what]) for verb, what in schedule.steps]
    return msgspec.json.encode(
        ScheduleFile(
            schema=SCHEMA,
            graph=schedule.graph_name,
            budget_bytes=schedule.budget_bytes,
            out_gbps=schedule.out_gbps,
            in_gbps=schedule.in_gbps,
            steps=steps,
        )
    )


def write_schedule(path: Path, schedule: Schedule, graph: Graph) -> None:
    """`schedule` at `path`, whole or not at all."""
    write_atomic(path, encode_schedule(schedule, graph))


def read_steps(path: Path, graph: Graph) -> tuple[ScheduleFile, list[Step]]:
    """The schedule file at `path` and its steps in `graph`'s numbering; `BadFile` when it does not fit the graph."""
    try:
        rows = msgspec.json.decode(read_bytes(path, "schedule"), type=ScheduleFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFile(f"{path} is not a usable schedule", why=str(error)) from error
    if rows.schema != SCHEMA:
        raise BadFile(
            f"{path} is not a schedule that this memopt reads",
            why=f"its schema is {rows.schema[:80]!r}, not {SCHEMA!r}",
        )
    index = {tensor_id: position for position, tensor_id in enumerate(graph.tensor_ids.tolist())}
    steps: list[Step] = []
    for verb_name, what in rows.steps:
        known = range(graph.op_count) if verb_name == "run" else index
        if verb_name not in VERBS or what not in known:
            raise BadFile(f"{path} does not belong to this graph", why=f"it has the step {verb_name} {what}")
        steps.append((VERBS.index(verb_name), what if verb_name == "run" else index[what]))
    return rows, steps
