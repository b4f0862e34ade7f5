"""One `memopt run` of a script, or of a process that the script has started to train in, and the last words on it."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memopt.cli.on_oom import leaving_traces
from memopt.cli.requests import RunRequest
from memopt.errors import MemoptError, RunFailed
from memopt.instrument.script.children import Children, is_first, unused_name
from memopt.instrument.script.command import Command

if TYPE_CHECKING:
    from memopt.cli.run.course import Course, Wishes
    from memopt.cli.run.stages import Stages


class Run:
    """Of one process."""

    def __init__(
        self, request: RunRequest, command: Command, outcome_path: Path | None, *, process: str = ""
    ) -> None:
        """`process`: the name of one that the script has started; it has a plan of its own."""
        from memopt.cli.run.cache import Cache
        from memopt.cli.run.stages import Stages

        conditions = {name: getattr(request, name) for name in ("budget", "device", "allow", "deny")}
        self._cache = Cache(command, {**conditions, "process": process} if process else conditions)
        if request.fresh:
            self._cache.forget(0)
        wishes = _wishes(request)
        self._request, self._command, self._outcome_path, self._process = (
            request,
            command,
            outcome_path,
            process,
        )
        self._budget = wishes.budget or "what the device has free"
        self._stages: Stages = Stages(command, wishes, self._cache, self._tell)
        self._claim = unused_name().with_suffix(".trained")
        """There once a process that the script has started has trained."""
        self._unwritten = False

    def run(self) -> int:
        """Run the script to its end; the exit code. Dies of the signal that the script died of."""
        from memopt.instrument.script.runner import run_to_the_end

        self._tell(f"running {self._command.in_words} within {self._budget}")
        self._stages.install()
        watcher = RunsChild(self._request, self._command, self._outcome_path, self._claim)
        Children(watcher, wanted=lambda: not self._stages.course.iterations).install()
        raised = leaving_traces(self._command, self._stages.ended_by)
        code = run_to_the_end(self._command, self._end, raised=raised)
        return code or (RunFailed.exit_code if self._unwritten else 0)

    def run_in_child(self, target: Callable[[], Any], claim: Path) -> Any:
        """Call `target`, which trains perhaps; the first process that does makes the file `claim`, and the outcome is its own."""
        self._stages.install()
        try:
            return target()
        except BaseException as error:
            self._stages.ended_by(error)
            raise
        finally:
            course = self._stages.finished()
            if course is not None and course.iterations:
                self._outcome_path = self._outcome_path if is_first(claim) else None
                self._ended(course)

    def _tell(self, words: str) -> None:
        from memopt.cli.shared.console import say
        from memopt.cli.shared.ranks import rank_here

        if not self._request.quiet and not rank_here():
            say(f"{self._process}: {words}" if self._process else words)

    def _end(self, how: int) -> None:
        from memopt.cli.shared.console import outlive_the_scripts_stderr

        outlive_the_scripts_stderr()
        course = self._stages.finished(ends=True)
        if course is None:
            return
        if course.iterations or not self._claim.exists():
            self._ended(course)
        self._claim.unlink(missing_ok=True)

    def _ended(self, course: Course) -> None:
        from memopt.cli.run.words import came_to, did_what_it_said, last_words
        from memopt.cli.shared.console import say

        before = self._cache.growth(), self._cache.grows_in_vain
        if course.plan is not None and (factor := came_to(course)) > 1:
            if self._cache.record_at(course.larger_at):
                course.next_recorded = course.larger_at
            else:
                self._cache.keep_growth(factor, course.plan.grown)
        course.grows_in_vain = self._cache.grows_in_vain
        plans_again = before != (self._cache.growth(), course.grows_in_vain)
        if plans_again or course.next_recorded:
            self._cache.forget(*range(course.phase + 1))
        elif course.plan is not None and (course.ended_by_plan or not did_what_it_said(course)):
            self._cache.forget(course.phase)
        if course.ended_by_plan:
            self._cache.deny("optimizer")
        self._cache.close(in_use=course.still_planning)
        self._write(course)
        if not self._request.quiet:
            for line in last_words(course):
                say(f"{self._process}: {line}" if self._process else line)

    def _write(self, course: Course) -> None:
        if self._outcome_path is None:
            return
        from memopt.cli.run.course import facts
        from memopt.cli.shared.console import say
        from memopt.files import write_atomic

        try:
            write_atomic(self._outcome_path, json.dumps(facts(course), indent=1).encode() + b"\n")
        except MemoptError as error:
            self._unwritten = True
            say(str(error))


@dataclass(frozen=True, slots=True)
class RunsChild:
    """A `Watcher`: each process that the script starts is held within the budget, under a plan of its own."""

    request: RunRequest
    command: Command
    outcome_path: Path | None
    claim: Path

    def run(self, target: Callable[[], Any]) -> Any:
        """Call `target` in the child."""
        from memopt.cli.run.stages import Stages
        from memopt.instrument.loop import forget_parents

        forget_parents(Stages)
        name = multiprocessing.current_process().name
        return Run(self.request, self.command, self.outcome_path, process=name).run_in_child(
            target, self.claim
        )


def _wishes(request: RunRequest) -> Wishes:
    from memopt.cli.run.course import Wishes
    from memopt.enforcers.tiers.per_device import offload_tier
    from memopt.files import swap_folder

    folder = swap_folder(request.swap_dir)
    return Wishes(
        budget=request.budget,
        device=request.device or "",
        swap_dir=folder,
        allow=request.allow,
        deny=request.deny,
        time_limit_s=request.time_limit_s,
        measure=not request.no_measure,
        offload=lambda: offload_tier(folder),
        online=request.online,
    )
