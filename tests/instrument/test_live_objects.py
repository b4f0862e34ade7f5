"""What lives is found by its type, whatever the script's classes make of being compared."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt.instrument.live_objects import held_by_lists, living


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
    assert held_by_lists(set(map(id, things)), apart=things) == {id(things[0]), id(things[1])}
    assert len(keep) == 4
    assert not held_by_lists(set(), apart=things)


def test_what_lists_hold_is_found_as_fast_for_many_things_as_for_one() -> None:
    def took_s(count: int) -> float:
        things = [torch.zeros(1) for _ in range(count)]
        began = time.perf_counter()
        held_by_lists(set(map(id, things)), apart=things)
        return time.perf_counter() - began

    assert min(took_s(2000) for _ in range(3)) < 10 * min(took_s(1) for _ in range(3))
