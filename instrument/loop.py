"""What watches the training loop of a script, where several sessions share it one after the other: names stay, and boundaries are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memopt.instrument.as_plain import PlainForms
    from memopt.instrument.frames import Frames
    from memopt.instrument.iterations import Iterations


@dataclass(frozen=True, slots=True)
class Loop:
    """Installed by its owner, who hands it to one session at a time and tells that session of the loop."""

    frames: Frames
    iterations: Iterations
    forms: PlainForms

    def remove(self) -> None:
        """Watch no more."""
        for part in (self.iterations, self.frames, self.forms):
            part.remove()
