"""Parameters cut into pieces: what a large one repeats may be left out where only neighbours matter."""

from __future__ import annotations

import itertools

import pytest

from memopt.pieces import ALIGNED, Cut, Uncut, cut

PIECE = 4 * ALIGNED * 4
"""Bytes: four aligned segments of fp32."""


def sizes(piece: list[Cut]) -> tuple[tuple[int, int], ...]:
    return tuple((which, stop - start) for which, start, stop in piece)


def neighbours(parameters: list[Uncut]) -> set[object]:
    """Any three pieces that follow each other, nothing before the first and after the last."""
    pieces = [(), *(sizes(piece) for piece in cut(parameters, PIECE)), ()]
    return {tuple(pieces[at : at + 3]) for at in range(len(pieces) - 2)}


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_without_repeats_the_same_pieces_are_neighbours(itemsize: int) -> None:
    numels = (5, ALIGNED, *(times * ALIGNED + more for times in (7, 16, 17, 32, 41) for more in (-1, 0, 1)))
    for three in itertools.product(numels, repeat=3):
        parameters = [Uncut(numel, itemsize, "fp") for numel in three]
        assert neighbours([each.without_repeats(PIECE) for each in parameters]) == neighbours(parameters)


def test_a_parameter_without_repeats_has_a_few_pieces_however_large_it_is() -> None:
    assert len(cut([Uncut(2**60 + 5, 4, "fp").without_repeats(PIECE)], PIECE)) <= 5
