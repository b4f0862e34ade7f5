"""Ops that are remembered and run again, without a session around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memopt.enforcers.flat_call import flatten_call
from memopt.enforcers.records import Value, record_op
from memopt.enforcers.replays import make
from memopt.enforcers.values import Values
from memopt.instrument import saved
from memopt.instrument.ops import kind_of
from memopt.instrument.saved import view_of
from memopt.instrument.script.training_thread import TrainingThread

aten = torch.ops.aten


def _run(values: Values, func: Any, *args: Any) -> Any:
    """What the engine does where the plan says that `func` is remembered."""
    flat, form = flatten_call(args, {})
    kind = kind_of(func)
    record = record_op(func, kind, flat, form, values.freeze)
    written = values.about_to_write(kind, args, {}, record)
    out = func(*args)
    values.overwritten(written)
    values.remember(record, flat, out)
    return out


def _value(values: Values, tensor: Tensor) -> Value:
    found = values.value_in(tensor, tensor.untyped_storage())
    assert found is not None
    return found


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each tensor that is laid over a storage."""
    found: list[int] = []

    def counted(*args: Any) -> Tensor:
        found.append(1)
        return view_of(*args)

    monkeypatch.setattr(saved, "view_of", counted)
    return found


def test_what_a_replay_made_is_handed_on_as_it_is(shown: list[int]) -> None:
    values, x = Values(TrainingThread()), torch.randn(3, 3)
    made = _run(values, aten.tanh.default, _run(values, aten.cos.default, _run(values, aten.sin.default, x)))
    expected, wanted = made.clone(), _value(values, made)
    del made
    assert torch.equal(torch.empty(0).set_(make(wanted)), expected.flatten())
    assert not shown


def test_another_view_of_what_a_replay_made_is_that_view(shown: list[int]) -> None:
    values, x = Values(TrainingThread()), torch.randn(2, 3)
    sine = _run(values, aten.sin.default, x)
    made = _run(values, aten.cat.default, [sine.t(), sine.t(), sine.view(3, 2)], 1)
    expected, wanted = made.clone(), _value(values, made)
    del sine, made
    assert torch.equal(torch.empty(0).set_(make(wanted)), expected.flatten())
    assert len(shown) == 3


def test_what_is_still_to_be_read_is_not_written_by_a_replay() -> None:
    values, x = Values(TrainingThread()), torch.randn(4)
    sine = _run(values, aten.sin.default, x)
    first = _run(values, aten.mul.Tensor, sine, 2.0)
    _run(values, aten.exp_.default, sine)
    made = _run(values, aten.sub.Tensor, sine, first)  # asks for what is written first
    expected, wanted = made.clone(), _value(values, made)
    del sine, first, made
    for _ in range(2):
        assert torch.equal(torch.empty(0).set_(make(wanted)), expected)


def test_the_grad_mode_is_the_ops_own_and_afterwards_as_it_was() -> None:
    values, seen = Values(TrainingThread()), []

    class Sine:
        """An overload that tells the grad mode."""

        _schema, tags = aten.sin.default._schema, aten.sin.default.tags

        def __call__(self, given: Tensor) -> Tensor:
            seen.append(torch.is_grad_enabled())
            return aten.sin.default(given)

    with torch.no_grad():
        inner = _run(values, Sine(), torch.randn(4))
    made = _run(values, Sine(), inner)
    wanted = _value(values, made)
    del inner, made
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            make(wanted)
            assert torch.is_grad_enabled() is enabled
    assert seen == [False, True] * 3
