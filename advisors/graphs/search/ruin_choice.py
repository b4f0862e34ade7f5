"""Which ruin the graph search tries next."""

from __future__ import annotations

import random


class Arms:
    """Which ruin to try next: in proportion to what each gained per second so far, with a floor for all."""

    CHOICES = tuple((where, count) for where in ("block", "near", "any") for count in (1, 2, 4, 8, 20, 60))

    def __init__(self, rnd: random.Random) -> None:
        self.random = rnd
        self.gain = dict.fromkeys(self.CHOICES, 1e-9)
        self.seconds = dict.fromkeys(self.CHOICES, 1e-3)

    def pick(self) -> tuple[str, int]:
        """An arm."""
        rates = [self.gain[arm] / self.seconds[arm] for arm in self.CHOICES]
        least = 0.03 * sum(rates) + 1e-12
        return self.random.choices(self.CHOICES, [rate + least for rate in rates])[0]

    def learn(self, arm: tuple[str, int], gain: float, seconds: float) -> None:
        """Older gains count less."""
        self.gain[arm] = 0.98 * self.gain[arm] + gain
        self.seconds[arm] = 0.98 * self.seconds[arm] + seconds
