"""What is remembered of ops on fake tensors is what torch answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from memopt.estimators.fake.recorder import FakeRecorder

Made = Callable[..., torch.Tensor]


def told(value: Any, given: torch.Tensor) -> Any:
    """Geometry of results, and whether they are the argument or lie in it."""
    if isinstance(value, (list, tuple)):
        return type(value), [told(each, given) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    shares = value.untyped_storage()._cdata == given.untyped_storage()._cdata
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value is given, shares


OPS: dict[str, Callable[[torch.Tensor, Made], Any]] = {
    "elementwise": lambda x, new: x * x + 1,
    "scalar types": lambda x, new: (new((3,), torch.int64) * 2, new((3,), torch.int64) * 2.0),
    "in place": lambda x, new: x.add_(x),
    "in place, other type": lambda x, new: new((4, 6), torch.bfloat16).add_(x),
    "views": lambda x, new: (x[1], x[:, 2:], x.t(), x.view(6, 4), x.unsqueeze(0).expand(3, 4, 6)),
    "view of a view": lambda x, new: x[:, 1:][2].unsqueeze(-1),
    "several": lambda x, new: (x.split(2), x.chunk(3, 1), x.unbind(0), x.max(1)),
    "product": lambda x, new: x @ x.t(),
    "joined": lambda x, new: torch.cat([x, x], 1),
    "strides": lambda x, new: (x.t() + x.t(), x.t().contiguous(), x.contiguous()),
    "reduced": lambda x, new: (x.sum(), x.mean(0, keepdim=True), x.sum(0, dtype=torch.float64)),
    "geometry in place": lambda x, new: new((4, 1, 6)).squeeze_().t_().unsqueeze_(1),
    "normalised": lambda x, new: torch.native_layer_norm(x, (6,), None, None, 1e-5),
    "convolved": lambda x, new: F.conv2d(new((2, 3, 8, 8)).to(memory_format=torch.channels_last), new((5, 3, 3, 3))),
    "real operand": lambda x, new: (x + torch.ones(6), x * torch.tensor(2.0)),
    "complex": lambda x, new: (torch.view_as_complex(new((4, 2))).conj(), torch.fft.fft(x).imag),
    "empty": lambda x, new: new((0, 4)) @ new((4, 3)),
    "default type": lambda x, new: new((3,), torch.int64) / 2,
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_the_second_answer_is_the_first(name: str) -> None:
    with FakeRecorder("cuda") as recorder, torch.no_grad():

        def new(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return recorder.fake(shape, dtype)

        answers = []
        for _ in range(3):
            x = new((4, 6))
            answers.append(told(OPS[name](x, new), x))
        recorder.shapes._known.clear()
        x = new((4, 6))
        assert answers == [told(OPS[name](x, new), x)] * 3


def test_the_default_type_is_part_of_the_question() -> None:
    with FakeRecorder("cuda") as recorder:
        whole = recorder.fake((3,), torch.int64)
        single = (whole / 2).dtype
        torch.set_default_dtype(torch.float64)
        try:
            assert (single, (whole / 2).dtype) == (torch.float32, torch.float64)
        finally:
            torch.set_default_dtype(torch.float32)


def test_results_are_storages_of_their_own_that_come_and_go() -> None:
    with FakeRecorder("cuda") as recorder:
        x = recorder.fake((1024,))
        for _ in range(3):
            y = x + x
            assert recorder.live_bytes == 2 * 4096
            del y
            assert recorder.live_bytes == 4096
        kept = [x + x for _ in range(3)]
        assert recorder.live_bytes == 4 * 4096
        del kept


def test_gradients_flow_through_what_is_remembered() -> None:
    with FakeRecorder("cuda") as recorder:
        for _ in range(3):
            w = recorder.parameter((8, 8))
            (w[2:] @ w.t()).relu().sum().backward()
            assert w.grad is not None
            assert w.grad.shape == w.shape


def test_where_an_argument_starts_is_no_other_question() -> None:
    """A scan over time multiplies slices: each kind of op is asked once, and views of later slices start later."""
    with FakeRecorder("cpu") as recorder, torch.no_grad():
        x, rows = recorder.fake((50, 4, 6)), []
        recorder.shapes._known.clear()
        for step in x.unbind(0):
            rows.append((step.t()[1:] * step[0, 0], step.t()[1:], step.view(24)))
        assert len(recorder.shapes._known) < 12
        plain = torch.empty(50, 4, 6)
        for (made, later, flat), step in zip(rows, plain.unbind(0), strict=True):
            assert told(made, x) == told(step.t()[1:] * step[0, 0], plain)
            assert told(later, x) == told(step.t()[1:], plain)
            assert told(flat, x) == told(step.view(24), plain)


def test_a_view_that_says_where_it_starts_does_not_follow_its_argument() -> None:
    with FakeRecorder("cpu") as recorder, torch.no_grad():
        x = recorder.fake((50, 6))
        for row in (x[3], x[7], x[3]):
            assert row.as_strided((2,), (1,), 5).storage_offset() == 5
            assert row.as_strided((2,), (1,)).storage_offset() == row.storage_offset()


def test_an_unsafe_view_is_remembered() -> None:
    with FakeRecorder("cpu") as recorder, torch.no_grad():
        for _ in range(2):
            x = recorder.fake((4, 6))
            made = torch.ops.aten._unsafe_view(x, [6, 4])
            assert told(made, x) == (torch.Size([6, 4]), (4, 1), 0, torch.float32, False, True)
        assert None not in recorder.shapes._known.values()


def test_backward_of_a_scan_asks_no_kernel_for_each_of_its_steps() -> None:
    with FakeRecorder("cpu") as recorder:
        x = recorder.parameter((64, 40, 400))
        sum((x[:, n] * x[:, n : n + 1].sum()).sum() for n in range(40)).backward()
        assert len(recorder.probes.calls) < 20
