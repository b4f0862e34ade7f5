"""What a fake run answers where only values could, and what it must not keep alive to ask kernels about their temporaries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memopt.estimators.fake.kernels.probe import _measure
from memopt.estimators.fake.recorder import FakeRecorder


@pytest.fixture
def recorder() -> Iterator[FakeRecorder]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with FakeRecorder("cpu") as made:
        yield made
    torch.set_num_threads(before)


def test_some_of_a_mask_is_true_and_not_all_of_it(recorder: FakeRecorder) -> None:
    mask = recorder.fake((100, 100)) > 0
    some, every = bool(mask.any()), bool(mask.all())
    assert (some, every) == (True, False)


def test_an_assertion_holds(recorder: FakeRecorder) -> None:
    mask = recorder.fake((100, 100)) > 0
    assert mask.all()
    assert not mask.any()


def test_a_count_is_one_and_what_follows_from_it(recorder: FakeRecorder) -> None:
    mask = recorder.fake((100, 100)) > 0
    found, several = bool(mask.sum() > 0), bool(mask.sum() > 1)
    assert (found, several) == (True, False)
    best = recorder.fake((100, 100)).argmax()
    assert [int(best), int(best + 1), int(3 * best - 5)] == [1, 2, -2]
    assert recorder.fake((9, 4))[best : best + 1].shape == (1, 4)


def test_a_condition_that_would_raise_or_go_round_again_is_false(recorder: FakeRecorder) -> None:
    values = recorder.fake((100, 100))
    if (values < 0).any():
        raise ValueError("a mask decides whether this line runs")
    while (values < 0).any():
        pytest.fail("a mask decides how often this line runs")


def test_an_argmax_over_everything_chooses_from_every_element(recorder: FakeRecorder) -> None:
    values = recorder.fake((40, 50))
    chosen = values[values.argmax() == torch.arange(2000).view(40, 50)]
    assert chosen.shape == (1,)


def test_indices_are_let_go_although_their_op_is_asked_about(recorder: FakeRecorder) -> None:
    """index, index_add and what backward makes of them take a list of tensors."""
    table = torch.nn.Parameter(recorder.fake((3000, 64)))
    for _ in range(3):
        rows = torch.randint(0, 3000, (10_000,))
        torch.zeros_like(table).index_add(0, rows, table[rows]).sum().backward()
        del rows
    recording = recorder.finish()
    made = [i for i, row in enumerate(recording.rows) if row.op == "randint.low"]
    assert len(made) == 3
    assert {-(i + 1) for i in made} <= set(recording.events)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no oneDNN products in bf16")
def test_products_in_bf16_take_what_onednn_packs(recorder: FakeRecorder) -> None:
    left = recorder.fake((1040, 768), torch.bfloat16)
    right = recorder.fake((1040, 192), torch.bfloat16)
    product = left.t() @ right
    recording = recorder.finish()
    packed = [row.size_bytes for row in recording.rows if row.category == "workspace"]
    assert product.shape == (768, 192)

    def make(_: int) -> object:
        a, b = torch.zeros(1040, 768).bfloat16().t(), torch.zeros(1040, 192).bfloat16()
        return lambda: (a @ b,)

    with recorder.paused():
        measured, _ = _measure([(make, 768)])[0]  # type: ignore[list-item]
    assert packed == [measured]
    assert measured > 0


def test_a_loop_that_known_values_led_into_goes_round_once_more(recorder: FakeRecorder) -> None:
    """An adaptive solver: its time is known until a step's size depends on an error that was never computed."""
    time, rounds = torch.tensor(0.0), 0
    while time < 1:
        time = time + recorder.fake((100, 100)).norm()
        rounds += 1
    assert rounds == 2


LIBRARY = """
def step(error, done):
    assert error < 1, "too large"
    if not (error < 2):
        raise ValueError(error)
    accepted = error < 0.5
    if accepted:
        done.append(1)
    if error > 1:
        done.append(2)
    return done
"""


def test_a_librarys_checks_hold_and_its_steps_are_accepted(recorder: FakeRecorder, tmp_path: Path) -> None:
    path = tmp_path / "site-packages" / "solver.py"
    path.parent.mkdir()
    path.write_text(LIBRARY)
    names: dict[str, Any] = {}
    exec(compile(LIBRARY, str(path), "exec"), names)
    done = names["step"](recorder.fake((100, 100)).norm(), [])
    assert done == [1]


PROCESS = """
class Checked(Normal):
    @property
    def batch_shape(self):
        if (self.loc > 0).any():
            raise ValueError("failed")
        return self.loc.shape
    def expand(self, *args):
        raise NotImplementedError
    def _extended_shape(self, sample_shape=()):
        return self.batch_shape
"""


def test_a_distribution_of_a_library_is_asked_as_that_library(recorder: FakeRecorder, tmp_path: Path) -> None:
    """What torch's own distributions ask holds, and not what a subclass asks below them (GPyTorch: has Cholesky failed?)."""
    path = tmp_path / "site-packages" / "process.py"
    path.parent.mkdir()
    path.write_text(PROCESS)
    names: dict[str, Any] = {"Normal": torch.distributions.Normal}
    exec(compile(PROCESS, str(path), "exec"), names)
    scale = recorder.fake((100, 100)).abs()
    drawn = names["Checked"](scale, scale).sample()
    assert drawn.shape == (100, 100)
