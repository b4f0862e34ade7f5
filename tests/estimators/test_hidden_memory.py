"""Hidden memory: published values come out, the best fitting row wins, and calibrated rows go before all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from memopt.devices import find_device, named_devices
from memopt.errors import BadFile, UsageError
from memopt.estimators.hidden.hidden_memory import (
    HiddenMemory,
    HiddenRow,
    HiddenRows,
    built_in_rows,
    efficient_attention_backward,
    flash_attention_backward,
    load_rows,
    packed_flash_attention_backward,
    parse_workspace_config,
)

MIB = 1 << 20


def hidden(device: str, **versions: str) -> HiddenMemory:
    return HiddenMemory.of(find_device(device), **versions)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "size_bytes"),
    [
        ("a100-40gb", 8519680),
        ("rtx-3060-12gb", 8519680),
        ("h100-80gb-sxm", 33554432),
        ("h200", 33554432),
        ("cpu", 0),
    ],
)
def test_cublas_workspace(device: str, size_bytes: int) -> None:
    assert hidden(device).cublas_workspace().size_bytes == size_bytes


@pytest.mark.parametrize(
    ("config", "size_bytes"),
    [(":4096:2:16:8", 8519680), (":4096:8", 33554432), (":0:0", 0), (":16:8", 131072)],
)
def test_workspace_config(config: str, size_bytes: int) -> None:
    assert parse_workspace_config(config) == size_bytes
    assert hidden("h200").cublas_workspace(config).size_bytes == size_bytes


@pytest.mark.parametrize(
    "config", ["4096:2", ":4096", ":a:b", ":-1:2", ":1:2:", ":٣:1", ":" + "9" * 50 + ":1"]
)
def test_senseless_workspace_configs_are_refused(config: str) -> None:
    with pytest.raises(UsageError):
        parse_workspace_config(config)


@pytest.mark.parametrize(
    ("device", "torch", "mib"),
    [
        ("h100-80gb-sxm", "2.6.0+cu124", 32),
        ("a100-80gb", "2.5.1", 4),
        ("rtx-3060-12gb", "2.4", 1),
        ("t4", "2.1.2", 1),
        ("h200", "2.11.0+cu130", 0),
    ],
)
def test_cublaslt_by_version_and_card(device: str, torch: str, mib: int) -> None:
    assert hidden(device, torch_version=torch).cublaslt_workspace().size_bytes == mib * MIB


def test_context_by_cuda_version_and_device() -> None:
    assert hidden("rtx-6000-ada", cuda_version="13.0").context().size_bytes == 426 * MIB
    assert hidden("rtx-3090", cuda_version="11.1").context().size_bytes == 1240 * MIB
    assert hidden("h200").context().size_bytes == 610 * MIB
    assert hidden("rtx-3060-12gb").lazy_kernels().size_bytes == 18 * MIB
    both = hidden("a100-40gb").process()
    assert both.size_bytes == (440 + 354) * MIB
    assert both.low_bytes < both.size_bytes < both.high_bytes


def test_a_cpu_has_none_of_it() -> None:
    cpu = hidden("cpu")
    assert {cpu.amount(row.name).high_bytes for row in built_in_rows()} == {0}


@pytest.mark.parametrize("device", named_devices(), ids=lambda row: row.name)
def test_every_gpu_has_a_workspace_row(device: object) -> None:
    from memopt.devices import DeviceSpec

    assert isinstance(device, DeviceSpec)
    if device.kind == "cuda":
        assert HiddenMemory.of(device).cublas_workspace().size_bytes > 0


def test_all_rows_are_sourced_and_ordered() -> None:
    devices = {row.name for row in named_devices()}
    for row in built_in_rows():
        assert len(row.source) > 20
        assert 0 <= row.low <= row.value <= row.high
        assert row.device == "" or row.device in devices


def test_calibrated_rows_go_first(tmp_path: Path) -> None:
    measured = HiddenRow(
        name="cuda_context", value=500 * MIB, low=490 * MIB, high=510 * MIB, unit="bytes", where="process",
        lifetime="process", source="memopt calibrate on a test", device="h200", measured=True,
    )  # fmt: skip
    path = tmp_path / "calibration.json"
    path.write_bytes(msgspec.json.encode(HiddenRows(rows=[measured])))
    rows = load_rows(path)
    assert HiddenMemory.of(find_device("h200"), calibrated=rows).context().size_bytes == 500 * MIB
    assert HiddenMemory.of(find_device("h100-pcie"), calibrated=rows).context().size_bytes == 610 * MIB


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[1]", b'{"schema":"memopt.hidden/2","rows":[]}', b'{"rows":[{"name":"x"}]}', b"[" * 9999],
)
def test_senseless_calibrations_are_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(text)
    with pytest.raises(BadFile):
        load_rows(path)


def test_conv_workspace_may_be_the_copies_to_nhwc() -> None:
    shape: dict[str, Any] = {"read_bytes": 100 * MIB, "written_bytes": 50 * MIB, "dtype": "float32", "weight": (64, 64, 3, 3)}  # fmt: skip

    def range_mib(device: str, **changed: Any) -> tuple[int, int, int]:
        found = hidden(device).conv_workspace(**(shape | changed))
        return found.low_bytes // MIB, found.size_bytes // MIB, found.high_bytes // MIB

    copies, plain, none = (0, 0, 283), (0, 0, 32), (0, 0, 0)
    assert range_mib("a100-40gb") == range_mib("rtx-3060-12gb") == copies
    assert range_mib("rtx-3060-12gb", dtype="float16") == copies
    assert range_mib("a100-40gb", weight=None) == copies
    assert range_mib("a100-40gb", channels_last=True) == plain
    assert range_mib("a100-40gb", groups=4) == plain
    assert (
        range_mib("a100-40gb", weight=(64, 64, 1, 1)) == copies
    )  # MobileNet and MnasNet need more than none
    assert range_mib("a100-40gb", weight=(64, 3, 7, 7)) == plain  # 3 channels of 4 bytes are no 16
    assert range_mib("a100-40gb", allow_tf32=False) == plain
    assert range_mib("a100-40gb", dtype="float64") == plain
    assert range_mib("t4") == plain
    assert range_mib("a100-40gb", groups=64, weight=(64, 1, 3, 3)) == none


def test_flash_backward_by_hand() -> None:
    tensors = flash_attention_backward(
        batch=2, heads=8, kv_heads=8, query_length=1000, key_length=1000, head_dim=64, item_bytes=2
    )
    assert [(t.name, t.size_bytes) for t in tensors] == [
        ("softmax_d", 2 * 8 * 1024 * 4),
        ("dq_accum", 2 * 1024 * 8 * 64 * 4),
    ]


def test_flash_backward_with_grouped_queries_expands_keys() -> None:
    tensors = flash_attention_backward(
        batch=1, heads=32, kv_heads=8, query_length=128, key_length=256, head_dim=80, item_bytes=2
    )
    assert [t.size_bytes for t in tensors] == [
        32 * 128 * 4,
        128 * 32 * 96 * 4,
        256 * 32 * 80 * 2,
        256 * 32 * 80 * 2,
    ]


def test_flash_backward_pads_wide_heads_to_64_and_splits_where_it_must_be_deterministic() -> None:
    wide: dict[str, Any] = {
        "batch": 1,
        "heads": 4,
        "kv_heads": 4,
        "query_length": 128,
        "key_length": 128,
        "item_bytes": 2,
    }
    assert flash_attention_backward(**wide, head_dim=160)[1].size_bytes == 128 * 4 * 192 * 4
    assert flash_attention_backward(**wide, head_dim=96, splits=3)[1].size_bytes == 3 * 128 * 4 * 96 * 4


def test_packed_flash_backward_keeps_sequences_128_rows_apart() -> None:
    tensors = packed_flash_attention_backward(
        sequences=3, heads=4, kv_heads=2, queries=1000, keys=1000, head_dim=64, item_bytes=2
    )
    assert [t.size_bytes for t in tensors] == [
        4 * 1384 * 4,
        1384 * 4 * 64 * 4,
        1000 * 4 * 64 * 2,
        1000 * 4 * 64 * 2,
    ]


def test_efficient_backward_accumulates_only_for_half_types() -> None:
    full = efficient_attention_backward(batch=2, heads=4, query_length=100, head_dim=64, item_bytes=4)
    half = efficient_attention_backward(batch=2, heads=4, query_length=100, head_dim=64, item_bytes=2)
    assert [t.size_bytes for t in full] == [2 * 4 * 100 * 4]
    assert [t.size_bytes for t in half] == [2 * 4 * 100 * 4, 2 * 4 * 128 * 64 * 4]
