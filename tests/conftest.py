"""The tests run on one thread, as their child processes do: several start at once on few cores.

Marks are set here, where code tells them: `script` on a test that starts a process (a script under memopt, the child of a fake run), by
what its function, its fixtures and the tests' helpers that they call name; `solver` on one that asks HiGHS; `loop` on one that trains under
memopt in this process, which takes seconds. A test that hides it better bears the mark itself. `make quick` leaves them out, and `slow`;
a test of those that remain fails where it starts a process.
"""

import functools
import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import pytest

from tests.support import warm

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and a terminal does not export it
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as a shell without job control leaves it for what it starts with `&`
    signal.signal(signal.SIGINT, signal.default_int_handler)

STARTS_PROCESSES = {
    "Background", "Popen", "Profiler", "check_output", "chromium", "estimate_script", "fork", "profiler", "record_script", "retrace",
    "run_alone", "run_on_fake", "spawn", "subprocess", "warm",
}  # fmt: skip
"""Names of the library, of memopt and of the tests' support under which a process starts."""
ASKS_SOLVER = {"highspy", "least_step_ms", "plan_graph", "plan_lowest", "prove"}
"""`auto` asks it for bounds of small graphs."""
TRAINS = {"ApplySession", "Guard", "ProfileSession", "enforce", "run_late"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set the marks that code tells."""
    for item in items:
        if isinstance(item, pytest.Function):
            fixtures = [each[-1].func for each in item._fixtureinfo.name2fixturedefs.values()]
            ours = [
                each
                for each in fixtures
                if each.__module__.startswith("tests.") and "conftest" not in each.__module__
            ]
            names = frozenset().union(*(_names(each) for each in (item.function, *ours)))
            if names & STARTS_PROCESSES:
                item.add_marker("script")
            if names & ASKS_SOLVER:
                item.add_marker("solver")
            if names & TRAINS:
                item.add_marker("loop")


@pytest.fixture(autouse=True)
def no_failure_is_hidden(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What the run outlives, since the tensor is kept, a test does not."""
    yield
    if request.node.get_closest_marker("memopt_fails") is None:
        kept = [each for each in caplog.get_records("call") if "which is kept" in each.getMessage()]
        assert not kept, kept[0].exc_text


@functools.cache
def _names(function: Any) -> frozenset[str]:
    """What a function of the tests names, and what the functions and classes of the tests that it names name."""
    found: set[str] = set()
    seen: set[int] = set()
    todo = [function]
    while todo:
        each = todo.pop()
        each = each.__func__ if isinstance(each, MethodType) else getattr(each, "__wrapped__", each)
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, type):
            todo += [value for value in vars(each).values() if isinstance(value, FunctionType)]
        elif isinstance(each, FunctionType):
            names = _names_in(each.__code__)
            found |= names
            there = [each.__globals__[name] for name in names if name in each.__globals__]
            todo += [value for value in there if getattr(value, "__module__", "").startswith("tests.")]
    return frozenset(found)


def _names_in(code: CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return {*code.co_names, *(name for each in inner for name in _names_in(each))}


@pytest.fixture(autouse=True)
def _no_process_unmarked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that `make quick` runs may start none."""
    if not any(request.node.get_closest_marker(mark) for mark in ("script", "loop", "solver", "slow")):
        monkeypatch.setattr(subprocess.Popen, "__init__", _refuse)
        monkeypatch.setattr(os, "fork", _refuse)


@pytest.fixture(autouse=True, scope="session")
def _warm_fake_runs() -> Iterator[None]:
    """Runs on fake tensors are spared torch's import, which takes them ten times as long as what they do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memopt.estimators.fake.script.run._wait_for", warm.fake_run)
        yield


def _refuse(*args: Any, **kwargs: Any) -> Any:
    pytest.fail("a test that starts a process needs the mark `script`")


@pytest.fixture(autouse=True)
def _imports_are_left_out() -> None:
    """What the tests import, a million objects, is left out where all objects are collected or searched: much of it as the first test needs it."""
    if len(gc.get_objects()) > 10_000:
        gc.collect()
        gc.freeze()
