"""What stood in the budget's way is looked for when that tells something new, and not so often that it takes the run's time."""

from __future__ import annotations

import pytest

from memopt.enforcers.guarding import passed
from memopt.enforcers.guarding.passed import Passed
from memopt.instrument.frames import Frames


@pytest.mark.parametrize(("look_s", "looks"), [(0.01, 10), (3.0, 1)])
def test_what_is_there_is_looked_for_as_often_as_there_is_time(
    look_s: float, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty looks of seconds each, where a step made a hundred thousand tensors, were most of a run."""
    now, seen = [100.0], list[float]()

    def look(frames: Frames, device: str) -> dict[str, int]:
        now[0] += look_s
        seen.append(now[0])
        return {f"look {len(seen)}": 1}

    monkeypatch.setattr(passed, "what_is_there", look)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    known = Passed(Frames(), "cpu")
    for step in range(10):
        known.by(2**step, 1, "an op", trains=True)
        now[0] += 1
    assert len(seen) == looks
    now[0] += 100
    known.by(2**20, 1, "an op", trains=True)
    assert known.words.endswith(f"look {looks + 1} 1 B")


def test_what_an_evaluation_takes_is_told_apart() -> None:
    """Mining of hard examples without gradients cost the plan of the training its place."""
    known = Passed(Frames(), "cpu")
    known.by(100, 1, "an op", trains=False)
    known.by(7, 1, "an op", trains=True)
    assert (known.now_bytes, known.now_training_bytes, known.most_bytes) == (100, 7, 100)
    known.new_iteration()
    assert (known.now_bytes, known.now_training_bytes) == (0, 0)


def test_the_first_step_is_no_figure_of_later_ones() -> None:
    """It made the state beside all gradients, and each iteration that followed went on without its plan."""
    known = Passed(Frames(), "cpu")
    known.by(100, 1, "an op", trains=True, after_backward=True)
    assert (known.now_bytes, known.first_step_bytes, known.most_bytes) == (0, 100, 100)
    known.new_iteration()
    known.by(7, 1, "an op", trains=True, after_backward=True)
    assert (known.now_bytes, known.now_training_bytes, known.first_step_bytes) == (7, 7, 0)
