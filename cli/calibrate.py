"""`memopt calibrate`: measure what the tables of memopt assume, on the machine that it runs on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from memopt.device import Device
    from memopt.estimators.hidden.hidden_memory import HiddenRows


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("memopt-calibration.json"), show_default=True, metavar="FILE", help="Where to write the rows of hidden memory, on a machine with a GPU.")  # fmt: skip
@click.option("-f", "--force", is_flag=True, help="Overwrite the file if it exists.")
@click.option("--swap-dir", metavar="DIR", type=click.Path(path_type=Path, exists=True, file_okay=False), help="The folder whose disk is measured.  [default: the system's for temporary files]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def calibrate(output: Path, force: bool, swap_dir: Path | None, as_json: bool) -> int:
    """Measure this machine's link, disk and copy rates, and on a GPU the memory that no tensor shows.

    Takes seconds. The GPU's rows (CUDA context, cuBLAS and cuDNN workspaces) go to a file of the same form as memopt's own table.
    """
    from memopt.files import refuse_overwrite, swap_folder

    kind = _kind()
    if kind == "cuda":
        refuse_overwrite(output, force=force)
    rows = _rows(output) if kind == "cuda" else None  # before anything else touches the GPU
    from memopt.profiler.timing.bandwidth import measure_device

    device = measure_device(kind, swap_folder(swap_dir))
    if as_json:
        import msgspec

        figures = msgspec.to_builtins(device) | {
            "hidden_memory": msgspec.to_builtins(rows.rows) if rows else []
        }
        click.echo(json.dumps(figures, indent=2))
    else:
        _display(device, rows)
    _say_file(output, kind, rows)
    return 0


def _kind() -> str:
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None else "cpu"


def _rows(output: Path) -> HiddenRows:
    from memopt.estimators.hidden.calibrate import calibrate as measure

    return measure(output)


def _say_file(output: Path, kind: str, rows: HiddenRows | None) -> None:
    from memopt.cli.shared.console import say

    if rows is not None:
        say(f"wrote {output}: {len(rows.rows)} rows of hidden memory")
    else:
        say(f"hidden memory was not measured: there is no CUDA GPU here, only {kind}")


def _display(device: Device, rows: HiddenRows | None) -> None:
    from rich.table import Table

    from memopt.cli.shared.console import out

    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in _lines(device):
        table.add_row(name, value)
    for row in rows.rows if rows else ():
        table.add_row(row.name, _amount(row))
    out().print(table)


def _lines(device: Device) -> list[tuple[str, str]]:
    from memopt.units import format_bytes

    rates = {
        "copy on the device": device.copy_bytes_per_s,
        "to pinned host memory": device.host_out_bytes_per_s,
        "from pinned host memory": device.host_in_bytes_per_s,
        "to disk": device.disk_out_bytes_per_s,
        "from disk": device.disk_in_bytes_per_s,
    }
    told = [(name, f"{rate / 1e9:.2f} GB/s") for name, rate in rates.items() if rate]
    return [("device", f"{device.name} ({format_bytes(device.memory_bytes)})"), *told]


def _amount(row: Any) -> str:
    from memopt.units import format_bytes

    return format_bytes(round(row.value)) if row.unit == "bytes" else f"{row.value:.2f} times the operands"
