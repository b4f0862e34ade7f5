"""The rules of the house: each fault is found in a small tree that has it, and this tree has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import house


def tree(root: Path, **files: str) -> Path:
    """A package under `root`: `a__b="text"` is the module a/b.py."""
    for name, text in files.items():
        path = root.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_house_is_in_order() -> None:
    assert house.faults() == []


@pytest.mark.parametrize(
    "statement",
    [
        "from memopt.cli import two\n",
        "import memopt.cli.two\n",
        "from memopt.cli.two import thing\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from memopt.cli.two import thing\n",
        "def later():\n    from memopt.cli.two import thing\n",
    ],
)
def test_a_circle_is_found_however_it_is_written(tmp_path: Path, statement: str) -> None:
    root = tree(tmp_path, cli__one=statement, cli__two="import memopt.cli.three\n", cli__three="import memopt.cli.one\n")  # fmt: skip
    circle = house.circles(house.imports(house.modules(root)))
    assert circle == [["memopt.cli.one", "memopt.cli.three", "memopt.cli.two"]]


def test_an_arrow_upwards_is_found(tmp_path: Path) -> None:
    root = tree(tmp_path, instrument__low="import memopt.cli.high\n", cli__high="import memopt.trace\n", memopt__trace="")  # fmt: skip
    wrong = house.wrong_arrows(house.imports(house.modules(root)))
    assert wrong == ["memopt.instrument.low imports memopt.cli.high: instrument lies below cli"]


def test_nobody_inside_comes_through_the_door(tmp_path: Path) -> None:
    root = tree(tmp_path, cli__high="from memopt.api import load\n", memopt__api="import memopt.cli.high\n")
    wrong = house.wrong_arrows(house.imports(house.modules(root)))
    assert wrong == ["memopt.cli.high imports memopt.api: cli lies below door"]


def test_folders_that_import_each_other_are_found(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        cli__left__one="import memopt.cli.right.two\n",
        cli__left__deep__other="",
        cli__right__two="",
        cli__right__three="import memopt.cli.left.deep.other\n",
    )
    files = house.modules(root)
    graph = house.imports(files)
    assert house.both_ways(graph, files, root) == {("cli/left", "cli/right")}
    assert house.circles(graph) == []


def test_a_full_folder_is_found(tmp_path: Path) -> None:
    names = {f"cli__m{number}": "" for number in range(house.MOST)}
    assert house.full_folders(tree(tmp_path, **names)) == []
    (tmp_path / "cli" / "__init__.py").touch()
    assert house.full_folders(tmp_path) == []
    assert house.full_folders(tree(tmp_path, cli__last="")) == ["cli has 21 modules, more than 20"]
