"""A run under a plan: install the engine when the script imports torch, follow its iterations, measure, tell the outcome."""

from __future__ import annotations

import gc
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from memopt.enforcers.carried_out import (
    decisions_about_the_run,
    notes_on_tensors,
    notes_on_the_run,
    outcome_of,
)
from memopt.enforcers.freed_pages import FreedPages, keep_freed_pages
from memopt.enforcers.measurements import Measurements, Peaks
from memopt.enforcers.memory_limit import MemoryLimit
from memopt.errors import NotPossibleHere
from memopt.instrument.loop import Loop, begin_at_torch
from memopt.instrument.script.forks import call_around_fork
from memopt.outcome import Outcome
from memopt.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from memopt.enforcers.engine import Engine
    from memopt.enforcers.gradients_in_place import GradientsInPlace
    from memopt.enforcers.guarding.standby import Standby
    from memopt.enforcers.lookup import Tables
    from memopt.enforcers.optimizer.in_backward import OptimizerInBackward
    from memopt.enforcers.optimizer.in_pieces import OptimizerInPieces
    from memopt.enforcers.optimizer.planned_steps import PlannedSteps
    from memopt.enforcers.tiers.swapped import Swapper
    from memopt.enforcers.weights.streamed import StreamedWeights
    from memopt.enforcers.weights.watched import WatchedWeights
    from memopt.instrument.frames import Frames
    from memopt.instrument.iterations import Iterations
    from memopt.instrument.saved import SavedTensorHooks
    from memopt.instrument.stepping.optimizer_made import WhenOptimizerMade
    from memopt.profiler.known import There

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to apply a plan."""

    swap_dir: Path
    measure: bool = True
    holds_bytes: int = 0
    """What a guard is to hold where iterations come to more than was planned for; 0: none does."""
    limit_bytes: int = 0
    """What a GPU's allocator may reserve; 0: all there is."""


class Witness(Protocol):
    """Told, beside the session, of what the training loop computes."""

    def iteration_ended(self, count: int, milliseconds: float) -> None: ...
    def backward_begins(
        self, roots: tuple[torch.Tensor, ...], *, keep_graph: bool, create_graph: bool
    ) -> None: ...
    def step_begins(self, optimizer: torch.optim.Optimizer) -> None: ...
    def gradient_is_whole(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        """It is used and let go before the step begins."""


class ApplySession:
    """Listens to the training loop and keeps the engine in step with it."""

    def __init__(
        self,
        plan: Plan,
        options: Options,
        *,
        also: Witness | None = None,
        steps: PlannedSteps | None = None,
    ) -> None:
        """`steps`: what steps the optimizer as `plan` says already, from `hand_over`."""
        self._also = also
        self._plan = plan
        self._options = options
        self._pid = os.getpid()
        self._engine: Engine | None = None
        self._frames: Frames | None = None
        self._iterations: Iterations | None = None
        self._hooks: SavedTensorHooks | None = None
        self._swapper: Swapper | None = None
        self._own_loop: Loop | None = None
        """None where frames and iterations are another's to remove."""
        self._steps, self._goes_on = steps, steps is not None
        self._over_gradients: GradientsInPlace | None = None
        self._optimizer_made: WhenOptimizerMade | None = None
        self._in_training = False
        """Has backward begun in this iteration?"""
        self._limit = MemoryLimit(options.limit_bytes)
        self._pages: FreedPages | None = None
        self._measurements = Measurements(plan, peaks=options.measure)
        self._in_two_threads = False
        """The script trains in another thread since this iteration began."""
        self._left_plain = 0
        """Iterations of which that was true, but the first."""
        self.notes: list[str] = []

    @property
    def pieces(self) -> OptimizerInPieces | None:
        """What steps the optimizer in pieces, where the plan says so."""
        return self._steps.in_pieces if self._steps is not None else None

    @property
    def ended_the_run(self) -> bool:
        """Has the script wanted a gradient that the plan's steps inside backward had let go of?"""
        inside = self._steps.in_backward if self._steps is not None else None
        return inside is not None and inside.ended_the_run

    @property
    def iterations_seen(self) -> int:
        """How many have ended in this process."""
        return self._iterations.count if self._iterations is not None else 0

    @property
    def most_saved(self) -> float:
        """How many times as many elements as the profiled iteration the largest one saved, of what one backward call lets go of."""
        most, planned_bytes, standby = self._measurements.most_saved, self._plan.saved_bytes, self.standby
        if standby is None or not planned_bytes:
            return most
        return min(most, max(1.0, standby.most_saved_bytes / planned_bytes))

    @property
    def larger_at(self) -> int:
        """The iteration that saved the most, where it saved tensors that the plan knows nothing of; 0: none did."""
        return self._measurements.larger_at

    @property
    def peaks(self) -> Peaks:
        """As far as they were measured, or the guard saw them pass the budget."""
        seen = self._measurements.peaks
        return seen.or_those(self.standby.peaks) if self.standby is not None else seen

    @property
    def standby(self) -> Standby | None:
        """The guard beside the plan, where there is one."""
        return self._engine.standby if self._engine is not None else None

    @property
    def _weights(self) -> WatchedWeights | None:
        """Where the plan has weights leave."""
        return self._engine.weights if self._engine is not None else None

    @property
    def _streamed(self) -> StreamedWeights | None:
        return self._weights.streamed if self._weights is not None else None

    # --- life

    def install(self) -> None:
        """Be there when the script imports torch."""
        begin_at_torch(self)

    def leave_child(self) -> None:
        """What steers the parent steers nothing in its child."""
        self._remove()

    def torch_imported(self) -> None:
        """Enforce the plan in a loop of our own."""
        self._try_to_set_up(None)

    def begin_in(self, loop: Loop, there: There | None = None) -> None:
        """Start in a loop that somebody else watches, and tells this session of; at an iteration boundary, or when torch is imported. `there`:
        what lives, where it has just been looked for."""
        self._try_to_set_up(loop)
        if self._engine is not None and loop.iterations.count:
            if self._steps is not None and not self._goes_on:
                self._steps.begin(loop.iterations.stepped)
            self._measurements.begin_after(loop.iterations.count, there)

    def _try_to_set_up(self, loop: Loop | None) -> None:
        try:
            self._set_up(loop)
        except NotPossibleHere as error:
            self.notes.append(f"nothing was enforced: {error.what}: {error.why}")
            self._give_up()
        except Exception as error:
            log.error("memopt could not set up the plan; the script runs plain", exc_info=True)
            self.notes.append(f"nothing was enforced: {type(error).__name__}: {error}")
            self._give_up()

    def _set_up(self, loop: Loop | None) -> None:
        from memopt.enforcers.lookup import tables_of
        from memopt.instrument.torch_internals import ON_GPU, WATCH, require

        require(WATCH, *([ON_GPU] if self._plan.device.kind == "cuda" else []))
        tables = tables_of(self._plan)
        if loop is None:
            watches = not tables.empty or self._plan.streamed is not None
            forms = watches or self._plan.in_place is not None
            optimizers = self._plan.optimizers
            self._own_loop = Loop.start(self, optimizers=optimizers, calls=watches, forms=forms)
        self._limit.begin()
        engine = self._engine_in(self._own_loop or loop, tables)
        self._install_steps()
        if engine.standby is not None and self._steps is not None and self._steps.in_pieces is not None:
            self._steps.in_pieces.come_into(engine.standby.guard)
        sends_gradients = self._steps is not None and self._steps.gradients is not None
        sends_state = self._plan.in_pieces is not None and self._plan.in_pieces.tier is not None
        if engine.watches or sends_gradients or sends_state or engine.standby is not None:
            from memopt.instrument.saved import SavedTensorHooks

            pack: Callable[[torch.Tensor], Any] = engine.pack
            unpack: Callable[[Any], torch.Tensor] = engine.unpack
            if "@" in tables.calls:
                pack = self._begins_with(pack)
            if self._steps is not None and self._frames is not None:
                pack = self._steps.told_of_saving(pack, self._frames.thread)
                unpack = self._steps.told_of(unpack)
            self._hooks = SavedTensorHooks(pack, unpack)
            self._hooks.install()
        call_around_fork(self._before_fork, self._after_fork, self._forked)

    def _engine_in(self, loop: Loop | None, tables: Tables) -> Engine:
        """What enforces actions on tensors; the mode is on where there is something to watch for."""
        from memopt.enforcers.engine import Engine
        from memopt.enforcers.guarding.standby import standby_of
        from memopt.enforcers.tiers.planned import home_tier, swapper_of

        assert loop is not None
        frames = loop.frames
        self._frames, self._iterations = frames, loop.iterations
        frames.without_gradients, frames.trains_again = self._without_gradients, self._evaluation_ended
        self._measurements.frames = frames
        self._swapper = swapper_of(self._plan, tables, self._options.swap_dir)
        frames.named = frozenset(tables.calls)
        streamed = self._plan.streamed
        self._engine = engine = Engine(
            tables,
            frames,
            loop.iterations,
            self._swapper,
            self._plan.device.kind,
            streams=streamed is not None,
        )
        if engine.weights is not None:
            engine.weights.install()
            tier = home_tier(streamed, self._options.swap_dir) if streamed is not None else None
            if streamed is not None and tier is not None:
                engine.weights.stream(tier, streamed.least_bytes, ahead=streamed.ahead)
        options = self._options
        engine.standby = standby_of(self._plan, loop, options.swap_dir, options.holds_bytes, engine.values)
        if engine.standby is not None:
            guard = engine.standby.guard
            guard.sent = self._swapper.wait_for_all if self._swapper is not None else None
            guard.state_is_back = self._measurements.state_is_back
            if engine.weights is not None:
                engine.weights.come_into(guard)
        if not engine.watches:
            return engine
        if self._plan.device.kind == "cpu":
            self._pages = FreedPages(self._plan.unplanned_peak_bytes) if keep_freed_pages() else None
        if self._own_loop is None and loop.iterations.count:
            self._watch(engine)
        elif "@" in tables.calls:  # what comes before the first call of a module may be planned for
            from memopt.instrument.stepping.optimizer_made import WhenOptimizerMade

            self._optimizer_made = WhenOptimizerMade(self._optimizer_is_made)
            self._optimizer_made.install()
        if self._own_loop is not None or not loop.iterations.count:
            frames.before_training = self._training_begins
        return engine

    def _install_steps(self) -> None:
        """What enforces decisions about the run as a whole."""
        assert self._iterations is not None
        if self._plan.in_place is not None:
            from memopt.enforcers.gradients_in_place import GradientsInPlace

            will_read = self._weights.before if self._weights is not None else None
            self._over_gradients = GradientsInPlace(self._plan.in_place.least_bytes, will_read)
        if self._plan.moves_the_step and self._steps is None:
            from memopt.enforcers.optimizer.planned_steps import PlannedSteps

            self._steps = PlannedSteps()
            swap_dir, tell = self._options.swap_dir, (self._will_change, self._gradient_is_whole)
            self._steps.install(self._plan, self._iterations, swap_dir, *tell)

    def _without_gradients(self, begins: bool, call: str) -> None:
        self._measurements.without_gradients(begins, call)
        if self.standby is not None:
            self.standby.without_gradients(begins)

    def _evaluation_ended(self) -> None:
        if self._engine is not None and not self._engine.saved_tensors:
            self._measurements.evaluation_ended()
            if self.standby is not None:
                self.standby.evaluation_ended()

    def _training_begins(self) -> None:
        """What prepares the training has run without the mode, which would slow small ops down."""
        self._limit.training_begins()
        self._measurements.training_begins()
        if self._engine is not None:
            self._watch(self._engine)

    def _begins_with(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """`pack`; the training begins with what is saved first, where that is before the first call of a module."""
        frames = self._frames
        assert frames is not None

        def begin_and_pack(tensor: torch.Tensor) -> Any:
            begin = frames.before_training
            if begin is not None and frames.thread.is_here:
                frames.before_training = None
                begin()
            return pack(tensor)

        return begin_and_pack

    def _optimizer_is_made(self) -> None:
        assert self._frames is not None
        if self._engine is not None and self._frames.thread.is_here:
            self._watch(self._engine)

    @staticmethod
    def _watch(engine: Engine) -> None:
        engine.enter()
        if engine.weights is not None:
            engine.weights.begin()

    def _weights_are_back(self) -> None:
        if self._weights is not None:
            self._weights.all_back()

    def _all_weights_are_back(self) -> None:
        if self._weights is not None:
            self._weights.everything_back()

    def _before_fork(self) -> None:
        self._all_weights_are_back()  # a child could not read them
        self._measurements.pause()

    def _after_fork(self) -> None:
        if self._weights is not None and self._streamed is not None and self._streamed.most_used:
            self._weights.begin()
        self._measurements.go_on()

    def _forked(self) -> None:
        """A DataLoader worker forked from us is not ours to steer."""
        if self._engine is not None:
            self._engine.stop()

    def finished(self, *, ends: bool = False) -> Outcome | None:
        """Call when the script has ended; None in a process that was forked from ours. `ends`: so will the process."""
        if os.getpid() != self._pid:
            return None
        self._measurements.end(training=self._in_training)
        outcome = self._outcome()
        self._remove(ends=ends)
        return outcome

    def retire(self) -> tuple[Outcome | None, OptimizerInBackward | None, OptimizerInPieces | None]:
        """As `finished`, in a script that goes on; who is to be told of its steps until no gradient is missed, and who of them for as long as
        state is to be in a tier."""
        self._measurements.end(training=self._in_training)
        outcome = self._outcome()
        inside, pieces = self._steps.retire() if self._steps is not None else (None, None)
        self._remove()
        return outcome, inside, pieces

    def hand_over(self) -> tuple[Outcome | None, PlannedSteps | None]:
        """As `finished`, in a script that goes on under another plan, whose optimizer steps as under this one; what steps it."""
        self._measurements.end(training=self._in_training)
        outcome = self._outcome()
        steps, self._steps = self._steps, None
        self._remove()
        return outcome, steps

    def _give_up(self) -> None:
        """What had been set up before something failed would go on alone."""
        self._remove()
        self._engine = self._hooks = self._steps = self._swapper = self._over_gradients = None
        if self._own_loop is not None:
            self._iterations = self._frames = self._own_loop = None

    def _remove(self, *, ends: bool = False) -> None:
        """Leave the script to itself; in a forked child, too."""
        if self._engine is not None:
            self._engine.stop()
        if self._weights is not None:
            self._weights.remove()
        if self._optimizer_made is not None:
            self._optimizer_made.remove()
        if self._frames is not None:
            self._frames.named = self._frames.before_training = None
            self._frames.without_gradients = self._frames.trains_again = None
        if self._hooks is not None:
            self._hooks.remove()
        if self._steps is not None:
            self._steps.remove(ends=ends)
        for part in (self._over_gradients, self._own_loop):
            if part is not None:
                part.remove()
        if os.getpid() != self._pid:
            return
        streamed = self._streamed
        for tiers in (self._swapper, streamed.tier if streamed is not None else None):
            if tiers is not None:
                tiers.close()

    def _outcome(self) -> Outcome:
        notes, engine = list(self.notes), self._engine
        decisions = decisions_about_the_run(self._plan, self._steps, self._over_gradients, self._streamed)
        if engine is not None:
            notes += notes_on_tensors(engine.account, self._swapper)
            if engine.standby is not None:
                notes += [engine.standby.words] if engine.standby.words else []
                self._measurements.evaluation_came_to(engine.standby.guard.most_without_gradients)
        notes += [each.words for each in decisions if each.words]
        notes += notes_on_the_run(self._hooks, self.pieces, self._swapper, self._left_plain)
        return outcome_of(
            self._plan,
            self._measurements,
            decisions,
            actions_done=len(engine.account.usual) if engine is not None else 0,
            divergences=engine.divergences if engine is not None else 0,
            steps=self.iterations_seen,
            waited_share=self._iterations.waited_share if self._iterations is not None else 0.0,
            notes=notes,
        )

    # --- the training loop (Listener)

    def thread_changed(self) -> None:
        """What was begun in the thread that trained before cannot be ended here; the next iteration is enforced again."""
        self._all_weights_are_back()
        self._measurements.forget_this_iteration()
        self._in_two_threads = True
        if self._frames is not None:
            self._frames.thread_changed()
            self._frames.thread.at_end(self._leave_thread)
        if self._hooks is not None:
            self._hooks.thread_changed()
        if self.standby is not None:
            self.standby.guard.rest()

    def _leave_thread(self) -> None:
        if self._engine is not None:
            self._engine.leave_thread()
        if self._hooks is not None:
            self._hooks.leave_thread()

    def iteration_ended(self, count: int, milliseconds: float) -> None:
        try:
            self._end_iteration(count, milliseconds)
        except Exception as error:
            log.error("memopt failed; the script goes on plain", exc_info=True)
            self.notes.append(f"from iteration {count + 1} on nothing was enforced: {type(error).__name__}: {error}")  # fmt: skip
            self._give_up()
        if self._also is not None:
            self._also.iteration_ended(count, milliseconds)

    def _end_iteration(self, count: int, milliseconds: float) -> None:
        if os.getpid() != self._pid or self._engine is None or self._frames is None:
            return
        engine = self._engine
        if engine.capturing.now():
            return
        engine.settle_all()
        self._in_training = False
        if count == 1:
            engine.divergences = 0  # building the model and the first batch is never as in a steady iteration
            if engine.standby is not None:
                gc.collect()  # what that leaves in reference cycles, no plan accounts for
        plain, self._in_two_threads = self._in_two_threads, False
        self._left_plain += int(plain and count > 1)
        saved = engine.saved_tensors, engine.saved_elements
        counted = saved if self._hooks is not None else None
        took_ms = milliseconds - (engine.standby.looked_ms if engine.standby is not None else 0.0)
        peak_bytes = self._measurements.iteration_ended(count, took_ms, counted, plain=plain)
        if self._pages is not None:
            self._pages.iteration_ended()
        if self._swapper is not None and self._swapper.feedback is not None:
            self._swapper.feedback.iteration_ended(peak_bytes)
        if engine.standby is not None:
            measured = self._measurements
            of_this_one = measured.last_peak_bytes
            engine.standby.iteration_ended(saved, of_this_one, in_cycles=bool(measured.in_cycles))
        failed = self._swapper.failed if self._swapper is not None else {}
        account = engine.account
        account.declined = failed | account.declined
        actions = self._plan_slots(engine)
        whole = (n for n, taken in account.done.items() if taken >= actions[n] and n not in failed)
        account.alone += engine.standby is not None and engine.standby.alone
        account.iteration_ended(whole, is_like=not plain and saved[0] == self._plan.saved_tensors)
        engine.new_iteration()
        if self._over_gradients is not None:
            self._over_gradients.new_iteration()
        self._frames.new_iteration()
        engine.sleep()
        if self._iterations is not None:
            guarded = engine.standby is not None and not engine.standby.guard.rests
            self._measurements.iteration_begins(count, self._iterations, guarded=guarded)
        if engine.standby is not None:
            engine.standby.is_measured = self._measurements.is_measuring

    def _plan_slots(self, engine: Engine) -> list[int]:
        return [len(action.slots) or 1 for action in engine.actions]

    def backward_begins(
        self, roots: tuple[torch.Tensor, ...], *, keep_graph: bool, create_graph: bool
    ) -> None:
        self._in_training = True
        self._limit.training_begins()  # where no plan watches forward
        if self._also is not None:
            self._also.backward_begins(roots, keep_graph=keep_graph, create_graph=create_graph)
        if self._steps is not None:
            self._steps.backward_begins(keep_graph=keep_graph, create_graph=create_graph)
        if self._engine is None or self._frames is None:
            return
        if not self._engine.capturing.now():
            self._engine.settle_all()
            if self._swapper is not None and self._plan.device.kind == "cpu" and not create_graph:
                self._swapper.wait_for_all()
        over = self._over_gradients if not create_graph and not self._engine.capturing.now() else None
        self._engine.backward_begins(roots, another_watches=over is not None, makes_graph=create_graph)
        self._frames.paused = True
        if over is not None:
            over.backward_begins(roots, self.standby.guard if self.standby is not None else None)

    def backward_ended(self) -> None:
        if self.standby is not None:
            self.standby.backward_ended()
        if self._over_gradients is not None:
            self._over_gradients.backward_ended()
        if self._steps is not None:
            self._steps.backward_ended()  # the last gradient leaves first
        self._weights_are_back()
        if self._engine is None or self._frames is None:
            return
        self._frames.paused = False
        self._engine.backward_ended()

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        inside = self._iterations is not None and self._iterations.in_backward
        if inside and self._weights is not None:
            self._weights.stepped_inside(optimizer)
        else:
            self._weights_are_back()
        if self._also is not None:
            self._also.step_begins(optimizer)
        if self._engine is not None:
            self._engine.step_begins(optimizer)
        if self._steps is not None:
            self._steps.step_begins(optimizer)

    def _will_change(self, parameter: torch.Tensor) -> None:
        """What is to be made from the parameter as it is now is made now."""
        if self._engine is not None and self._engine.values.holds_sources:
            self._engine.values.will_be_rewritten(parameter)

    def _gradient_is_whole(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        if self._also is not None:
            self._also.gradient_is_whole(optimizer, parameter)

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The gradient; a copy of it where it is in a tier, and stays there."""
        from memopt.instrument.stepping.gradient_reads import kept_gradient
        from memopt.instrument.torch_internals import disable_current_modes

        away = self._steps.gradients if self._steps is not None else None
        if away is None or not away.holds(parameter):
            return kept_gradient(parameter)
        with disable_current_modes():
            return away.copy_of(parameter)

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        if self._engine is not None:
            self._engine.step_ended()
        if self._steps is not None:
            self._steps.step_ended(optimizer)
