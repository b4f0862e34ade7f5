"""CUDA's choice of operators, imposed on fake cpu tensors by overriding composite ops in the dispatcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memopt.estimators.fake_choices import Overrides


def cuda_choices(overrides: Overrides) -> None:
    """Flash and efficient attention, one-byte dropout masks, cuDNN batch norm."""
