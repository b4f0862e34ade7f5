"""What training an ONNX model would take: `model.onnx` -> the recording of a few steps, and what must be said of it."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from torch import Tensor

from memopt.errors import BadFile, MemoptError, UsageError
from memopt.estimators.fake.recorder import Target
from memopt.estimators.fake.torch_internals import FAKE_LOG
from memopt.estimators.hidden.hidden_memory import HiddenMemory
from memopt.estimators.onnx.interpret import Env, Run
from memopt.estimators.onnx.match.folded import (
    assume_batch_norms,
    assumed_batch_norms,
    folded_batch_norms,
    lost_dropout,
    missing,
    seen_by,
)
from memopt.estimators.onnx.match.layers import Matched, match
from memopt.estimators.onnx.ops.registry import Malformed
from memopt.estimators.onnx.read.graph import MOST_ELEMENTS, Graph, Model, Node, Weight, read_model
from memopt.estimators.onnx.read.lower import fix_dims, lower, without_dead
from memopt.estimators.onnx.read.parameters import pack, parameters, twins
from memopt.estimators.onnx.training import (
    Plan,
    check_choices,
    choose_loss,
    fold,
    known_values,
    main_type,
    record,
)
from memopt.estimators.recording import Recording
from memopt.units import format_bytes

if TYPE_CHECKING:
    from memopt.estimators.estimate import Estimate


@dataclass(frozen=True, slots=True)
class OnnxRecording:
    """The recorded steps of a model's training, and how far they can be trusted."""

    recording: Recording
    notes: list[str]
    """What was assumed, matched, guessed or found missing, one sentence each."""
    partial: bool
    """Some operators were not really computed; the notes name them."""
    parameter_count: int
    node_count: int


def plan_training(
    path: Path,
    *,
    batch_size: int | None,
    dims: Mapping[str, int],
    loss: str | None = None,
    faithful: bool = False,
    assume_bn: bool | None = None,
    least: bool = False,
) -> Plan:
    """The model at `path` made ready for training: dims fixed, parameters found, fused operators matched.

    Batch norms that the exporter folded are put back, unless `assume_bn` is False. Sizes that depend on data are the largest
    possible, or with `least` the smallest.
    """
    model = read_model(path)
    graph, notes = fix_dims(lower(model), batch_size, dims)
    _only_tensors(graph)
    trained = parameters(graph)
    suspects = [] if assume_bn is False else folded_batch_norms(graph)
    seen = seen_by(suspects)
    if suspects:
        graph, trained = _with_batch_norms(graph, trained, suspects)
    values, run = _folded(path, model, graph, trained, notes, least)
    graph, trained = pack(
        graph, trained, {n: tuple(v.shape) for n, v in values.items() if isinstance(v, Tensor)}
    )
    chosen, said = choose_loss([values.get(o) for o in graph.outputs], loss)
    notes = [*assumed_batch_norms(len(suspects), seen), *notes, said]
    lacks = missing(graph, len(suspects))
    known = known_values(graph, values, trained)
    graph = _without_known(graph, known)
    if not faithful:
        matched = match(graph, values, trained, model.producer, model.opset)
        graph = matched.graph
        notes += _of_matches(matched)
    trained = {n: w for n, w in trained.items() if n in graph.weights}
    notes += _remarks(graph, trained, run)
    bounded = [f"{title}: the largest possible output was taken" for title in run.bounded]
    return Plan(
        graph,
        trained,
        known,
        model.opset,
        main_type(trained),
        chosen,
        notes,
        dict(run.partial),
        bounded,
        least,
        lacks,
        lost_dropout(graph),
    )


def _with_batch_norms(
    graph: Graph, trained: Mapping[str, Weight], suspects: list[Node]
) -> tuple[Graph, dict[str, Weight]]:
    """The graph with a batch norm put back after each of `suspects`, and what is trained in it."""
    graph, added = assume_batch_norms(graph, suspects)
    graph = without_dead(graph)
    return graph, {**{n: w for n, w in trained.items() if n in graph.weights}, **added}


def _of_matches(matched: Matched) -> list[str]:
    if not matched.counts:
        return []
    return [f"matched back: {_counted(matched.counts)} (--faithful leaves the graph as it is)"]


def _folded(
    path: Path, model: Model, graph: Graph, trained: Mapping[str, Weight], notes: list[str], least: bool
) -> tuple[Env, Run]:
    try:
        return fold(model, graph, trained, least=least)
    except Malformed as wrong:
        raise BadFile(
            f"{path} cannot be interpreted", why=str(wrong), try_=f"python -m onnx.checker {path}"
        ) from wrong
    except BadFile as error:
        why = "; ".join([error.why, *notes])
        raise BadFile(
            f"{path}: {error.what}", why=why, try_=error.try_ or f"python -m onnx.checker {path}"
        ) from error


def _only_tensors(graph: Graph) -> None:
    for port in graph.inputs:
        if not port.is_tensor:
            raise UsageError(
                f"the input '{port.name}' is no tensor", why="sequences and maps as inputs are not estimated"
            )
        elements = math.prod(d for d in port.dims or () if isinstance(d, int))
        if elements > MOST_ELEMENTS:
            raise UsageError(
                f"the input '{port.name}' would have {elements} elements",
                try_="a smaller --batch-size or --dim",
            )


def _without_known(graph: Graph, known: Mapping[str, object]) -> Graph:
    nodes = tuple(n for n in graph.nodes if not all(o in known for o in n.outputs if o))
    return without_dead(dataclasses.replace(graph, nodes=nodes))


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _remarks(graph: Graph, trained: Mapping[str, Weight], run: Run) -> list[str]:
    said = []
    for table, head in twins(graph, trained):
        size = format_bytes(trained[head].elements * 4)
        said.append(
            f"'{table}' and '{head}' are counted as two weights; if the script ties them, {size} of fp32 weight is one too many"
        )
    said += [
        f"partial: {op} was not computed ({why}); its shapes are inferred and its inputs and outputs kept"
        for op, why in run.partial.items()
    ]
    said += [
        f"the size of {op}'s output depends on data: the largest possible one was taken"
        for op in dict.fromkeys(run.bounded.values())
    ]
    return said


class Training(TypedDict, total=False):
    """How a model would be trained; what is left out is as `record_onnx` has it."""

    batch_size: int | None
    dims: Mapping[str, int] | None
    """Free dimensions by name or place."""
    optimizer: str
    """`adamw` unless given."""
    dtype: str
    """`fp32` unless given."""
    loss: str | None
    faithful: bool
    """Match nothing back to fused operators."""
    assume_bn: bool | None
    """None: where folding is seen."""
    steps: int
    """3 unless given."""


def record_onnx(
    path: Path | str,
    *,
    target: Target = "cuda",
    hidden: HiddenMemory | None = None,
    **training: Unpack[Training],
) -> OnnxRecording:
    """The storages that some training steps of the model would allocate and free, without running or reading it."""
    optimizer, dtype, loss = (
        training.get("optimizer", "adamw"),
        training.get("dtype", "fp32"),
        training.get("loss"),
    )
    check_choices(optimizer, dtype, loss)

    def planned(*, least: bool) -> Plan:
        return plan_training(
            Path(path),
            batch_size=training.get("batch_size"),
            dims=training.get("dims") or {},
            loss=loss,
            faithful=training.get("faithful", False),
            assume_bn=training.get("assume_bn"),
            least=least,
        )

    def recorded(plan: Plan) -> Recording:
        return record(
            plan,
            optimizer=optimizer,
            dtype=dtype,
            target=target,
            hidden=hidden,
            steps=training.get("steps", 3),
        )

    with _unlogged():
        plan = planned(least=False)
        lacks = [*plan.lacks, *(plan.lacks_on_cpu if target == "cpu" else [])]
        recording = dataclasses.replace(recorded(plan), bounded=plan.bounded, lacks=lacks)
        if plan.bounded:
            with suppress(MemoptError):  # a graph may need more than the least to be selected
                recording = dataclasses.replace(recording, least=recorded(planned(least=True)))
    return OnnxRecording(
        recording=recording,
        notes=[*plan.notes, *recording.notes],
        partial=bool(plan.partial),
        parameter_count=sum(w.elements for w in plan.trained.values()),
        node_count=len(plan.graph.nodes),
    )


@contextmanager
def _unlogged() -> Iterator[None]:
    """torch logs a traceback of every operator that its fake tensors refuse; here that becomes one error."""
    log = logging.getLogger(FAKE_LOG)

    def nothing(record: logging.LogRecord) -> bool:
        return False

    log.addFilter(nothing)
    try:
        yield
    finally:
        log.removeFilter(nothing)


def estimate_onnx(
    path: Path | str,
    *,
    device: str = "a100-80gb",
    alloc_conf: str = "",
    calibration: Path | None = None,
    **training: Unpack[Training],
) -> Estimate:
    """The peak memory of training the model at `path` on `device`, without running it or reading its weights.

    Raises `UsageError` for dims left free and names that do not exist, `BadFile` for a file that is no usable model.
    """
    from memopt.devices import find_device
    from memopt.estimators.estimate import estimate_recording
    from memopt.estimators.hidden.calibrated import calibrated_by, on_device

    spec = calibrated_by(find_device(device), calibration)
    made = record_onnx(path, **on_device(spec), **training)
    found = estimate_recording(made.recording, spec, alloc_conf=alloc_conf, partial=made.partial)
    return dataclasses.replace(found, notes=list(dict.fromkeys([*made.notes, *found.notes])))
