"""A call's arguments, flat and back: what a replay is called with is what forward was called with."""

from __future__ import annotations

import pytest
import torch

from memopt.enforcers.flat_call import flatten_call

A, B, C = torch.ones(1), torch.ones(2), torch.ones(3)

CALLS = {
    "tensors and numbers": ((A, 2, B), {}),
    "named arguments": ((A,), {"alpha": 3, "other": B}),
    "numbers in a list stay one argument": ((A, [1, 2], (3, 4)), {"dim": [0, 1]}),
    "a list first": (([A, B, C], 1), {}),
    "a list in the middle": ((A, [B, C], 0, C), {"alpha": 1}),
    "two lists, and one that is named": (([A], B, [B, C]), {"weights": [C, A], "scale": 2.0}),
    "indices, some of which are left out": ((A, [None, B, None]), {}),
    "nothing": ((), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_was_taken_apart_is_put_together_again(name: str) -> None:
    args, kwargs = CALLS[name]
    flat, form = flatten_call(args, kwargs)
    assert not any(
        isinstance(p, torch.Tensor) for each in flat if isinstance(each, (list, tuple)) for p in each
    )
    again, named = form.rebuild(flat)
    assert len(again) == len(args)
    assert list(named) == list(kwargs)
    for given, got in zip([*args, *kwargs.values()], [*again, *named.values()], strict=True):
        assert _same(given, got), (given, got)


def test_other_items_take_the_places_of_the_first() -> None:
    _, form = flatten_call((A, [B, C], 0), {"out": A})
    assert form.rebuild([0, 1, 2, 3, 4]) == ((0, [1, 2], 3), {"out": 4})


def _same(given: object, got: object) -> bool:
    if isinstance(given, (list, tuple)):
        assert isinstance(got, (list, tuple))
        return len(given) == len(got) and all(a is b for a, b in zip(given, got, strict=True))
    return given is got
