"""An ONNX model as plain frozen data: graphs, nodes, weights as (type, dims), checked before anything is computed.

`read_model` reads no weights (see `wire`) and opens no external data file, so a path in `external_data` can point
anywhere without harm. Values of tensors up to 64 KiB are kept: shapes, axes and indices are computed with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memopt.errors import BadFile, NotPossibleHere
from memopt.estimators.onnx.read.wire import SMALL_BYTES, not_onnx, skim

Array = NDArray[Any]
Dim = int | str | None

MOST_ELEMENTS = 2**50
"""A tensor with more elements than this is a mistake or an attack, not a model."""

MOST_RANK = 64


@dataclass(frozen=True, slots=True)
class Weight:
    """An initialiser or constant: its ONNX element type, its dims, and its values when they are small and at hand."""

    name: str
    kind: int
    dims: tuple[int, ...]
    values: Array | None = None
    told: str = ""
    """What the exporter says that it was in the script: `PARAMETER`, `BUFFER`, `CONSTANT_TENSOR`; mostly nothing."""

    @property
    def elements(self) -> int:
        return math.prod(self.dims)


@dataclass(frozen=True, slots=True)
class Port:
    """A graph input or a value with a declared type; a dim is a number, a name, or unknown."""

    name: str
    kind: int
    dims: tuple[Dim, ...] | None
    is_tensor: bool = True


@dataclass(frozen=True, slots=True)
class Reference:
    """An attribute of a node inside a function that takes its value from the call."""

    name: str


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. `attributes` hold ints, floats, strings, tuples of them, `Weight`, `Graph` or `Reference`."""

    op: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    scope: str = ""
    """The module that the node came from, as far as the exporter wrote it down."""
    origin: str = ""
    """The class of that module, likewise: a Conv that came from a BatchNorm2d has one folded into it."""
    call: str = ""
    """The operator that the script called there, likewise: `aten.softmax.int`."""
    line: str = ""
    """The line of the script that called it, likewise."""

    @property
    def title(self) -> str:
        where = self.name or next((o for o in self.outputs if o), "")
        return f"{self.op} '{where}'" if where else self.op


@dataclass(frozen=True, slots=True)
class Graph:
    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, Weight]
    declared: Mapping[str, Port]


@dataclass(frozen=True, slots=True)
class Function:
    """A model-local function; its nodes see only its inputs and the attributes of the call."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    opset: int
    defaults: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Model:
    graph: Graph
    opset: int
    producer: str
    functions: Mapping[tuple[str, str], Function]


def read_model(path: Path) -> Model:
    """The model in the file at `path`; raises `BadFile` for anything that is not a usable one."""
    try:
        import onnx
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    except ImportError as error:
        raise NotPossibleHere(
            "reading ONNX models needs the onnx package", why=str(error), try_="pip install 'memopt[onnx]'"
        ) from error

    proto = onnx.ModelProto()
    data = skim(path)
    try:
        proto.ParseFromString(data)
    except (DecodeError, RecursionError, ValueError) as error:
        raise not_onnx(path, str(error)) from error
    if not proto.HasField("graph") or not (proto.graph.node or proto.graph.output):
        raise not_onnx(path, "it holds no graph")
    try:
        model = _model(proto)
        _check_graph(model.graph, set(), 0)
        _check_functions(model)
    except _Wrong as wrong:
        raise BadFile(
            f"{path} is not a valid ONNX model",
            why=str(wrong),
            try_="python -m onnx.checker, or export it again",
        ) from wrong
    return model


class _Wrong(Exception):
    pass


def _model(proto: Any) -> Model:
    opsets = {_domain(o.domain): o.version for o in proto.opset_import}
    opset = opsets.get("", 0 if not opsets else 18)
    if not 1 <= opset <= 1000:
        raise _Wrong(f"it imports opset {opset} of the ONNX operators")
    functions = {(_domain(f.domain), _text(f.name)): _function(f, opset) for f in proto.functions}
    return Model(_graph(proto.graph, 0), opset, _text(proto.producer_name).lower(), functions)


def _domain(domain: Any) -> str:
    return "" if domain == "ai.onnx" else _text(domain)


def _text(value: Any) -> str:
    """A string field; protobuf hands over bytes when it is no UTF-8."""
    return value if isinstance(value, str) else bytes(value).decode("utf-8", "backslashreplace")


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(_text(v) for v in values)


def _function(proto: Any, opset: int) -> Function:
    own = {_domain(o.domain): o.version for o in proto.opset_import}
    defaults = {_text(a.name): _attribute(a, 0) for a in proto.attribute_proto}
    nodes = tuple(_node(n, 0) for n in proto.node)
    return Function(_texts(proto.input), _texts(proto.output), nodes, own.get("", opset), defaults)


def _graph(proto: Any, depth: int) -> Graph:
    if depth > 16:
        raise _Wrong("graphs are nested more than 16 deep")
    weights: dict[str, Weight] = {}
    for tensor in proto.initializer:
        name = _text(tensor.name)
        if name in weights:
            raise _Wrong(f"two initialisers are named '{name}'")
        weights[name] = _weight(tensor)
    for sparse in proto.sparse_initializer:
        name = _text(sparse.values.name)
        weights[name] = Weight(name, sparse.values.data_type, _dims(sparse.dims, name))
    for value in proto.value_info:
        name = _text(value.name)
        if name in weights and value.metadata_props:
            weights[name] = replace(weights[name], told=_told(value).get(_KIND, ""))
    ports = [_port(v) for v in (*proto.input, *proto.value_info, *proto.output)]
    declared = {p.name: p for p in ports}
    inputs = [declared[_text(v.name)] for v in proto.input]
    return Graph(
        name=_text(proto.name),
        nodes=tuple(_node(n, depth) for n in proto.node),
        inputs=tuple(p for p in inputs if p.name not in weights),
        outputs=_texts(v.name for v in proto.output),
        weights=weights,
        declared=declared,
    )


def _port(proto: Any) -> Port:
    kind, name = proto.type.WhichOneof("value"), _text(proto.name)
    if kind != "tensor_type":
        return Port(name, 0, None, is_tensor=kind is None)
    tensor = proto.type.tensor_type
    if not tensor.HasField("shape"):
        return Port(name, tensor.elem_type, None)
    dims: list[Dim] = []
    for dim in tensor.shape.dim:
        if dim.WhichOneof("value") == "dim_value":
            if dim.dim_value < 0:
                raise _Wrong(f"'{name}' has a dimension of {dim.dim_value}")
            dims.append(dim.dim_value)
        else:
            dims.append(_text(dim.dim_param) or None)
    known = [d for d in dims if isinstance(d, int)]
    _dims(known, name)
    return Port(name, tensor.elem_type, tuple(dims))


def _node(proto: Any, depth: int) -> Node:
    attributes = {_text(a.name): _attribute(a, depth) for a in proto.attribute}
    return Node(
        _text(proto.op_type),
        _domain(proto.domain),
        _texts(proto.input),
        _texts(proto.output),
        attributes,
        _text(proto.name),
        *_scope(proto),
    )


_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"


def _told(proto: Any) -> dict[str, str]:
    """What the exporter wrote beside a node or a value."""
    return {_text(e.key): _text(e.value) for e in proto.metadata_props}


def _scope(proto: Any) -> tuple[str, str, str, str]:
    """`layer1.0.bn1`, its class, the operator called and the line that did, from torch.onnx's metadata; or the module from a
    name `/layer1/layer1.0/conv1/Conv`."""
    told = _told(proto)
    if "pkg.torch.onnx.name_scopes" in told:
        names: list[str] = re.findall(r"'([^']*)'", told["pkg.torch.onnx.name_scopes"])
        classes: list[str] = re.findall(r"'([^']*)'", told.get("pkg.torch.onnx.class_hierarchy", ""))
        module, origin = (path[-2] if len(path) > 1 else "" for path in (names, classes))
        call = classes[-1] if classes and classes[-1].startswith("aten.") else ""
        trace = told.get("pkg.torch.onnx.stack_trace", "").strip().splitlines()
        return module, origin, call, trace[-1].strip() if trace else ""
    parts = _text(proto.name).strip("/").split("/")[:-1]
    return next((p for p in reversed(parts) if p), ""), "", "", ""


def _attribute(proto: Any, depth: int) -> Any:
    if proto.ref_attr_name:
        return Reference(_text(proto.ref_attr_name))
    match proto.type:
        case 1:
            return proto.f
        case 2:
            return proto.i
        case 3:
            return proto.s.decode("utf-8", "replace")
        case 4:
            return _weight(proto.t)
        case 5:
            return _graph(proto.g, depth + 1)
        case 6:
            return tuple(proto.floats)
        case 7:
            return tuple(proto.ints)
        case 8:
            return tuple(s.decode("utf-8", "replace") for s in proto.strings)
        case 10:
            return tuple(_graph(g, depth + 1) for g in proto.graphs)
        case 11:
            values = proto.sparse_tensor.values
            name = _text(proto.name)
            return Weight(name, values.data_type, _dims(proto.sparse_tensor.dims, name))
    return None


def _weight(proto: Any) -> Weight:
    name = _text(proto.name)
    dims = _dims(proto.dims, name)
    if not 1 <= proto.data_type <= 63:
        raise _Wrong(f"tensor '{name}' has no element type")
    return Weight(name, proto.data_type, dims, _values(proto, dims))


def _values(proto: Any, dims: tuple[int, ...]) -> Array | None:
    from onnx import TensorProto, helper, numpy_helper

    outside = proto.data_location == TensorProto.EXTERNAL or len(proto.external_data) > 0
    if outside or proto.data_type in (TensorProto.STRING, TensorProto.UNDEFINED):
        return None
    if math.prod(dims) * 8 > SMALL_BYTES * 8:
        return None
    try:
        size = helper.tensor_dtype_to_np_dtype(proto.data_type).itemsize
        if math.prod(dims) * size > SMALL_BYTES:
            return None
        return np.asarray(numpy_helper.to_array(proto))
    except (ValueError, TypeError, KeyError) as error:
        raise _Wrong(f"the data of tensor '{_text(proto.name)}' do not fill its dims {list(dims)}") from error


def _dims(dims: Any, name: str) -> tuple[int, ...]:
    out = tuple(int(d) for d in dims)
    if len(out) > MOST_RANK:
        raise _Wrong(f"tensor '{name}' has {len(out)} dimensions")
    if any(d < 0 for d in out) or math.prod(out) > MOST_ELEMENTS:
        raise _Wrong(
            f"tensor '{name}' has the dims {list(out[:8])}: more than 2^50 elements, or less than none"
        )
    return out


def subgraphs(node: Node) -> Iterator[Graph]:
    """The graphs in a node's attributes (branches and bodies)."""
    for value in node.attributes.values():
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Graph):
                yield item


def _check_graph(graph: Graph, outer: set[str], depth: int) -> None:
    """Every name is written once, before it is read: no cycles, no twins, nothing out of the air."""
    known = outer | set(graph.weights) | {p.name for p in graph.inputs}
    later = {o for n in graph.nodes for o in n.outputs if o}
    written: set[str] = set()
    for node in graph.nodes:
        for name in node.inputs:
            if name and name not in known:
                raise _Wrong(_unknown_input(node, name, name in later))
        for inner in subgraphs(node):
            _check_graph(inner, known, depth + 1)
        for name in node.outputs:
            if name and (name in written or name in graph.weights):
                raise _Wrong(f"the value '{name}' is written twice")
            if name:
                written.add(name)
                known.add(name)
    for name in graph.outputs:
        if name not in known:
            raise _Wrong(f"nothing computes the output '{name}'")


def _unknown_input(node: Node, name: str, later: bool) -> str:
    if later:
        return f"{node.title} reads '{name}' before it is computed: the graph has a cycle or is out of order"
    return f"{node.title} reads '{name}', which nothing computes"


def _check_functions(model: Model) -> None:
    """No function calls itself, directly or through others."""
    calls = {
        key: {(n.domain, n.op) for n in walk(f.nodes)} & set(model.functions)
        for key, f in model.functions.items()
    }
    done: set[tuple[str, str]] = set()
    while len(done) < len(calls):
        ready = {key for key, needs in calls.items() if key not in done and needs <= done}
        if not ready:
            name = next(key[1] for key in calls if key not in done)
            raise _Wrong(f"the function '{name}' calls itself")
        done |= ready


def walk(nodes: tuple[Node, ...]) -> Iterator[Node]:
    """All nodes, those of branches and bodies included."""
    for node in nodes:
        yield node
        for inner in subgraphs(node):
            yield from walk(inner.nodes)
