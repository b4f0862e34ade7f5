"""Reading ONNX files: weights are never read, and whatever is wrong with a file is said in one clear error."""

from __future__ import annotations

import contextlib
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from memopt.errors import BadFile, MemoptError, UsageError
from memopt.estimators.onnx.estimate import record_onnx
from memopt.estimators.onnx.read.graph import read_model
from memopt.estimators.onnx.read.lower import lower
from memopt.estimators.onnx.read.wire import SMALL_BYTES, skim

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def tensor(name: str, *dims: int) -> TensorProto:
    return numpy_helper.from_array(np.zeros(dims, np.float32), name)


def hollow(name: str, *dims: int, kind: int = FLOAT) -> TensorProto:
    """A tensor without data: what a skim leaves, or what a hostile file claims."""
    proto = TensorProto(name=name, data_type=kind)
    proto.dims.extend(dims)
    return proto


def model(
    nodes: list[Any],
    *,
    weights: list[TensorProto] | None = None,
    inputs: list[Any] | None = None,
    output: str = "y",
    opset: int = 18,
    functions: list[Any] | None = None,
) -> onnx.ModelProto:
    given_inputs = inputs or [helper.make_tensor_value_info("x", FLOAT, ["batch", 8])]
    graph = helper.make_graph(
        nodes, "g", given_inputs, [helper.make_tensor_value_info(output, FLOAT, None)], weights or []
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=functions or [])


def mlp() -> onnx.ModelProto:
    return model(
        [
            helper.make_node("Gemm", ["x", "w", "b"], ["h"], transB=1),
            helper.make_node("Relu", ["h"], ["r"]),
            helper.make_node("Gemm", ["r", "v"], ["y"], transB=1),
        ],
        weights=[tensor("w", 16, 8), tensor("b", 16), tensor("v", 4, 16)],
    )


def saved(proto: onnx.ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    path = folder / name
    path.write_bytes(proto.SerializeToString())
    return path


# the skim


def test_skim_keeps_small_tensors_and_drops_the_payload_of_large_ones(tmp_path: Path) -> None:
    small, large = tensor("w", 16, 8), tensor("v", 4, 100_000)
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["h"], transB=1),
        helper.make_node("MatMul", ["h", "v2"], ["y"]),
        helper.make_node("Constant", [], ["v2"], value=large),
    ]
    path = saved(model(nodes[::-1], weights=[small]), tmp_path)
    left = onnx.ModelProto.FromString(skim(path))
    assert path.stat().st_size > 1_600_000 > 2000 > len(skim(path))
    assert left.graph.initializer[0] == small
    constant = left.graph.node[0].attribute[0].t if left.graph.node[0].op_type == "Constant" else None
    found = constant or next(n for n in left.graph.node if n.op_type == "Constant").attribute[0].t
    assert list(found.dims) == [4, 100_000]
    assert not found.raw_data


def test_skim_of_a_small_model_changes_nothing(tmp_path: Path) -> None:
    path = saved(mlp(), tmp_path)
    assert skim(path) == path.read_bytes()


def test_memory_does_not_grow_with_the_weights(tmp_path: Path) -> None:
    path = tmp_path / "big.onnx"
    proto = model([helper.make_node("MatMul", ["x", "w"], ["y"])], weights=[hollow("w", 8, 16_000_000)])
    head = proto.SerializeToString()
    payload = 8 * 16_000_000 * 4
    weight = _field(9, payload) + b""
    tensor_length = len(proto.graph.initializer[0].SerializeToString()) + len(weight) + payload
    graph = helper.make_graph(list(proto.graph.node), "g", list(proto.graph.input), list(proto.graph.output))
    body = graph.SerializeToString()
    rest = onnx.ModelProto(ir_version=8, opset_import=proto.opset_import).SerializeToString()
    with path.open("wb") as file:
        initialiser = _field(5, tensor_length) + proto.graph.initializer[0].SerializeToString() + weight
        file.write(rest + _field(7, len(body) + len(initialiser) + payload) + body + initialiser)
        file.seek(payload - 1, 1)
        file.write(b"\0")
    assert len(head) < 1000
    tracemalloc.start()
    found = read_model(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.graph.weights["w"].dims == (8, 16_000_000)
    assert path.stat().st_size > 512_000_000
    assert peak < 10_000_000


def test_a_file_above_two_gigabytes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.onnx"
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", FLOAT, [2, 1000])],
        [helper.make_tensor_value_info("y", FLOAT, None)],
    ).SerializeToString()
    payload = 1000 * 600_000 * 4
    dims = hollow("w", 1000, 600_000).SerializeToString()
    weight = _field(9, payload)
    initialiser = _field(5, len(dims) + len(weight) + payload) + dims + weight
    rest = onnx.ModelProto(ir_version=8, opset_import=[helper.make_opsetid("", 18)]).SerializeToString()
    with path.open("wb") as file:  # sparse: takes no room on the disk
        file.write(rest + _field(7, len(graph) + len(initialiser) + payload) + graph + initialiser)
        file.truncate(file.tell() + payload)
    assert path.stat().st_size > 2**31
    found = record_onnx(path, optimizer="sgd", target="cpu", loss="mean", steps=1)
    assert found.parameter_count == 600_000_000
    assert found.recording.peak()[0] > 2 * payload


def _field(number: int, length: int) -> bytes:
    out = bytearray([number << 3 | 2])
    while length > 0x7F:
        out.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*out, length])


# external data


@pytest.mark.parametrize("location", ["weights.bin", "../../../../etc/passwd", "/etc/shadow", "", "a\0b"])
def test_external_data_is_never_opened(tmp_path: Path, location: str) -> None:
    weight = hollow("w", 8, 4)
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    weight.external_data.add(key="length", value=str(2**62))
    path = saved(model([helper.make_node("MatMul", ["x", "w"], ["y"])], weights=[weight]), tmp_path)
    found = record_onnx(path, batch_size=2, target="cpu")
    assert found.parameter_count == 32


# bad files


def refused(path: Path, **more: Any) -> MemoptError:
    with pytest.raises((BadFile, UsageError)) as caught:
        record_onnx(path, **{"batch_size": 2, "target": "cpu", **more})
    assert str(caught.value)
    assert caught.value.what
    return caught.value


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0",
        b"not a model at all",
        b"\x80\x02}q\x00.",
        b"PK\x03\x04" + b"\0" * 100,
        b"\xff" * 200,
        b"\x0a\xff\xff\xff\xff\x0f",
    ],
)
def test_what_is_not_onnx_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert "is not an ONNX model" in str(refused(path))


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "none.onnx")
    refused(tmp_path)


def test_every_truncation_is_refused_or_read(tmp_path: Path) -> None:
    whole = mlp().SerializeToString()
    path = tmp_path / "model.onnx"
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        try:
            record_onnx(path, batch_size=2, target="cpu", steps=1)
        except MemoptError:
            continue


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 8))
def test_damaged_bytes_give_an_estimate_or_one_clear_error(tmp_path: Path, seed: int, count: int) -> None:
    generator = random.Random(seed)
    data = bytearray(mlp().SerializeToString())
    for _ in range(count):
        data[generator.randrange(len(data))] = generator.randrange(256)
    path = tmp_path / "model.onnx"
    path.write_bytes(bytes(data))
    with contextlib.suppress(MemoptError):
        record_onnx(path, batch_size=2, target="cpu", steps=1)


def test_a_cycle_is_refused(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Add", ["x", "b"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Relu", ["b"], ["y"]),
    ]
    error = refused(saved(model(nodes), tmp_path))
    assert "cycle" in str(error)


def test_a_value_that_nothing_computes_is_refused(tmp_path: Path) -> None:
    error = refused(saved(model([helper.make_node("Add", ["x", "ghost"], ["y"])]), tmp_path))
    assert "'ghost'" in str(error)
    error = refused(saved(model([helper.make_node("Relu", ["x"], ["z"])]), tmp_path))
    assert "'y'" in str(error)


def test_duplicate_names_are_refused(tmp_path: Path) -> None:
    twice = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["y"])]
    assert "twice" in str(refused(saved(model(twice), tmp_path)))
    weights = [tensor("w", 8, 4), tensor("w", 8, 4)]
    error = refused(saved(model([helper.make_node("MatMul", ["x", "w"], ["y"])], weights=weights), tmp_path))
    assert "'w'" in str(error)


@pytest.mark.parametrize("dims", [(-1, 8), (2**40, 2**40), (2**62, 2), (-(2**63), 1)])
def test_impossible_dims_are_refused(tmp_path: Path, dims: tuple[int, int]) -> None:
    path = saved(
        model([helper.make_node("MatMul", ["x", "w"], ["y"])], weights=[hollow("w", *dims)]), tmp_path
    )
    assert "'w'" in str(refused(path))


def test_impossible_input_dims_are_refused(tmp_path: Path) -> None:
    for dims in ([2**40, 2**40], [-3, 8]):
        x = helper.make_tensor_value_info("x", FLOAT, [2, 8])
        x.type.tensor_type.shape.dim[0].dim_value, x.type.tensor_type.shape.dim[1].dim_value = dims
        refused(saved(model([helper.make_node("Relu", ["x"], ["y"])], inputs=[x]), tmp_path), batch_size=None)


@pytest.mark.parametrize(
    ("op", "values"),
    [("Expand", [10**6, 10**6]), ("Tile", [10**7, 10**5]), ("ConstantOfShape", [2**20, 2**20])],
)
def test_bombs_of_small_numbers_take_no_memory(tmp_path: Path, op: str, values: list[int]) -> None:
    record_onnx(
        saved(mlp(), tmp_path), batch_size=2, target="cpu", steps=1
    )  # what that imports is no matter of the file
    shape = numpy_helper.from_array(np.array(values, np.int64), "shape")
    one = numpy_helper.from_array(np.ones((1, 1), np.int64), "one")
    inputs = ["shape"] if op == "ConstantOfShape" else ["one", "shape"]
    nodes = [
        helper.make_node(op, inputs, ["big"]),
        helper.make_node("ReduceSum", ["big"], ["s"], keepdims=0),
        helper.make_node("Cast", ["s"], ["f"], to=FLOAT),
        helper.make_node("MatMul", ["x", "w"], ["z"]),
        helper.make_node("Mul", ["z", "f"], ["y"]),
    ]
    tracemalloc.start()
    with contextlib.suppress(MemoptError):
        record_onnx(
            saved(model(nodes, weights=[shape, one, tensor("w", 8, 4)]), tmp_path),
            batch_size=2,
            target="cpu",
            steps=1,
        )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * SMALL_BYTES + 50_000_000


def test_a_node_without_its_inputs_is_refused(tmp_path: Path) -> None:
    for op in (
        "Conv",
        "Gemm",
        "MatMul",
        "BatchNormalization",
        "LSTM",
        "Reshape",
        "Gather",
        "Concat",
        "Attention",
        "Relu",
    ):
        nodes = [helper.make_node(op, [], ["z"]), helper.make_node("Add", ["x", "z"], ["y"])]
        error = refused(saved(model(nodes, opset=23), tmp_path))
        assert op in str(error)


def test_shapes_that_do_not_fit_are_refused_with_the_node(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="head")]
    error = refused(saved(model(nodes, weights=[tensor("w", 5, 4)]), tmp_path))
    assert "MatMul 'head'" in str(error)
    assert "[2, 8], [5, 4]" in str(error)


def test_functions_that_call_themselves_are_refused(tmp_path: Path) -> None:
    again = helper.make_function(
        "local",
        "F",
        ["a"],
        ["b"],
        [helper.make_node("F", ["a"], ["b"], domain="local")],
        [helper.make_opsetid("", 18)],
    )
    path = saved(model([helper.make_node("F", ["x"], ["y"], domain="local")], functions=[again]), tmp_path)
    assert "calls itself" in str(refused(path))


def test_functions_that_multiply_are_refused(tmp_path: Path) -> None:
    functions = []
    for level in range(30):
        inner = "Relu" if level == 0 else f"F{level - 1}"
        domain = "" if level == 0 else "local"
        nodes = [
            helper.make_node(inner, ["a"], ["c"], domain=domain),
            helper.make_node(inner, ["c"], ["b"], domain=domain),
        ]
        functions.append(
            helper.make_function("local", f"F{level}", ["a"], ["b"], nodes, [helper.make_opsetid("", 18)])
        )
    path = saved(
        model([helper.make_node("F29", ["x"], ["y"], domain="local")], functions=functions), tmp_path
    )
    assert "writes itself out" in str(refused(path))


@pytest.mark.parametrize(("op", "inputs"), [("Mul", ["h", "other"]), ("Det", ["flat"]), ("ScatterElements", ["h", "three", "h"])])  # fmt: skip
def test_what_cannot_be_computed_is_one_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], op: str, inputs: list[str]
) -> None:
    weights = {
        "w": np.ones((8, 8)),
        "other": np.ones((7, 5)),
        "three": np.zeros((1, 1, 1)),
        "long": np.array([-1]),
    }
    kinds = {"three": np.int64, "long": np.int64}
    made = [numpy_helper.from_array(v.astype(kinds.get(n, np.float32)), n) for n, v in weights.items()]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Reshape", ["h", "long"], ["flat"]),
        helper.make_node(op, inputs, ["y"]),
    ]
    assert f"node {op} 'y' cannot be computed" in str(refused(saved(model(nodes, weights=made), tmp_path)))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("empty", [False, True])
def test_a_loop_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty: bool) -> None:
    monkeypatch.setattr("memopt.estimators.onnx.interpret.MOST_STEPS", 2000)
    nodes = [helper.make_node("Identity", ["c"], ["going"]), helper.make_node("Relu", ["a"], ["b"])]
    body = helper.make_graph(
        [] if empty else nodes,
        "body",
        [
            helper.make_tensor_value_info("i", INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("a", FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("c" if empty else "going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("a" if empty else "b", FLOAT, None),
        ],
    )
    most = numpy_helper.from_array(np.array(2**62, np.int64), "most")
    path = saved(
        model([helper.make_node("Loop", ["most", "", "x"], ["y"], body=body)], weights=[most]), tmp_path
    )
    assert "loop" in str(refused(path)).lower()


# functions


def test_local_functions_are_written_out_with_their_attributes(tmp_path: Path) -> None:
    scale = helper.make_node("LeakyRelu", ["a"], ["c"])
    scale.attribute.append(
        onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    )
    nodes = [scale, helper.make_node("Relu", ["c"], ["b"])]
    function = helper.make_function(
        "local", "F", ["a"], ["b"], nodes, [helper.make_opsetid("", 18)], ["slope"]
    )
    calls = [
        helper.make_node("F", ["x"], ["m"], domain="local", slope=0.5),
        helper.make_node("F", ["m"], ["y"], domain="local", slope=0.25),
    ]
    graph = lower(read_model(saved(model(calls, functions=[function]), tmp_path)))
    assert [n.op for n in graph.nodes] == ["LeakyRelu", "Relu", "LeakyRelu", "Relu"]
    assert [n.attributes["alpha"] for n in graph.nodes if n.op == "LeakyRelu"] == [0.5, 0.25]
    assert len({o for n in graph.nodes for o in n.outputs}) == 4
    assert graph.nodes[-1].outputs == ("y",)


# free dims


def two_free() -> onnx.ModelProto:
    ids = helper.make_tensor_value_info("ids", INT64, ["batch", "seq"])
    nodes = [helper.make_node("Gather", ["table", "ids"], ["y"])]
    return model(nodes, weights=[tensor("table", 100, 8)], inputs=[ids])


def test_free_dims_are_named_with_the_flag_that_sets_them(tmp_path: Path) -> None:
    path = saved(two_free(), tmp_path)
    error = refused(path, batch_size=None)
    assert isinstance(error, UsageError)
    assert "'batch' (axis 0 of ids)" in error.what
    assert "'seq' (axis 1 of ids)" in error.what
    assert error.try_ == "--batch-size 32 --dim seq=512"
    error = refused(path, batch_size=2)
    assert "'seq'" in error.what
    assert "batch" not in error.what
    assert error.try_ == "--dim seq=512"


def test_dims_are_set_by_name_or_by_place(tmp_path: Path) -> None:
    path = saved(two_free(), tmp_path)
    by_name = record_onnx(path, batch_size=3, dims={"seq": 5}, target="cpu")
    by_place = record_onnx(path, dims={"ids.0": 3, "ids.1": 5}, target="cpu")
    assert by_name.recording.peak() == by_place.recording.peak()
    assert any("[3, 5, 8]" in note for note in by_name.notes)


def test_two_sizes_for_the_batch_are_refused(tmp_path: Path) -> None:
    error = refused(saved(two_free(), tmp_path), batch_size=4, dims={"batch": 8, "seq": 5})
    assert isinstance(error, UsageError)
    assert error.what == "--batch-size 4 and --dim batch=8 contradict each other"
    record_onnx(tmp_path / "model.onnx", batch_size=8, dims={"batch": 8, "seq": 5}, target="cpu")


def test_an_unknown_dim_names_the_known_ones(tmp_path: Path) -> None:
    error = refused(saved(two_free(), tmp_path), dims={"sequence": 5})
    assert isinstance(error, UsageError)
    assert "batch, seq" in error.why


@pytest.mark.parametrize("size", [0, -1, 2**40])
def test_sizes_that_cannot_be_are_refused(tmp_path: Path, size: int) -> None:
    assert isinstance(refused(saved(two_free(), tmp_path), dims={"seq": size}), UsageError)


def test_a_fixed_batch_is_replaced_and_said(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", FLOAT, [1, 8])
    proto = model([helper.make_node("MatMul", ["x", "w"], ["y"])], weights=[tensor("w", 8, 4)], inputs=[x])
    found = record_onnx(saved(proto, tmp_path), batch_size=64, target="cpu")
    assert any("fixes the batch" in note and "64" in note for note in found.notes)
    assert any("[64, 4]" in note for note in found.notes)


@pytest.mark.parametrize(
    ("more", "names"),
    [({"optimizer": "adm"}, "adamw"), ({"dtype": "fp8"}, "amp-bf16"), ({"loss": "hinge"}, "cross-entropy")],
)
def test_unknown_choices_list_the_known_ones(tmp_path: Path, more: dict[str, str], names: str) -> None:
    error = refused(saved(mlp(), tmp_path), **more)
    assert isinstance(error, UsageError)
    assert names in error.try_
