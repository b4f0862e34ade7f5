"""What `benchmarks/` writes (JSON lines, one job a line) as a table: one row a case, with its peak, its step and how it ended."""

from __future__ import annotations

import json
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memopt.reports.frames import Frame

_CASE = {"allocated", "measured_bytes", "outcome", "refused", "exit", "failed", "step_ms"}
COLUMNS = (
    "job",
    "case",
    "plain_bytes",
    "predicted_bytes",
    "peak_bytes",
    "reserved_bytes",
    "step_ms",
    "result",
)
_MOST_LINES = 20_000


def read_jobs(data: bytes) -> list[dict[str, Any]] | None:
    """The jobs of a file of JSON lines; None where it is none. Each line is an object that names its job."""
    if not data.lstrip().startswith(b"{"):
        return None
    jobs = []
    for line in data.splitlines()[:_MOST_LINES]:
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or not isinstance(found.get("job"), str):
            return None
        jobs.append(found)
    return jobs or None


def table(jobs: list[dict[str, Any]]) -> Frame:
    """One row a case, in the order of the file. Bytes, ms; NaN where a case has no such figure."""
    import pandas

    rows = []
    for job in jobs:
        cases = {name: each for name, each in job.items() if isinstance(each, dict) and each.keys() & _CASE}
        rows += [_row(job["job"], name, case) for name, case in cases.items()]
        if not cases:
            rows.append(_row(job["job"], "", job))
    frame = pandas.DataFrame(rows, columns=list(COLUMNS))
    return frame.astype({name: "float64" for name in COLUMNS if name.endswith(("_bytes", "_ms"))})


def _row(job: str, case: str, found: dict[str, Any]) -> dict[str, Any]:
    outcome = found.get("outcome")
    outcome = outcome if isinstance(outcome, dict) else {}
    step = found.get("step_ms", outcome.get("measured_step_ms"))
    if isinstance(step, list):
        step = median(step) if step and all(map(_is_number, step)) else None
    return {
        "job": job,
        "case": case,
        "plain_bytes": _first(found.get("plain_bytes"), found.get("plain"), outcome.get("unplanned_peak_bytes")),
        "predicted_bytes": _first(
            found.get("predicted_bytes"), found.get("predicted"), outcome.get("predicted_peak_bytes")
        ),
        "peak_bytes": _first(
            found.get("allocated"),
            found.get("measured_bytes"),
            found.get("measured"),
            outcome.get("measured_peak_bytes"),
        ),
        "reserved_bytes": _first(found.get("reserved")),
        "step_ms": _first(step),
        "result": _result(found),
    }  # fmt: skip


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e18


def _first(*values: object) -> float | None:
    return next((float(value) for value in values if _is_number(value)), None)  # type: ignore[arg-type]


def _result(found: dict[str, Any]) -> str:
    """How it ended: the last line of a refusal, what was compared, else nothing."""
    for name in ("failed", "refused", "failure"):
        text = str(found.get(name) or "").strip()
        if text:
            return text.splitlines()[-1]
    if isinstance(found.get("verify"), str):
        return f"verified: {' '.join(found['verify'].split())}"
    if found.get("exit") not in (None, 0):
        return f"exit code {found['exit']}"
    for name, what in (("same_losses", "losses"), ("same", "output")):
        if name in found:
            return f"{'same' if found[name] else 'other'} {what}"
    return f"{found['seconds']} s" if _is_number(found.get("seconds")) else ""
