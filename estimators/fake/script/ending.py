"""When a run on fake tensors has seen enough: after the steps asked for, or later where that is quick and harms nothing.

What needs most may only come later: batches differ in size, an epoch ends with an evaluation, a diffusion model samples. So a script
is followed on for some thousands of ops, more of them while its steps differ. Once they are seen to be alike, those ops are not
spent on more of them: a loader that would deliver many more batches ends (`fake/script/loaders.py`). Following on ends where the script
first opens a file to write, starts a process or connects; what fails there, depends on data, or takes long is not counted at all.
"""

from __future__ import annotations

import os
import signal
import sys
import weakref
from typing import Any

from memopt.estimators.fake.ledger import Enough, Point
from memopt.estimators.fake.recorder import FakeRecorder
from memopt.estimators.fake.watch import Watch
from memopt.estimators.recording import Recording
from memopt.instrument.script.audited import opens_to_write

_OPS_ENOUGH = 1_000
"""A second step of so many ops that leaves memory as the first is the last one asked for: counted, so that every machine answers
the same."""
_BACKWARDS = 16
"""How many backward calls a script may make before its optimizer: a warm-up, or an own optimizer's steps, of which there are as many then."""
_TURNS = 6
"""How often one optimizer may step for each step of another: WGAN's critic does five times."""
_OPS_ALIKE, _OPS_DIFFERENT = 20_000, 60_000
"""How many ops are followed on, where the last two steps allocated the same and where they did not."""
_SECONDS = 60.0
"""How long following on may take."""
_OUTWARD = ("subprocess.Popen", "os.exec", "os.fork", "os.posix_spawn", "os.system", "socket.connect", "os.remove",
            "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "shutil.")  # fmt: skip


_following: list[Later] = []
"""What the alarm is for, once it is set."""


def _alarm(*_: Any) -> None:
    for each in _following:
        each.too_late()


class Ending:
    """Stops a run when the optimizer has stepped `steps` times; of several each twice as often, since such scripts may step
    twice in an iteration (lazy penalties), or the first one many times more, since some never step. Without one, counts
    backward calls. `further`: follows on after that."""

    def __init__(self, recorder: FakeRecorder, watch: Watch, steps: int, *, further: bool = False) -> None:
        if hasattr(signal, "setitimer"):
            signal.signal(
                signal.SIGALRM, _alarm
            )  # before the script: Lightning puts back what it found, at its end
        import torch

        self.recorder, self.watch, self.steps, self.further = recorder, watch, steps, further
        self.later: Later | None = None
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        self._left: list[int] = []
        self._taken: list[int] = []
        self._rows = self._ops = self._step_ops = 0
        self._again = False
        """Whether another step would be like the large ones that were followed."""
        optimizer: Any = torch.optim.Optimizer
        init = optimizer.__init__

        def counted(each: Any, *args: Any, **kwargs: Any) -> None:
            self._made.add(each)
            init(each, *args, **kwargs)

        optimizer.__init__ = counted
        watch.on_step = self._stepped
        watch.on_backward = self._went_backward

    def _stepped(self) -> None:
        done = next(iter(self.watch.steps.values()), 0)
        large = self.recorder.op_count - self._ops > _OPS_ENOUGH
        least = min((self.watch.steps.get(id(each), 0) for each in self._made), default=done)
        self._note(done)
        wanted = self.steps if len(self._made) < 2 else 2 * self.steps
        if self.later is not None:
            self._limit()
        elif done >= wanted and (least >= wanted or done >= _TURNS * self.steps):
            self._go_on()
        elif large and self._alike(self._left) and (least or done >= self.steps):
            self.recorder.guesser.remark(f"step {done} left memory as step {done - 1} had")
            self._go_on()

    def _note(self, done: int) -> None:
        """What lives after a step of the first optimizer, and what was allocated since the one before."""
        if done == len(self._left) + 1:
            self._left.append(self.recorder.live_bytes)
            self._taken.append(sum(row.size_bytes for row in self.recorder.rows[self._rows :]))
            self._step_ops = self.recorder.op_count - self._ops
            self._rows, self._ops = len(self.recorder.rows), self.recorder.op_count

    def _alike(self, values: list[int]) -> bool:
        return len(values) > 1 and values[-1] == values[-2]

    def _go_on(self) -> None:
        if not self.further:
            raise Enough
        self.later = Later(self.recorder)
        self._limit()

    def _limit(self) -> None:
        """Where following on ends, and how many more steps like these are worth their ops."""
        assert self.later is not None
        large, same = self._step_ops > _OPS_ENOUGH, self._alike(self._taken)
        alike = self._alike(self._left) and (large or same)
        more = 0 if large else _OPS_ALIKE // 4 // max(1, self._step_ops)
        self.recorder.batches_enough = more if alike else None
        self._again = large and same and len(self._left) >= self.steps
        self.later.limit(large or same)

    def _went_backward(self) -> None:
        """Nothing is known of steps without an optimizer, which may still be made, after a warm-up; and one more large step, like those
        before, ends the run."""
        enough = max(self.steps + 1, _BACKWARDS if self.recorder.op_count < _OPS_ALIKE else 0)
        if self._again or (not self._made and self.watch.backwards >= enough):
            raise Enough

    def finish(self, *, failed: bool, ended: bool) -> Recording:
        """The recording, without what came after the steps asked for if that `failed`; marked where the script `ended`."""
        if ended:
            self.recorder.marks.append(("end", len(self.recorder.events)))
        return self.recorder.finish(self.later.counted(failed) if self.later is not None else None)


class Later:
    """What a script does after the steps that were asked for."""

    def __init__(self, recorder: FakeRecorder) -> None:
        self.recorder = recorder
        self.point = recorder.point()
        guesser = recorder.guesser
        self.told = dict(guesser.lines), dict(guesser.bounded), dict(guesser.remarks)
        self.late = False
        sys.dont_write_bytecode = True
        self.open = True
        sys.addaudithook(self._audit)
        _following.append(self)
        if hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, _alarm)
            signal.setitimer(signal.ITIMER_REAL, _SECONDS, 1.0)

    def limit(self, alike: bool) -> None:
        """End at an op that depends on whether the steps are `alike`."""
        self.recorder.op_limit = self.point.op_count + (_OPS_ALIKE if alike else _OPS_DIFFERENT)
        if self.recorder.op_count >= self.recorder.op_limit:
            raise Enough

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self.open and _goes_outward(event, args):
            raise Enough

    def too_late(self) -> None:
        if self.open:
            self.late = True
            raise Enough

    def counted(self, failed: bool) -> Point | None:
        """Where the recording has to end; None when all of it counts."""
        self.open = False
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        guesser = self.recorder.guesser
        if not (failed or self.late or len(guesser.bounded) > len(self.told[1])):
            return None
        guesser.lines, guesser.bounded, guesser.remarks = self.told
        return self.point


def _goes_outward(event: str, args: tuple[Any, ...]) -> bool:
    """Whether an audit event tells of something that lasts: a file opened to write, moved or removed, a process, a connection."""
    if event == "open":
        return opens_to_write(args) and not os.fsdecode(args[0]).startswith("/dev/")
    return event.startswith(_OUTWARD)
