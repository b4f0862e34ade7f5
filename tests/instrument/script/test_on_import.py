"""memopt is there when a module is imported, however it was looked for before."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from memopt.instrument.script.on_import import call_after_import


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "looked_for_before"
    (tmp_path / f"{name}.py").write_text(
        "import os\nif os.environ.get('FAILS'): raise ImportError('not yet')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_a_search_before_the_import_is_survived(module: str) -> None:
    done: list[str] = []
    call_after_import(module, lambda: done.append("first"))
    call_after_import(module, lambda: done.append("second"))
    finders = len(sys.meta_path)
    assert importlib.util.find_spec(module) is not None  # as transformers does before it imports torch
    assert importlib.util.find_spec(module) is not None
    assert done == []
    importlib.import_module(module)
    assert done == ["first", "second"]
    assert len(sys.meta_path) == finders - 1
    importlib.reload(sys.modules[module])
    assert len(done) == 2


def test_hundreds_of_actions_do_not_nest(module: str) -> None:
    done: list[int] = []
    for number in range(2_000):
        call_after_import(module, lambda number=number: done.append(number))
    importlib.import_module(module)
    assert done == [*range(2_000)]


def test_an_import_that_fails_may_be_tried_again(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    call_after_import(module, lambda: done.append("imported"))
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module(module)
    assert done == []
    monkeypatch.delenv("FAILS")
    importlib.import_module(module)
    assert done == ["imported"]
