"""The doors through which memopt uses torch's private parts: nothing goes past them, and a torch that lost a name costs a feature only."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from memopt.enforcers.capturing import Capturing
from memopt.enforcers.session import ApplySession, Options
from memopt.errors import NotPossibleHere
from memopt.estimators.fake import torch_internals as fake_internals
from memopt.instrument import compiled, torch_internals
from memopt.instrument.compiled import CompiledRegions
from memopt.instrument.script.training_thread import TrainingThread
from memopt.instrument.torch_internals import WATCH, Gone, Name, find, lost, require
from memopt.plan import load_plan
from tests.cli.test_apply_cli import SCRIPT
from tests.support import warm
from tests.support.internals_page import PAGE, page

ROOT = Path(__file__).parents[2]
ROOMS = ("memopt", "instrument", "profiler", "estimators", "advisors", "enforcers", "reports", "cli")
DOORS = {ROOT / "instrument" / "torch_internals.py", ROOT / "estimators" / "fake" / "torch_internals.py"}


def private(word: str) -> bool:
    return word.startswith("_") and not word.startswith("__")


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an expression; empty of any other."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def of_torch(tree: ast.Module) -> set[str]:
    """Names that the file binds to torch or to something of it."""
    names = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {
                alias.asname for alias in node.names if alias.asname and alias.name.startswith("torch.")
            }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if dotted(node.value).split(".")[0] in names:
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def spellings(source: str) -> Iterator[tuple[int, str]]:
    """(line, private name of torch's). Ops (`torch.ops.aten._x`) have no public names and are none."""
    tree = ast.parse(source)
    roots = of_torch(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            words = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if any(map(private, words)):
                yield node.lineno, ".".join(words)
        elif isinstance(node, ast.Attribute) and private(node.attr):
            name = dotted(node)
            if name.split(".")[0] in roots and not re.match(r"(torch\.ops|aten)\.", name):
                yield node.lineno, name
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)*\._\w[\w.]*", str(node.value)):
            yield node.lineno, str(node.value)


FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py") if path not in DOORS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_private_name_of_torchs_is_spelled_outside_of_the_doors(path: Path) -> None:
    found = [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in spellings(path.read_text())]
    assert not found


def test_private_names_are_found_in_all_their_forms() -> None:
    source = """
import torch
from torch import optim
from torch._C import _functorch
from torch.utils._pytree import tree_map
from torch.nn.modules import module as hooks
_C = torch._C
_C._storage
hooks._has
optim.SGD._x
torch.ops.aten._softmax
torch.nn.Linear.__init__
"torch._dynamo.trace_rules"
"see torch._dynamo"
"""
    assert [line for line, _ in sorted(spellings(source))] == [4, 5, 7, 8, 9, 10, 13]


@pytest.mark.filterwarnings("ignore")  # of torch's, about what it imports late
def test_this_torch_has_all_that_memopt_uses_of_its_private_parts() -> None:
    names = [*torch_internals.NAMES, *fake_internals.NAMES]
    gone = [f"{name.spelling}: {name.feature} is off ({name.purpose})" for name in names if not name.there]
    assert not gone, f"torch {torch.__version__} has lost:\n" + "\n".join(gone)


def test_every_name_is_told_of_in_the_docs() -> None:
    assert PAGE.read_text() == page(), "make docs"


def test_what_stands_for_a_lost_name_raises_where_it_is_used() -> None:
    names: list[Name] = []
    gone = find(names, "torch._C._nowhere", WATCH, "to be lost")
    assert lost(names) == lost(names, WATCH) == ["torch._C._nowhere"]
    assert isinstance(gone, Gone)
    for use in (
        gone,
        lambda: gone.part(),
        lambda: gone.__enter__(),
        type("Mode", gone.__mro_entries__(()), {}),
    ):
        with pytest.raises(NotPossibleHere, match="profile, apply and run") as raised:
            use()
        assert "torch._C._nowhere" in raised.value.why
    with pytest.raises(NotPossibleHere):
        require(WATCH, names=names)
    require("another", names=names)


# --- a torch that has lost something


WRAPPER = """
import sys
from memopt.instrument.script.on_import import call_after_import

def lose():
    import torch
    del torch._C._storage_Use_Count

call_after_import("torch", lose)
from memopt.cli.main import main
main()
"""


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lost")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "less.py").write_text(WRAPPER)
    for args in (["profile", "-o", "p.json.gz", "train.py"], ["advise", "p.json.gz", "--budget", "75%", "-o", "plan.json"]):  # fmt: skip
        done = warm.python(["-m", "memopt", *args], cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> str:
    """What the script prints under python."""
    return warm.python(["train.py"], cwd=folder).stdout


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("profile", "--keep-running", "-o", "q.json.gz", "train.py"), 0),
        (("apply", "plan.json"), 0),
        (("run", "--budget", "75%", "train.py"), 0),
    ],
    ids=lambda given: given[0] if isinstance(given, tuple) else None,
)
def test_a_torch_that_lost_a_name_runs_the_script_plain_and_says_what_is_off(
    folder: Path, plain: str, command: tuple[str, ...], code: int
) -> None:
    done = run(folder, "less.py", *command)
    assert done.stdout == plain
    assert done.returncode == code, done.stderr
    assert "torch._C._storage_Use_Count" in done.stderr
    assert "profile, apply and run" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_says_what_is_off(folder: Path) -> None:
    done = run(folder, "less.py", "doctor")
    assert done.returncode == 0
    line = next(line for line in done.stdout.splitlines() if line.startswith("profile, apply and run?"))
    assert "no: " in line
    assert "torch._C._storage_Use_Count" in line


def test_a_plan_that_fails_half_way_to_be_set_up_leaves_the_script_to_itself(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memopt.enforcers import session as sessions

    def fails(*functions: object) -> None:
        raise RuntimeError("as the test wants it")

    monkeypatch.setattr(sessions, "call_around_fork", fails)
    session = ApplySession(load_plan(folder / "plan.json"), Options(swap_dir=tmp_path, measure=False))
    session.install()
    backward = torch_internals.engine_run_backward()
    try:
        assert torch_internals.top_saved_hooks(True) is None
        assert backward.__module__ == "torch.autograd.graph"
    finally:
        outcome = session.finished()
    assert outcome is not None
    assert outcome.actions.done == 0
    assert "as the test wants it" in outcome.notes[0]


def test_where_nothing_tells_of_compiled_regions_every_op_may_be_in_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled.call_compiler, "get", lambda: Gone("torch._dynamo.x", "regions"))
    regions = CompiledRegions(TrainingThread())
    regions._patch()
    assert regions.depth > 0
    assert "torch.compile" in caplog.text


def test_graph_trees_that_cannot_be_asked_may_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert "cudagraph trees" in Capturing("cuda").why_keep()
