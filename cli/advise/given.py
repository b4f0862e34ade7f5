"""What was asked for, put into the terms of the planner: a named device, its room as the budget, a name for the plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memopt.trace import Trace


def room_as_budget(options: dict[str, Any]) -> None:
    """Without a goal, the budget is what the named device has room for."""
    if options["device"] and not any(options[name] for name in ("budget", "max_overhead", "pareto")):
        from memopt.devices import find_device

        options["budget"] = str(find_device(options["device"]).memory_bytes)


def on_device(trace: Trace, name: str | None) -> Trace:
    """The trace as the device called `name` would run it."""
    if not name:
        return trace
    from memopt.devices import find_device
    from memopt.estimators.elsewhere.modelled import model_for_device

    return model_for_device(trace, find_device(name))


def script_stem(trace: Trace) -> str:
    """The script's name without folder and ending; of a module the last part."""
    argv = trace.script.argv
    name = argv[0] if argv else "script"
    return (name.rpartition(".")[2] if trace.script.as_module else Path(name).stem) or "script"
