"""Rows of layers that differ in their number only are one row."""

from __future__ import annotations

import pytest

from memopt.reports.repeated import gather, name_of


def test_layers_that_differ_in_their_number_are_one_row() -> None:
    names = [f"Net.layers.{i}.dropout · mul · 4×8 fp32" for i in (0, 1, 2, 5)] + ["Net.head · addmm"]
    found = gather(names, lambda name: name)
    assert [name for name, _ in found] == [
        "Net.layers.0-2,5.dropout ×4 · mul · 4×8 fp32",
        "Net.head · addmm",
    ]
    assert [len(rows) for _, rows in found] == [4, 1]


def test_what_is_not_the_same_stays_apart() -> None:
    rows = [("layers.0", 8), ("layers.1", 8), ("layers.2", 4)]
    assert [name for name, _ in gather(rows, lambda row: row[0], lambda row: row[1])] == ["layers.0-1 ×2", "layers.2"]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["a.3.b"], "a.3.b"),
        (["a.3.b", "a.3.b"], "a.3.b ×2"),
        (["down.0.1", "down.0.2", "down.1.1"], "down.0-1.1-2 ×3"),
        ([f"x.{i}" for i in range(0, 20, 2)], "x.0..18 ×10"),
        (["fc1 · 3×4 fp32", "fc1 · 3×4 fp32"], "fc1 ×2 · 3×4 fp32"),
    ],
)
def test_the_name_of_a_group(names: list[str], told: str) -> None:
    assert name_of(names) == told
