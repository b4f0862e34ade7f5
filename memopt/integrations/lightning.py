"""For the `Trainer` of Lightning.

from memopt.integrations.lightning import MemoptCallback

Trainer(callbacks=[MemoptCallback(plan="plan.json")]).fit(module, loader)     # or profile="run.profile.json.gz"
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

try:
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError:  # the package under its older name
    from pytorch_lightning.callbacks import Callback

from memopt.integrations.steps import Steps


class MemoptCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Logs the peak of memory of every step, and records a step or runs under a plan."""

    def __init__(self, *, profile: str | Path | None = None, plan: str | Path | None = None) -> None:
        self._steps = Steps(profile=profile, plan=plan)

    @property
    def result(self) -> Any:
        """Once training has ended: the profile, or the outcome of the plan."""
        return self._steps.result

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._steps.begin()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.log_dict(self._steps.figures(), on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._steps.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._steps.end(exception)
