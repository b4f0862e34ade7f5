"""A plain graph of one training iteration, as anybody may write it: `graph.json` (shared form memopt.graph/1).

The file is read with distrust: every id, order and number is checked before a planner sees it, so that
planners may assume a topological order, one producer per tensor, and sums that fit in 63 bits.
In memory it is columns (NumPy) plus tuples of ints for the loops that walk edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from memopt.errors import BadFile
from memopt.files import read_bytes

SCHEMA: Final = "memopt.graph/1"
MOST_BYTES_EACH: Final = 2**53
"""Larger than any device, and still exact in every JSON reader."""
MOST_BYTES_ALL: Final = 2**60
"""Sums stay inside 64 bits, with room for a plan that makes tensors several times."""
MOST_MS: Final = 1e12
"""Thirty years: a time beyond is a mistake in the file, and would drown the others in a sum of floats."""

IntColumn = NDArray[np.int64]
FloatColumn = NDArray[np.float64]
BoolColumn = NDArray[np.bool_]

_Bytes = Annotated[int, msgspec.Meta(ge=0, le=MOST_BYTES_EACH)]
_Milliseconds = Annotated[float, msgspec.Meta(ge=0.0, le=MOST_MS)]
_Id = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]


class TensorRow(msgspec.Struct, frozen=True):
    """One storage of the file."""

    id: _Id
    bytes: _Bytes
    name: str = ""
    resident: bool = False


class OpRow(msgspec.Struct, frozen=True):
    """One op of the file; its position is its id."""

    ms: _Milliseconds
    reads: list[_Id] = []
    writes: list[_Id] = []
    name: str = ""
    phase: str = ""
    workspace_bytes: _Bytes = 0
    replayable: bool = True


class GraphFile(msgspec.Struct, frozen=True):
    """The file as it lies on disk."""

    schema: str
    tensors: list[TensorRow]
    ops: list[OpRow]
    name: str = ""
    keep: list[_Id] = []


class _Header(msgspec.Struct):
    schema: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A checked graph. Tensors are numbered 0.. in file order; `tensor_ids` has the file's own ids."""

    name: str
    tensor_ids: IntColumn
    tensor_names: list[str]
    tensor_bytes: IntColumn
    resident: BoolColumn
    kept: BoolColumn
    producer: IntColumn
    """Op that writes the tensor; -1 for a resident or an unused one."""
    op_names: list[str]
    op_phases: list[str]
    op_ms: FloatColumn
    op_workspace_bytes: IntColumn
    replayable: BoolColumn
    reads: list[tuple[int, ...]]
    """Per op, the distinct non-resident tensors that it reads."""
    resident_reads: list[tuple[int, ...]]
    writes: list[tuple[int, ...]]
    resident_bytes: int
    plain_ms: float
    """Sum of `ms`: what the iteration takes without a plan."""

    @property
    def op_count(self) -> int:
        return len(self.op_names)

    @property
    def tensor_count(self) -> int:
        return len(self.tensor_names)

    def op_label(self, op: int) -> str:
        """What to call an op in a message."""
        name = self.op_names[op] or "op"
        phase = f" ({self.op_phases[op]})" if self.op_phases[op] else ""
        return f"{name} #{op}{phase}"


def read_graph(path: Path) -> Graph:
    """The graph in the file at `path`; `BadFile` says what is wrong with it."""
    return decode_graph(read_bytes(path, "graph"), str(path))


def decode_graph(data: bytes, source: str = "graph") -> Graph:
    """The graph in JSON text `data`; `source` names it in errors."""
    try:
        header = msgspec.json.decode(data, type=_Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(source, f"it is not whole JSON: {error}") from error
    if header.schema != SCHEMA:
        raise BadFile(
            f"{source} is not a graph that this memopt reads",
            why=f"its schema is {str(header.schema)[:80]!r}, not {SCHEMA!r}",
            try_="write the graph again in the form that docs/ describes",
        )
    try:
        rows = msgspec.json.decode(data, type=GraphFile)
    except (msgspec.DecodeError, RecursionError, OverflowError) as error:
        raise _bad(source, str(error)) from error
    return graph_from_rows(rows, source)


def graph_from_rows(rows: GraphFile, source: str = "graph") -> Graph:
    """Check the decoded file and turn it into columns."""
    index = _index_tensors(rows, source)
    resident = np.array([row.resident for row in rows.tensors], dtype=np.bool_)
    producer = np.full(len(rows.tensors), -1, dtype=np.int64)
    available = resident.tolist()
    reads: list[tuple[int, ...]] = []
    resident_reads: list[tuple[int, ...]] = []
    writes: list[tuple[int, ...]] = []
    for position, op in enumerate(rows.ops):
        where = f"op {position} ({op.name})" if op.name else f"op {position}"
        found = tuple(dict.fromkeys(_lookup(index, tensor, where, source) for tensor in op.reads))
        for tensor in found:
            if not available[tensor]:
                raise _bad(source, _unready(rows, tensor, where, position))
        made = tuple(_lookup(index, tensor, where, source) for tensor in op.writes)
        for tensor in made:
            _check_written(rows, tensor, available, resident, where, source)
            available[tensor] = True
            producer[tensor] = position
        reads.append(tuple(tensor for tensor in found if not resident[tensor]))
        resident_reads.append(tuple(tensor for tensor in found if resident[tensor]))
        writes.append(made)
    kept = np.zeros(len(rows.tensors), dtype=np.bool_)
    for tensor_id in rows.keep:
        tensor = _lookup(index, tensor_id, "keep", source)
        if not available[tensor]:
            raise _bad(source, f"keep names tensor {tensor_id}, which no op writes")
        kept[tensor] = True
    sizes = np.array([row.bytes for row in rows.tensors], dtype=np.int64)
    op_ms = np.array([op.ms for op in rows.ops], dtype=np.float64)
    return Graph(
        name=rows.name,
        tensor_ids=np.array([row.id for row in rows.tensors], dtype=np.int64),
        tensor_names=[row.name for row in rows.tensors],
        tensor_bytes=sizes,
        resident=resident,
        kept=kept,
        producer=producer,
        op_names=[op.name for op in rows.ops],
        op_phases=[op.phase for op in rows.ops],
        op_ms=op_ms,
        op_workspace_bytes=np.array([op.workspace_bytes for op in rows.ops], dtype=np.int64),
        replayable=np.array([op.replayable for op in rows.ops], dtype=np.bool_),
        reads=reads,
        resident_reads=resident_reads,
        writes=writes,
        resident_bytes=int(sizes[resident].sum()) if len(sizes) else 0,
        plain_ms=float(op_ms.sum()),
    )


def _index_tensors(rows: GraphFile, source: str) -> dict[int, int]:
    index: dict[int, int] = {}
    for position, row in enumerate(rows.tensors):
        if index.setdefault(row.id, position) != position:
            raise _bad(source, f"two tensors have the id {row.id}")
    if (
        sum(row.bytes for row in rows.tensors) + max((op.workspace_bytes for op in rows.ops), default=0)
        > MOST_BYTES_ALL
    ):
        raise _bad(source, "its tensors are together larger than 2^60 bytes")
    return index


def _lookup(index: dict[int, int], tensor_id: int, where: str, source: str) -> int:
    try:
        return index[tensor_id]
    except KeyError:
        raise _bad(source, f"{where} names tensor {tensor_id}, which `tensors` does not list") from None


def _unready(rows: GraphFile, tensor: int, where: str, position: int) -> str:
    """Why a tensor that is read does not exist yet."""
    tensor_id = rows.tensors[tensor].id
    for later in range(position, len(rows.ops)):
        if tensor_id in rows.ops[later].writes:
            if later == position:
                return f"{where} reads tensor {tensor_id}, which it writes itself (a cycle; a mutation writes a new tensor)"
            return (
                f"{where} reads tensor {tensor_id} before op {later} writes it (a cycle, or ops out of order)"
            )
    return f"{where} reads tensor {tensor_id}, which is not resident and which no op writes"


def _check_written(
    rows: GraphFile, tensor: int, available: list[bool], resident: BoolColumn, where: str, source: str
) -> None:
    if resident[tensor]:
        raise _bad(source, f"{where} writes tensor {rows.tensors[tensor].id}, which is resident")
    if available[tensor]:
        raise _bad(
            source,
            f"{where} writes tensor {rows.tensors[tensor].id}, which is written already (a mutation writes a new tensor)",
        )


def _bad(source: str, why: str) -> BadFile:
    return BadFile(f"{source} is not a usable graph", why=why, try_="write the graph again, or check it")
