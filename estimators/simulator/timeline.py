"""The judge: (trace, decisions, device) -> Timeline. Every predicted number of memopt comes from here.

It does what the enforcer does: a dropped storage is gone once nobody but autograd holds it; it comes back when the first
consumer asks (made `early`: before the first goes of what it is made of), through replays that hold their inputs and outputs
like the real ones, and stays until its last consumer is served (made on the way to another, only if it is not to be made
`again`); a replay that reads a swapped storage brings it back, and it stays; records pin their sources; encoded forms,
decode buffers and copies in flight count. Lanes: compute, swap-out, swap-in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

from memopt.device import Device
from memopt.estimators.simulator.chains import Chain
from memopt.estimators.simulator.costs import backward_ms, handling_ms, hooks_ms, make_ms, usual_ms
from memopt.estimators.simulator.decision import Decision
from memopt.estimators.simulator.evaluation import Evaluation
from memopt.estimators.simulator.replays import Replays
from memopt.estimators.simulator.swap_lanes import NO_SWAPS, SwapLanes, Swaps
from memopt.estimators.simulator.trace_view import Floats, Saved, TraceView
from memopt.timeline import Interval, Timeline


class Simulator:
    """Evaluates decisions on one trace. `device` gives the links; `hooked`: saved tensors are watched even where nothing is decided, as the run is
    another than the recorded one."""

    def __init__(self, view: TraceView, device: Device | None = None, *, hooked: bool = False) -> None:
        self.view = view
        self.device = device or view.trace.device
        self.watching_ms = view.pace * usual_ms(view.trace)
        """What any action at all adds to a step."""
        self._least_watching_ms = view.pace * hooks_ms(view.trace) if hooked else 0.0
        self.make_ms = view.pace * make_ms(view.trace.device)
        """What each tensor that is made again adds, beside the ops that run again."""
        self._with_weights_away_ms = view.pace * backward_ms(view.trace)
        self.given: Mapping[int, Decision] = {}
        """What is decided whatever else is: swaps of what no backward call asks for."""
        self._evaluation: Evaluation | None = None

    def run(
        self,
        decisions: Mapping[int, Decision],
        *,
        lanes: bool = False,
        whole: bool = False,
        still_wanted: Callable[[], None] = lambda: None,
    ) -> Timeline:
        """The timeline of a step under `decisions` (storage -> decision) and those that are given. `whole`: simulate all of it, not what differs from the plan before.
        `still_wanted` is called before each replay is looked for, and may raise: where thousands need one another, that takes a minute."""
        if whole:
            self._evaluation = None
        decisions = self._with_given(decisions)
        evaluation = self._evaluate(decisions, still_wanted)
        summed = evaluation.ledger.summed()
        swaps = self._swap(decisions, evaluation)
        view, live = self.view, summed.live
        if swaps is not NO_SWAPS:
            live = live + swaps.change(view.n)
        high = live + summed.over
        peak_op = int(high.argmax()) if view.n else 0
        watching_ms = self.watching_ms if decisions else self._least_watching_ms
        watching_ms += self.make_ms * sum([decision.kind == "recompute" for decision in decisions.values()])
        if any(view.saved[storage].is_weight for storage in decisions):
            watching_ms += self._with_weights_away_ms
        return Timeline(
            live_bytes=live,
            high_bytes=high,
            start_ms=summed.times,
            peak_bytes=int(high[peak_op]) if view.n else view.trace.base_bytes,
            peak_op=peak_op,
            step_ms=view.trace.step_ms + summed.added_ms + swaps.stall_ms + watching_ms,
            replay_ms=summed.added_ms - summed.staging_ms,
            stall_ms=swaps.stall_ms + (summed.staging_ms if self.device.kind == "cpu" else 0.0),
            lanes=(
                *self._replay_lanes(evaluation.chains(), decisions, summed.times),
                *self._lanes.intervals(swaps),
            )
            if lanes
            else (),
        )

    def chains(self, decisions: Mapping[int, Decision]) -> tuple[dict[int, Chain], list[int]]:
        """Replays by storage that asks for them first, and the storages that must be kept after all."""
        evaluation = self._evaluate(self._with_given(decisions))
        return evaluation.chains(), evaluation.kept()

    def away_from(self, decisions: Mapping[int, Decision]) -> dict[int, list[int]]:
        """For each swapped storage and each of its absences the first op before which it has left, -1 where it does not."""
        decisions = self._with_given(decisions)
        return self._swap(decisions, self._evaluate(decisions)).away_from()

    def back_by(self, decisions: Mapping[int, Decision]) -> dict[int, int]:
        """For each swapped storage that a replay reads ahead of its first consumer, the op before which it does."""
        return self._evaluate(self._with_given(decisions)).ledger.back_by()

    def staging_ms(self, saved: Saved) -> float:
        """What swapping `saved` takes of the compute lane: on a CPU the cores that compute copy to and from the tier's buffers; elsewhere
        the host queues the copies."""
        copies = 1 if saved.storage in self.view.unasked else 2 * (1 + len(saved.again))
        return copies * handling_ms(saved.size_bytes, self.device, self.view.pace)

    def copy_ms(self, size_bytes: int, decision: Decision, *, out: bool) -> float:
        """Time of one copy on its lane; infinite where the device has no such link."""
        return self._lanes.copy_ms(size_bytes, decision, out=out)

    def _with_given(self, decisions: Mapping[int, Decision]) -> Mapping[int, Decision]:
        return {**self.given, **decisions} if self.given else decisions

    @cached_property
    def _replays(self) -> Replays:
        return Replays(self.view)

    @cached_property
    def _lanes(self) -> SwapLanes:
        return SwapLanes(self.view, self.device)

    def _evaluate(
        self, decisions: Mapping[int, Decision], still_wanted: Callable[[], None] = lambda: None
    ) -> Evaluation:
        """All but the copies. From the plan before, since the next plan of a search differs by a few decisions."""
        found, self._evaluation = self._evaluation or Evaluation(self._replays, self.device), None
        found.go_to(decisions, still_wanted)
        self._evaluation = found  # not when `still_wanted` raised
        return found

    def _swap(self, decisions: Mapping[int, Decision], evaluation: Evaluation) -> Swaps:
        ledger = evaluation.ledger
        if not ledger.swapped:
            return NO_SWAPS
        swapped = {storage: decisions[storage] for storage in sorted(ledger.swapped)}
        return self._lanes.swap(swapped, ledger.summed().times, ledger.back_by(), ledger.back_again_by())

    def _replay_lanes(
        self, chains: Mapping[int, Chain], decisions: Mapping[int, Decision], times: Floats
    ) -> list[Interval]:
        lanes = []
        for storage, chain in chains.items():
            saved = self.view.asked_as(storage, early=decisions[storage].early)
            end = float(times[saved.first_use])
            took = float(sum(self.view.op_ms[op] for op in chain.ops))
            label = self.view.trace.storage_label(storage)
            lanes.append(Interval("compute", f"replay {label}", end - took, end, saved.size_bytes))
        return lanes
