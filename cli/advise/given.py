"""What was asked for, put into the terms of the planner: a named device, its room as the budget, a name for the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from memopt.cli.requests import AdviseRequest
from memopt.devices import find_device
from memopt.trace import Trace


def room_as_budget(request: AdviseRequest) -> AdviseRequest:
    """Without a goal, the budget is what the named device has room for."""
    if not request.device or request.budget or request.max_overhead or request.pareto:
        return request
    return replace(request, budget=str(find_device(request.device).memory_bytes))


def on_device(trace: Trace, name: str | None) -> Trace:
    """The trace as the device called `name` would run it."""
    if not name:
        return trace
    from memopt.estimators.elsewhere.modelled import model_for_device

    return model_for_device(trace, find_device(name))


def script_stem(trace: Trace) -> str:
    """The script's name without folder and ending; of a module the last part."""
    argv = trace.script.argv
    name = argv[0] if argv else "script"
    return (name.rpartition(".")[2] if trace.script.as_module else Path(name).stem) or "script"
