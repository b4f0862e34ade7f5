"""What lives is found by its type, whatever the script's classes make of being compared."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt.instrument import live_objects
from memopt.instrument.live_objects import (
    forget_old_objects,
    held_by_lists,
    let_tensors_be_swapped,
    living,
)


class _Loud(type):
    """Classes that say no when they are looked up."""

    def __hash__(cls) -> int:
        raise AssertionError("the script's code ran")


class _Alike(type):
    """Classes that all say that they are the same."""

    def __hash__(cls) -> int:
        return 1

    def __eq__(cls, other: object) -> bool:
        return True


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    forget_old_objects()
    yield
    forget_old_objects()


class _Held:
    """Of a kind that nobody asks for."""


def _found(*things: Any) -> list[int]:
    """How often each is among what lives."""
    among = living(Tensor, nn.Module)
    return [sum(each is thing for of_kind in among for each in of_kind) for thing in things]


@pytest.mark.parametrize("generation", [0, 1, 2])
def test_what_grows_old_is_found_once(generation: int) -> None:
    before, module = torch.zeros(1), nn.Linear(2, 2)
    assert _found(before, module, module.weight) == [1, 1, 1]
    after = nn.Parameter(torch.zeros(2))
    for _ in range(3):
        gc.collect(generation)
        assert _found(before, module, module.weight, after) == [1, 1, 1, 1]


def test_what_has_gone_is_found_no_more_and_not_kept() -> None:
    size = 1234567
    things: list[Tensor] = [torch.zeros(size)]
    living(Tensor)
    gc.collect()
    things.clear()
    assert not [each for each in living(Tensor)[0] if each.numel() == size]


def test_what_only_a_graph_holds_is_found() -> None:
    leaf = torch.ones(3, requires_grad=True)
    middle = leaf * 2
    there = id(middle)
    loss = (middle * middle).sum()
    living(Tensor)
    gc.collect()
    del middle
    assert any(id(each) == there for each in living(Tensor)[0])
    loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [8.0] * 3


def test_later_looks_are_at_few_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    of_kinds = live_objects._of_kinds

    def counted(things: list[Any], kinds: tuple[type, ...]) -> tuple[list[Any], ...]:
        looked.append(len(things))
        return of_kinds(things, kinds)

    old = [[] for _ in range(20_000)]
    gc.collect()
    living(Tensor)
    monkeypatch.setattr(live_objects, "_of_kinds", counted)
    living(Tensor)
    assert 0 < sum(looked) < len(old) / 2


def test_a_look_leaves_nothing_in_cycles() -> None:
    """A list of all that is young, and is young itself, would keep all of it."""
    gone: list[weakref.ref[Tensor]] = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            tensor = torch.zeros(3)
            living(Tensor)
            gone.append(weakref.ref(tensor))
            del tensor
            assert gone.pop()() is None
        assert not [each for each in gc.get_objects() if type(each) is list and any(o is each for o in each)]
    finally:
        gc.enable()


def test_another_kind_and_a_list_of_callbacks_that_is_the_scripts_are_another_first_look() -> None:
    module, weight, odd = nn.Linear(2, 2), torch.zeros(1), _Held()
    gc.collect()
    living(Tensor)
    assert _found(module, weight) == [1, 1]
    assert [each is odd for each in living(_Held)[0]] == [True]
    assert _found(module, weight) == [1, 1]
    callbacks = gc.callbacks[:]
    try:
        gc.callbacks.clear()
        later = torch.zeros(1)
        gc.collect()
        assert _found(module, weight, later) == [1, 1, 1]
    finally:
        gc.callbacks[:] = callbacks


def test_nothing_is_remembered_where_nobody_asks() -> None:
    living(Tensor)
    for _ in range(live_objects._MOST_UNASKED + 2):
        gc.collect(1)
    assert not live_objects._old._found
    later = torch.zeros(1)
    assert _found(later) == [1]


def test_tensors_may_still_be_swapped() -> None:
    let_tensors_be_swapped()
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    gc.collect()
    living(Tensor)
    torch.utils.swap_tensors(one, other)
    assert one.tolist() == [1.0, 1.0]
    assert copy.deepcopy(one).tolist() == [1.0, 1.0]


def test_each_object_is_found_once_under_the_first_kind_that_it_is_of() -> None:
    module, weight = nn.Linear(2, 2), nn.Parameter(torch.zeros(3))
    modules, parameters, tensors = living(nn.Module, nn.Parameter, Tensor)
    assert [each for each in modules if each is module] == [module]
    assert any(each is weight for each in parameters)
    assert not any(each is weight for each in tensors)


@pytest.mark.parametrize("metaclass", [_Loud, _Alike])
def test_a_metaclass_of_the_scripts_is_asked_nothing(metaclass: type) -> None:
    kind: Any = metaclass("Odd", (), {"__slots__": ("held",)})
    other: Any = metaclass("Other", (), {"__slots__": ("held",)})
    things = kind(), other()
    for each in things:
        each.held = []
    module = nn.Linear(2, 2)
    modules, _ = living(nn.Module, Tensor)
    assert any(each is module for each in modules)
    assert all(isinstance(each, nn.Module) for each in modules)


def test_what_lists_hold_is_found_in_lists_and_deques_alone() -> None:
    class Silent(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("the script's code ran")

    things = [torch.zeros(1) for _ in range(5)]
    keep = [[0, things[0]], deque([things[1]]), (things[2],), Silent([things[3]])]
    assert held_by_lists([*things], apart=things) == {id(things[0]), id(things[1])}
    assert held_by_lists(things, apart=[]) == {id(things[0]), id(things[1])}
    many = [*things, *(torch.zeros(1) for _ in range(20))]
    assert held_by_lists(many, apart=things) == {id(things[0]), id(things[1])}
    assert len(keep) == 4
    assert not held_by_lists([], apart=things)


def test_what_lists_hold_is_found_as_fast_for_thousands_of_things_as_for_twenty() -> None:
    def took_s(count: int) -> float:
        things = [torch.zeros(1) for _ in range(count)]
        began = time.perf_counter()
        held_by_lists(things, apart=[])
        return time.perf_counter() - began

    assert min(took_s(2000) for _ in range(3)) < 10 * min(took_s(20) for _ in range(3))
