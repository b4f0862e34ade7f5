"""A calibration of a device replaces what the table says of it, in every kind of estimate, and is named."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from memopt.cli.main import group
from memopt.devices import find_device
from memopt.errors import NotPossibleHere, UsageError
from memopt.estimators.hidden.calibrated import calibration_of, calibration_path
from memopt.estimators.hidden.hidden_memory import HiddenRow, HiddenRows
from tests.support.profiled import profiler

MIB = 1 << 20
SCRIPT = """
import torch
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.randn(64, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def row(name: str, mib: int, **extra: str) -> HiddenRow:
    return HiddenRow(
        name=name, value=mib * MIB, low=mib * MIB, high=mib * MIB, unit="bytes", lifetime="process", source="a test",
        device="h200", torch_from="2.11", torch_to="2.11", cuda_from="13.0", cuda_to="13.0", measured=True, **extra,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture
def calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("MEMOPT_CALIBRATION", raising=False)
    path = tmp_path / "measured.json"
    rows = [
        row("cuda_context", 700, where="process"),
        row("lazy_kernels", 0, where="process"),
        row("cublas_workspace", 64, where="allocated"),
    ]
    path.write_bytes(msgspec.json.encode(HiddenRows(rows=rows)))
    return path


def test_the_named_file_then_the_one_in_the_configuration_folder(
    calibration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    h200, other = find_device("h200"), find_device("a100-80gb")
    published = calibration_of(h200)
    assert published.path is None
    assert published.notes() == []
    kept = calibration.parent / "config" / "memopt" / "calibration.json"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(calibration.read_bytes())
    assert calibration_path() == kept
    monkeypatch.setenv("MEMOPT_CALIBRATION", str(calibration))
    found = calibration_of(h200)
    assert found.path == calibration
    assert found.hidden.process().size_bytes == 700 * MIB
    assert found.hidden.torch_version == "2.11"
    assert calibration_of(other).path is None


def test_a_named_file_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CALIBRATION", "/nowhere/calibration.json")
    with pytest.raises(UsageError):
        calibration_of(find_device("h200"))


@pytest.mark.script
def test_a_script_is_estimated_with_it(calibration: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("train.py").write_text(SCRIPT)

    def estimate(*options: str) -> dict[str, object]:
        with monkeypatch.context() as patch:
            patch.setenv("MEMOPT_CALIBRATION", "")
            ran = CliRunner().invoke(
                group, ["estimate", "--json", *options, "train.py"], standalone_mode=False
            )
        assert ran.exception is None, ran.output
        return json.loads(ran.stdout)  # type: ignore[no-any-return]

    plain = estimate("--device", "h200")
    measured = estimate("--device", "h200", "--calibration", str(calibration))
    elsewhere = estimate("--device", "a100-80gb", "--calibration", str(calibration))
    assert measured["context_bytes"] == 700 * MIB
    assert measured["allocated_bytes"] == plain["allocated_bytes"] + 2 * 32 * MIB  # type: ignore[operator]
    assert str(calibration) in " ".join(measured["notes"])  # type: ignore[arg-type]
    assert str(calibration) not in " ".join(elsewhere["notes"])  # type: ignore[arg-type]


def test_an_onnx_model_is_estimated_with_it_and_for_its_device(
    calibration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx = pytest.importorskip("onnx")
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    weight = helper.make_tensor("w", floats, [64, 64], b"\0" * 64 * 64 * 4, raw=True)
    ports = [[helper.make_tensor_value_info(name, floats, ["n", 64])] for name in "xy"]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", *ports, [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), "m.onnx")

    def estimate(*options: str) -> dict[str, object]:
        with monkeypatch.context() as patch:
            patch.setenv("MEMOPT_CALIBRATION", "")
            words = ["estimate", "m.onnx", "--batch-size", "8", "--json", *options]
            ran = CliRunner().invoke(group, words, standalone_mode=False)
        assert ran.exception is None, ran.output
        return json.loads(ran.stdout)  # type: ignore[no-any-return]

    a100, h200 = estimate("--device", "a100-80gb"), estimate("--device", "h200")
    assert h200["allocated_bytes"] == a100["allocated_bytes"] + 2 * (33_554_432 - 8_519_680)  # type: ignore[operator]
    measured = estimate("--device", "h200", "--calibration", str(calibration))
    assert measured["context_bytes"] == 700 * MIB
    assert measured["allocated_bytes"] == h200["allocated_bytes"] + 2 * 32 * MIB  # type: ignore[operator]
    assert str(calibration) in " ".join(measured["notes"])  # type: ignore[arg-type]


def test_a_profile_is_estimated_with_it(calibration: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memopt.estimators.elsewhere.from_profile import estimate_trace
    from memopt.trace import load_trace

    Path("train.py").write_text(SCRIPT.replace(".cuda()", "").replace(', device="cuda"', ""))
    monkeypatch.setenv("MEMOPT_CALIBRATION", "")
    with profiler(Path.cwd()) as server:
        ran = server.memopt("profile", "-o", "cpu.profile", "train.py")
    assert ran["returncode"] == 0, ran["stderr"]
    trace = load_trace(Path("cpu.profile"))
    plain = estimate_trace(trace, device="h200", method="scale")
    with pytest.raises(NotPossibleHere, match="--method scale"):  # this script asks for no GPU
        estimate_trace(trace, device="h200", method="retrace")
    monkeypatch.setenv("MEMOPT_CALIBRATION", str(calibration))
    measured = estimate_trace(trace, device="h200", method="scale")
    assert measured.context_bytes == 700 * MIB
    assert measured.context_bytes != plain.context_bytes
    assert str(calibration) in " ".join(measured.notes)


CONVOLUTION = """
import torch
model = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(4096, 8)).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.randn(4, 8, 16, 16, device=DEVICE, requires_grad=True)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_measured_workspaces_are_in_every_kind_of_estimate(
    calibration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memopt.estimators.elsewhere.device import on_cuda
    from memopt.estimators.elsewhere.recording import amounts_of
    from memopt.estimators.fake.script.request import request_on
    from memopt.estimators.fake.script.run import record_script
    from memopt.trace import load_trace

    copies = msgspec.structs.replace(
        row("conv_input_copies", 0, where="allocated"), value=0.5, low=0.5, high=0.5, unit="factor"
    )
    fused = msgspec.structs.replace(row("cublaslt_workspace", 4, where="allocated"), lifetime="op")
    calibration.write_bytes(msgspec.json.encode(HiddenRows(rows=[copies, fused])))
    monkeypatch.setenv("MEMOPT_CALIBRATION", str(calibration))
    x, weight, out = 4 * 8 * 16 * 16 * 4, 16 * 8 * 9 * 4, 4 * 16 * 16 * 16 * 4
    half = {
        "convolution": [(x + weight) // 2],
        "convolution_backward": [(out + weight) // 2, (out + x) // 2],  # one kernel after the other
        "addmm": [4 * MIB],
    }

    Path("gpu.py").write_text(CONVOLUTION.replace("DEVICE", '"cuda"'))
    spec = find_device("h200")
    recording, _ = record_script(request_on(spec, ["gpu.py"], as_module=False, steps=1))
    for name, sizes in half.items():
        found = [
            r.size_bytes
            for r in recording.rows
            if r.op.partition(".")[0] == name and r.category == "workspace"
        ]
        assert found == sizes, name

    Path("train.py").write_text(CONVOLUTION.replace("DEVICE", '"cpu"'))
    with profiler(Path.cwd()) as server:
        ran = server.memopt("profile", "-o", "cpu.profile", "train.py")
    assert ran["returncode"] == 0, ran["stderr"]
    trace = load_trace(Path("cpu.profile"))
    work = on_cuda(trace, amounts_of(trace), spec).workspace_bytes
    for name, sizes in half.items():
        ops = [op for op in range(trace.op_count) if trace.op_name(op).split(".")[1:2] == [name]]
        assert [work[op] for op in ops] == [max(sizes)], name
