"""`memopt profile --from-snapshot`: a profile made from PyTorch's memory snapshot instead of a run."""

from __future__ import annotations

import shlex
from pathlib import Path

from memopt.errors import UsageError


def write_profile(snapshot: Path, output: str | None, *, force: bool, quiet: bool) -> int:
    """Read `snapshot` (no code of it runs) and write its profile to `output`."""
    from memopt.cli.shared.console import say
    from memopt.estimators.snapshot.trace import trace_of_snapshot
    from memopt.files import refuse_overwrite
    from memopt.units import format_bytes

    if output in ("-", ""):
        raise UsageError(
            "a profile cannot be written to stdout", why="it is a file of columns", try_="-o FILE"
        )
    path = Path(output or f"memopt-{snapshot.name.partition('.')[0] or 'snapshot'}.profile.json.gz")
    refuse_overwrite(path, force=force)
    trace = trace_of_snapshot(snapshot)
    trace.save(path)
    if not quiet:
        say(f"wrote {path} (peak {format_bytes(trace.peak_bytes)}, {trace.storage_count} allocations)")
        say(
            f"next: memopt show {shlex.quote(str(path))}, or memopt estimate --device NAME {shlex.quote(str(path))}"
        )
    return 0
