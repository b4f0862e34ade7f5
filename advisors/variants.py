"""The runs that a recorded run may become before any tensor leaves: its optimizer steps inside backward, or in pieces, or has its
state in a tier between steps; and its frozen weights are streamed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec

from memopt.advisors.profiles.blockers import Floor, lowest_floor
from memopt.advisors.profiles.problem import MARGIN, TIME_LIMIT_S, Problem
from memopt.device import Device
from memopt.errors import NotPossibleHere
from memopt.estimators.simulator.gradients_away import gradients_away
from memopt.estimators.simulator.gradients_away import why_not as why_gradients_stay
from memopt.estimators.simulator.gradients_in_place import InPlace
from memopt.estimators.simulator.in_backward import in_backward
from memopt.estimators.simulator.in_pieces import Pieces, in_pieces, quickest_pieces
from memopt.estimators.simulator.in_pieces import why_not as why_not_in_pieces
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from memopt.estimators.simulator.weights_streamed import Streamed, least_sizes, weights_streamed
from memopt.plan import Tier
from memopt.trace import PHASES, Trace

_LINK_SHARE = {"disk": 0.6, "host": 0.9}
"""Share of a measured link rate that plans count on: a copy that is late costs memory as well as time."""

_SHARES_AWAY = (0.3, 0.6, 1.0)
"""Of all parameters' bytes: the state of the largest that have so much of them may be in a tier between steps; and of the bytes of all
frozen weights: so much may be streamed."""

_Way = tuple[Tier | None, float, bool]
"""Where state is between steps, of how large a share, and whether gradients are there, too."""
_Cut = tuple[_Way, int]
"""And how many bytes of parameters a piece has; 0: as few as there may be."""


@dataclass
class Variants:
    """Problems on one trace; what is decoded of it is shared between them."""

    trace: Trace
    allow: frozenset[str]
    over: InPlace | None = None
    """`trace` is of the run whose backward writes over the gradients that it uses up."""
    streamed: Streamed | None = None
    """`trace` is of the run whose frozen weights are streamed."""
    _in_pieces_views: dict[_Cut, tuple[TraceView, Pieces]] = field(default_factory=dict)

    @cached_property
    def _view(self) -> TraceView:
        return TraceView(self.trace)

    @cached_property
    def _moved_view(self) -> TraceView:
        return TraceView(in_backward(self.trace))

    @cached_property
    def floor(self) -> Floor:
        """What no plan of any of them can go below."""
        problem = self.problem(1)
        moved = self.moved(problem)
        others = [moved] if moved is not None else []
        return lowest_floor([problem, *others, *self.in_pieces(problem)])

    def problem(
        self, budget_bytes: int, time_limit_s: float = TIME_LIMIT_S, *, margin: float = MARGIN
    ) -> Problem:
        """Of the run as it is."""
        return Problem(
            self._view,
            Simulator(
                self._view,
                planning_device(self.trace.device),
                hooked=self.over is not None or self.streamed is not None,
            ),
            budget_bytes,
            self.allow,
            margin=margin,
            time_limit_s=time_limit_s,
            in_place=self.over,
            streamed=self.streamed,
        )

    def in_backward(self, problem: Problem, *, margin: float = MARGIN) -> Problem | None:
        """`problem` of the run whose optimizer steps inside backward; none where that cannot be, or lowers nothing."""
        moved = self.moved(problem, margin)
        if moved is None:
            return None
        lower = moved.plain.peak_bytes < problem.plain.peak_bytes or _excess(moved) < _excess(problem)
        return moved if lower else None

    def moved(self, problem: Problem, margin: float = MARGIN) -> Problem | None:
        """`problem` of the run whose optimizer steps inside backward, whether that lowers anything or not; none where it cannot."""
        if "optimizer" not in self.allow or self._view.stays_after_backward:
            return None
        return Problem(
            self._moved_view,
            Simulator(self._moved_view, problem.device, hooked=True),
            problem.budget_bytes,
            self.allow,
            margin=margin,
            time_limit_s=problem.time_limit_s,
            instead_of=problem,
        )

    def in_pieces(
        self, problem: Problem, *, margin: float = MARGIN, piece_bytes: int | None = None
    ) -> list[Problem]:
        """`problem` of the run whose optimizer steps in pieces, state on the device or in a tier; those that lower something, the cheapest first.
        Pieces are as large as the budget leaves room for; with `piece_bytes` all ways, in pieces of that size."""
        if "optimizer" not in self.allow or why_not_in_pieces(self.trace):
            return []
        found: list[Problem] = []
        tiers = tiers_of(problem.device, self.allow)
        ways: list[_Way] = [
            (None, 0.0, False),
            *((tier, share, False) for tier in tiers for share in _SHARES_AWAY),
            *((tier, 1.0, True) for tier in tiers if not self._gradients_stay),
        ]
        for way in ways:
            size = self._piece_bytes(way, problem) if piece_bytes is None else piece_bytes
            known = self._in_pieces_view(way, size, problem.device)
            if known is None:
                continue
            view, pieces = known
            other = Problem(
                view,
                Simulator(view, problem.device, hooked=True),
                problem.budget_bytes,
                self.allow,
                margin=margin,
                time_limit_s=problem.time_limit_s,
                instead_of=problem,
                pieces=pieces,
            )
            last = found[-1] if found else problem
            lowers = other.plain.peak_bytes < last.plain.peak_bytes or other.floor_bytes < last.floor_bytes
            if lowers or piece_bytes is not None:
                found.append(other)
        return found

    def _piece_bytes(self, way: _Way, problem: Problem) -> int:
        tier, share, with_gradients = way
        if tier is None:
            return 0
        return quickest_pieces(
            self.trace,
            tier,
            problem.device,
            share,
            within_bytes=problem.target_bytes,
            elsewhere_bytes=0 if with_gradients else problem.floor_outside_the_step_bytes,
        )

    def _in_pieces_view(self, way: _Way, size: int, device: Device) -> tuple[TraceView, Pieces] | None:
        if (way, size) not in self._in_pieces_views:
            tier, share, with_gradients = way
            try:
                trace, pieces = in_pieces(self.trace, tier, device, share, piece_bytes=size)
            except NotPossibleHere:  # without a tier, where no step can be cut
                return None
            if with_gradients:
                assert self.trace.updates is not None
                assert tier is not None
                gone = gradients_away(trace, self.trace.updates, tier, device, pieces.piece_bytes)
                if gone is None:
                    return None
                trace, size, late = gone
                pieces = replace(pieces, gradient_bytes=size, cleared_late=late)
            self._in_pieces_views[way, size] = TraceView(trace), pieces
        return self._in_pieces_views[way, size]

    @property
    def _gradients_stay(self) -> bool:
        """They leave only where the step reads them in pieces."""
        updates = self.trace.updates
        return bool(updates is None or updates.in_pieces or why_gradients_stay(self.trace))


def tiers_of(device: Device, allow: frozenset[str]) -> list[Tier]:
    """Where optimizer state may be between steps, and frozen weights between uses."""
    if device.kind != "cpu" and "swap-host" in allow and device.host_in_bytes_per_s > 0:
        return ["host"]
    return ["disk"] if "swap-disk" in allow and min(device.disk_in_bytes_per_s, device.disk_out_bytes_per_s) > 0 else []  # fmt: skip


def streamed_runs(trace: Trace, allow: frozenset[str]) -> list[tuple[Trace, Streamed]]:
    """The runs in which frozen weights are streamed, the cheapest first: some of them, all, and all without the next one on its way."""
    device = planning_device(trace.device)
    found: list[tuple[Trace, Streamed]] = []
    for tier in tiers_of(device, allow):
        sizes = least_sizes(trace, _SHARES_AWAY)
        for least_bytes, ahead in (
            *((size, True) for size in sizes),
            *((size, False) for size in sizes[-1:]),
        ):
            run = weights_streamed(trace, tier, device, least_bytes, ahead=ahead)
            if run is not None:
                found.append(run)
    return found


def _excess(problem: Problem) -> float:
    """Bytes above the target, summed over the ops but those of the optimizer, which may run at another time."""
    over = problem.plain.high_bytes - problem.target_bytes
    return float(over[(over > 0) & (problem.view.phase != PHASES.index("optimizer"))].sum())


def planning_device(device: Device) -> Device:
    """`device` with the link rates that plans count on."""
    return msgspec.structs.replace(
        device,
        host_out_bytes_per_s=device.host_out_bytes_per_s * _LINK_SHARE["host"],
        host_in_bytes_per_s=device.host_in_bytes_per_s * _LINK_SHARE["host"],
        disk_out_bytes_per_s=device.disk_out_bytes_per_s * _LINK_SHARE["disk"],
        disk_in_bytes_per_s=device.disk_in_bytes_per_s * _LINK_SHARE["disk"],
    )
