"""Plans for the recorded iteration of a run, looked for in a process beside the script."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from memopt.advisors.background import Background
from memopt.cli.run.cache import Cache
from memopt.cli.run.course import Wishes
from memopt.errors import MemoptError
from memopt.growth import may_grow, may_move, saved_elements, saved_sizes
from memopt.plan import Plan
from memopt.trace import MAY_GROW, Trace

_WORTH_IT = 0.01
"""Share of the step by which a plan has to be better to take over while the script goes on."""


class Planning:
    """One search. Ask for a plan when it has news; the last one may have been it."""

    def __init__(
        self,
        background: Background,
        trace: Trace,
        budget: str,
        wishes: Wishes,
        cache: Cache,
        saved_before: Sequence[tuple[int, int]],
        sizes_before: Sequence[Sequence[int]],
        phase: int,
    ) -> None:
        """`saved_before`: how many tensors, and elements, autograd saved in iterations before the recorded one, which is of that `phase`;
        `sizes_before`: how many each of these tensors has, of some of those iterations."""
        trace.save(cache.trace_path(phase))
        sizes = saved_sizes(trace)
        self._began = time.perf_counter()
        self._background = background
        background.look_for(
            cache.trace_path(phase),
            budget,
            cache.plan_path(phase),
            allow=wishes.allow,
            deny=(*wishes.deny, *cache.denied()),
            time_limit_s=wishes.time_limit_s,
            grown=max(
                trace.facts.get(MAY_GROW, 100) / 100,
                may_grow(saved_elements(trace), len(sizes), saved_before),
                *(may_move(sizes, each) for each in sizes_before),
                cache.growth(),
            ),
        )

    @property
    def ms(self) -> float:
        """Since it began."""
        return 1000 * (time.perf_counter() - self._began)

    @property
    def is_over(self) -> bool:
        return self._background.is_over

    def has_news(self, wait_s: float = 0.0) -> bool:
        """Is there a plan, or word that there is none, that nobody has asked for, or within `wait_s` seconds?"""
        return not self.is_over and self._background.has_news(wait_s)

    def plan(self) -> Plan:
        """The plan that was found first. Raises `MemoptError` where there is none."""
        return self._background.plan()

    def better_than(self, first: Plan) -> Plan | None:
        """The plan that the search came to, where it is worth to take over."""
        try:
            better = self._background.plan()
        except MemoptError:  # .memopt/ was deleted meanwhile
            return None
        enough = msgspec.structs.replace(first, predicted_step_ms=(1 - _WORTH_IT) * first.predicted_step_ms)
        return better if better.is_better_than(enough) else None
