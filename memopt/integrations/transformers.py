"""For the `Trainer` of Hugging Face transformers.

from memopt.integrations.transformers import MemoptCallback

trainer = Trainer(...)
MemoptCallback(profile="run.profile.json.gz").attach(trainer)     # or plan="plan.json"
trainer.train()
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from memopt.integrations.steps import Steps


class MemoptCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Puts the peak of memory into every log, and records a step or runs under a plan."""

    def __init__(self, *, profile: str | Path | None = None, plan: str | Path | None = None) -> None:
        self._steps = Steps(profile=profile, plan=plan)

    @property
    def result(self) -> Any:
        """Once training has ended: the profile, or the outcome of the plan."""
        return self._steps.result

    def attach(self, trainer: Any) -> MemoptCallback:
        """Add this to `trainer` before the callbacks that log (W&B, TensorBoard), so that they get the figures too."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps.begin()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        if logs is not None:
            figures = self._steps.figures()
            logs.update(figures)
            if state.log_history:
                state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps.end()
