"""Calibration: the arithmetic on a GPU that is played, the rows it writes read back and preferred, and a clear no without a GPU."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memopt.cli.main import run
from memopt.device import Device
from memopt.devices import find_device
from memopt.errors import NotPossibleHere
from memopt.estimators.hidden.calibrate import calibrate, measure
from memopt.estimators.hidden.hidden_memory import HiddenMemory, load_rows
from memopt.profiler.timing import bandwidth

command = importlib.import_module("memopt.cli.calibrate")

MIB = 1 << 20


class PlayedGpu:
    """A GPU with known secrets: each thread's first product keeps 32 MiB, addmm needs 4 more, kernels add 50 as they load."""

    device_name = "NVIDIA H200"
    capability = "9.0"
    torch_version = "2.11.0+cu130"
    cuda_version = "13.0"

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.kernels_mib = 0
        self.peak_mib = 0
        self.steps = 0

    def process_bytes(self) -> int:
        return (500 + self.kernels_mib) * MIB + self.reserved_bytes()

    def allocated_bytes(self) -> int:
        return 32 * MIB * len(self.threads) + 512

    def reserved_bytes(self) -> int:
        return 40 * MIB * len(self.threads) + 2 * MIB

    def peak_of(self, work: Callable[[], object]) -> int:
        self.peak_mib = 0
        work()
        return self.peak_mib * MIB

    def product(self) -> None:
        self.threads.add(threading.get_ident())
        self.peak_mib = 24

    def product_with_bias(self) -> None:
        self.product()
        self.peak_mib = 28

    def convolution(self) -> None:
        self.peak_mib = 100 + 90

    def convolution_bytes(self) -> tuple[int, int]:
        return 120 * MIB, 100 * MIB

    def train_step(self) -> None:
        self.steps += 1
        self.kernels_mib = 50


def test_each_secret_is_found() -> None:
    found = {row.name: row.value for row in measure(PlayedGpu()).rows}
    assert found == {
        "cuda_context": 500 * MIB,
        "cublas_workspace": 32 * MIB,
        "cublaslt_workspace": 4 * MIB,
        "conv_input_copies": 0.75,
        "lazy_kernels": 50 * MIB,
    }


def test_the_file_is_read_back_and_preferred(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    written = calibrate(path, PlayedGpu())
    rows = load_rows(path)
    assert list(rows) == written.rows
    here = HiddenMemory.of(find_device("h200"), torch_version="2.11.0", cuda_version="13.0", calibrated=rows)
    assert here.context().size_bytes == 500 * MIB
    assert here.cublaslt_workspace().size_bytes == 4 * MIB
    assert here.context().low_bytes < here.context().size_bytes < here.context().high_bytes
    assert "memopt calibrate" in here.context().source
    other = HiddenMemory.of(find_device("h200"), torch_version="2.12", cuda_version="13.0", calibrated=rows)
    assert (
        other.context().size_bytes == 639_631_360
    )  # the built-in row: as measured on an H100, of the same architecture


def test_a_failing_product_is_told() -> None:
    class Broken(PlayedGpu):
        def product(self) -> None:
            raise RuntimeError("CUDA error: no kernel image")

    with pytest.raises(NotPossibleHere) as caught:
        measure(Broken())
    assert "no kernel image" in caught.value.why


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    with pytest.raises(NotPossibleHere) as caught:
        calibrate(path)
    assert "no GPU" in caught.value.what
    assert not path.exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_real_gpu(tmp_path: Path) -> None:
    rows = {row.name: row for row in calibrate(tmp_path / "gpu.json").rows}
    assert 50 * MIB < rows["cuda_context"].value < 3000 * MIB
    assert rows["cublas_workspace"].value >= 0


def test_the_command_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rates on any machine; rows of hidden memory, and their file, on one with a GPU only."""
    if torch.accelerator.is_available():
        pytest.skip("this machine has a GPU")
    path = tmp_path / "rows.json"
    assert run(["calibrate", "--json", "--swap-dir", str(tmp_path), "-o", str(path)]) == 0
    told = capsys.readouterr()
    figures = json.loads(told.out)
    assert figures["kind"] == "cpu"
    assert figures["copy_bytes_per_s"] > 1e8
    assert figures["disk_out_bytes_per_s"] >= 0
    assert figures["hidden_memory"] == []
    assert "no CUDA GPU" in told.err
    assert not path.exists()
    assert run(["calibrate", "--swap-dir", str(tmp_path)]) == 0
    assert "copy on the device" in capsys.readouterr().out


def test_the_command_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_kind", lambda: "cuda")
    monkeypatch.setattr(command, "_rows", lambda path: calibrate(path, PlayedGpu()))
    monkeypatch.setattr(bandwidth, "measure_device", lambda kind, folder: Device(kind=kind, name="played"))
    path = tmp_path / "rows.json"
    assert run(["calibrate", "-o", str(path)]) == 0
    assert "cuda_context" in capsys.readouterr().out
    assert {row.name for row in load_rows(path)} >= {"cuda_context", "cublas_workspace"}
    assert run(["calibrate", "-o", str(path)]) != 0


def test_measuring_the_disk_leaves_nothing(tmp_path: Path) -> None:
    rates = bandwidth.measure_disk(tmp_path)
    assert all(1e6 < rate < 1e12 for rate in rates)
    assert list(tmp_path.iterdir()) == []
    assert bandwidth.measure_disk(tmp_path / "missing") == (0.0, 0.0)
