"""What lives is found by its type, whatever the script's classes make of being compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt.instrument.live_objects import living


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
