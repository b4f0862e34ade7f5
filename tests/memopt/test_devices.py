"""The table of named devices: found however spelt, senseless names answered with near ones, figures within reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from memopt.cli.advise.command import advise
from memopt.cli.estimate import estimate
from memopt.devices import common_gpus, find_device, named_devices
from memopt.errors import UsageError

GIB = 2**30


@pytest.mark.parametrize(
    ("spelt", "name"),
    [
        ("a100-40gb", "a100-40gb"),
        ("A100 40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 3060", "rtx-3060-12gb"),
        ("rtx_4090", "rtx-4090"),
        ("3090", "rtx-3090"),
        ("h200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-sxm"),
        ("gh200", "gh200-96gb"),
        ("mi300", "mi300x"),
        ("cpu", "cpu"),
        ("h100", "h100-80gb-sxm"),
        ("NVIDIA H100", "h100-80gb-sxm"),
        ("pcie h100", "h100-80gb-pcie"),
    ],
)
def test_names_are_found_however_spelt(spelt: str, name: str) -> None:
    assert find_device(spelt).name == name


@pytest.mark.parametrize(
    ("wrong", "near"), [("a101-40gb", "a100-40gb"), ("rtx-4091", "rtx-4090"), ("h20o", "h200")]
)
def test_near_names_are_offered(wrong: str, near: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_device(wrong)
    assert near in caught.value.try_
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "offered"),
    [
        ("a100", "a100-40gb or a100-80gb or a100-80gb-pcie"),
        ("a100-pcie", "a100-40gb or a100-80gb-pcie"),
        ("v100", "v100-16gb or v100-32gb"),
    ],
)
def test_a_name_of_devices_that_differ_in_memory_lists_them(name: str, offered: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_device(name)
    assert caught.value.try_ == offered


@pytest.mark.parametrize("command", [estimate, advise])
def test_which_of_devices_alike_is_taken_is_said(
    command: click.Command, capsys: pytest.CaptureFixture[str]
) -> None:
    option = next(each for each in command.params if each.name == "device")
    context = click.Context(command)
    assert option.type_cast_value(context, "h100") == "h100-80gb-sxm"
    assert option.type_cast_value(context, "H100-PCIe") == "h100-80gb-pcie"
    assert capsys.readouterr().err == (
        "memopt: 'h100' is taken for h100-80gb-sxm; as much memory has h100-80gb-pcie\n"
    )
    assert option.type_cast_value(context, "ada") == "rtx-6000-ada"
    assert capsys.readouterr().err == "memopt: 'ada' is taken for rtx-6000-ada\n"


@pytest.mark.parametrize("wrong", ["", "  ", "-", "x" * 10_000, "nvidia"])
def test_hostile_names_are_refused(wrong: str) -> None:
    with pytest.raises(UsageError):
        find_device(wrong)


def test_no_two_devices_share_a_name() -> None:
    for row in named_devices():
        for name in (row.name, *row.aliases):
            assert find_device(name) is row


@pytest.mark.parametrize("row", named_devices(), ids=lambda row: row.name)
def test_figures_are_within_reason(row: object) -> None:
    from memopt.devices import DeviceSpec

    assert isinstance(row, DeviceSpec)
    assert row.memory_bytes > GIB
    assert row.memory_bytes % 4096 == 0
    assert 0 < row.fp32_flops <= row.tf32_flops <= row.fp16_flops
    assert 1e9 < row.memory_bytes_per_s < 2e13
    assert 1 <= row.launch_us < 20
    if row.kind == "cuda":
        assert (6, 0) <= row.capability_pair < (13, 0)
        advertised = [
            int(part[:-2]) for part in row.name.split("-") if part.endswith("gb") and part[:-2].isdigit()
        ]
        for gigabytes in advertised:
            assert 0.9 * gigabytes * GIB < row.memory_bytes <= gigabytes * GIB


def test_as_the_planners_device() -> None:
    device = find_device("a100-40gb").device()
    assert (device.kind, device.name, device.modelled) == ("cuda", "a100-40gb", True)
    assert device.host_in_bytes_per_s == 25e9


def test_common_gpus_go_from_small_to_large() -> None:
    sizes = [row.memory_bytes for row in common_gpus()]
    assert sizes == sorted(sizes)
    assert len(sizes) >= 12


def test_the_table_needs_no_torch() -> None:
    code = "import sys, memopt.devices as d; d.find_device('t4'); sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode
        == 0
    )
