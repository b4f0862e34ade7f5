"""Where the script is: module calls with stable names, and counters inside each, so that the next run finds the same op.

A call is named by the module's path below the outermost module that ran, and by the outermost call that it is part of:
`GPT.blocks.0.attn#0`, `GPT.blocks.0.attn#0.1` where it is called again inside the same one. Outermost calls are counted for each place
in the code that makes them (`GPT#0`, `GPT#1` in a loop; `GPT#1:0` from another line), and those after the step apart (`GPT#+0`); see
`places`. What runs outside any module is named after the outermost call that ended last: `@`, `@GPT#0`.
Calls without gradients count apart (`GPT~0`), so that an evaluation between two training steps shifts nothing.
Outermost modules of one class are numbered as iterations meet them (`GPT`, `GPT(2)`): the next model of an ensemble, or a loss
made anew in each step, is where the one before was.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from memopt.instrument.compiled import CompiledRegions
from memopt.instrument.memory.resizes import Resizes
from memopt.instrument.modes import keep_out_of_traces
from memopt.instrument.places import Loop, Roles, roles_of_modules
from memopt.instrument.script.training_thread import TrainingThread
from memopt.instrument.torch_internals import DisableTorchFunction, ask_for_module_hooks, module_hook_tables
from memopt.instrument.traced import keep_out_of_compiler, unless_compiling
from memopt.trace import MOST_CHARACTERS, bounded

_MOST_CHARACTERS = MOST_CHARACTERS // 2
"""Of a module's path: with the call it is a name that a profile keeps as it is."""


def root_of(path: str) -> str:
    """Name of the outermost module of a module's path."""
    return path.partition(".")[0]


class Frame:
    """One module call: its name, and how many packs it has run itself, and how many ops by their overloads' names."""

    __slots__ = ("diverged", "key", "ops", "outermost", "packs", "path", "to_do")

    def __init__(self, key: str, path: str = "", outermost: str = "") -> None:
        self.key = key
        self.path = path
        """The module's own, without the call."""
        self.outermost = outermost
        """Which outermost call it is part of."""
        self.ops: dict[str, int] = {}
        self.packs = 0
        self.diverged = False
        self.to_do: Any = None
        """What an enforcer has to do in this call, once it has looked that up."""

    @property
    def outermost_call(self) -> str:
        """The outermost module's name and call; empty outside modules."""
        sign = "~" if self.without_gradients else "#"
        return f"{root_of(self.path)}{sign}{self.outermost}" if self.path else ""

    @property
    def without_gradients(self) -> bool:
        """Was the module called where none are recorded?"""
        return "~" in self.key

    def next_op(self, name: str) -> int:
        """How many ops of this name came before. One more of another name, in some steps only, shifts nothing."""
        count = self.ops.get(name, 0)
        self.ops[name] = count + 1
        return count


class Sleeper(Protocol):
    """Told of calls of outermost modules."""

    def call_begins(self, module: nn.Module, name: str, args: object) -> None:
        """`module`, of that name, is called on `args`."""

    def evaluated(self) -> None:
        """One without gradients has ended."""


@dataclass(frozen=True, slots=True)
class _Place:
    root: weakref.ref[nn.Module]
    path: str
    """Below it: `.blocks.0`, empty for itself."""


class _Labels:
    """Names of modules by their class, and by how many of that class came before."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._counts: dict[str, int] = {}

    def of(self, module: nn.Module) -> str:
        name = self._known.get(module)
        if name is None:
            kind = type(module).__name__
            count = self._counts[kind] = self._counts.get(kind, 0) + 1
            name = self._known[module] = kind if count == 1 else f"{kind}({count})"
        return name


class Frames:
    """The stack of module calls of the thread that trains. `current` is the innermost."""

    def __init__(self) -> None:
        self._places: weakref.WeakKeyDictionary[nn.Module, _Place] = weakref.WeakKeyDictionary()
        """Of modules below those that were outermost when they were first called, and of these."""
        self._roots: dict[tuple[str, bool, bool], Roles] = {}
        """Numbers of outermost modules, by their class, with gradients or without, after a step or not."""
        self._places_of_calls: dict[str, Roles] = {}
        """Numbers of the places in the code, by what they call."""
        self._loop = Loop()
        self._iteration = 0
        self.before_training: Callable[[], None] | None = None
        """Called once, right before the first call of a module that can be trained, with gradients."""
        self.sleepers: list[Sleeper] = []
        """Who watches ops in some calls only."""
        self.without_gradients: Callable[[bool, str], None] | None = None
        """Called with true where an outermost module call without gradients begins, and which that is of those in an iteration; with false where it
        has ended."""
        self.trains_again: Callable[[], None] | None = None
        """Called where one with gradients begins after such."""
        self._evaluates = False
        """The last outermost call was without gradients."""
        self.entered: Callable[[nn.Module], None] | None = None
        """Called at the begin of each module call, in whichever thread."""
        self.named: frozenset[str] | None = None
        """Where given: other frames outside modules than these are of no interest, and are none."""
        self._labels = _Labels()
        """For people: of the whole run, in the same order."""
        self._calls: dict[str, int] = {}
        self._entered: list[str] = []
        """Of the outermost call, and of those inside it."""
        self._role: tuple[Roles, int] | None = None
        """Of the outermost call, if it is the first from its place in this iteration."""
        self._outside = Frame("@")
        self._stack: list[Frame] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._count_hooks: Callable[[], bool] | None = None
        self.current = self._outside
        self.thread = TrainingThread()
        self.regions = CompiledRegions(self.thread)
        self.resizes = Resizes()
        self.paused = False
        """True while backward runs: a module called then is a recomputation of somebody else's."""

    def install(self) -> None:
        self.watch_calls()
        self._count_hooks = ask_for_module_hooks(self._has_hooks_of_others)
        self.regions.install()
        self.resizes.install()
        keep_out_of_compiler()
        keep_out_of_traces()

    def watch_calls(self) -> None:
        """Of modules, from here on."""
        self._handles = [
            module_hooks.register_module_forward_pre_hook(unless_compiling(self._enter)),
            module_hooks.register_module_forward_hook(unless_compiling(self._leave), always_call=True),
        ]

    def forget_calls(self) -> None:
        """Watch them no more; those that are open are forgotten."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._stack.clear()

    def remove(self) -> None:
        self.forget_calls()
        if self._count_hooks is not None:
            ask_for_module_hooks(self._count_hooks)
        self.regions.remove()
        self.resizes.remove()

    def _has_hooks_of_others(self) -> bool:
        """What torch.compile asks before it warns of global hooks: it compiles nothing of ours."""
        ours = {handle.id for handle in self._handles}
        return any(set(hooks) - ours for hooks in module_hook_tables())

    def new_iteration(self) -> None:
        """Start all counters again. Calls that are open (a step inside a module) keep their names."""
        self._calls.clear()
        self._iteration += 1
        self._loop.iteration_ended()
        self._outside = Frame("@")
        if not self._stack:
            self.current = self._outside

    def thread_changed(self) -> None:
        """Another thread trains now: calls that were open elsewhere are none of its own."""
        self._stack.clear()
        self.new_iteration()

    def name_of_root(self, root: nn.Module) -> str:
        """Name of outermost module `root`, for people: it stays the same for the whole run."""
        place = self._places.get(root)
        above = place.root() if place is not None else None
        return (
            self._labels.of(root) if place is None or above is None else self._labels.of(above) + place.path
        )

    def _enter(self, module: nn.Module, args: object) -> None:
        if self.entered is not None:
            self.entered(module)
        if self.paused or not self.thread.is_here:
            return
        sign = "#" if torch.is_grad_enabled() else "~"
        if self._stack:
            path, outermost = self._path_of(module), self._stack[0].outermost
            again = self._count(f"{path}{sign}{outermost}")
            key = f"{path}{sign}{outermost}.{again}" if again else f"{path}{sign}{outermost}"
        else:
            if self.before_training is not None and sign == "#":
                self._may_begin(module)
            self._entered.clear()
            path, outermost = self._outermost(module, sign)
            if self.without_gradients is not None and sign == "~":
                self._evaluates = True
                self.without_gradients(True, path + outermost.rpartition(":")[0])
            elif self._evaluates and sign == "#":
                self._evaluates = False
                if self.trains_again is not None:
                    self.trains_again()
            for each in self.sleepers:
                each.call_begins(module, path, args)
            key = f"{path}{sign}{outermost}"
        frame = Frame(key, path, outermost)
        self._stack.append(frame)
        self.current = frame

    def _outermost(self, module: nn.Module, sign: str) -> tuple[str, str]:
        """Path and call of `module`, which is called from the script's code."""
        place = self._loop.place()
        after = "+" if self._loop.is_at_its_end else ""
        path = self._path_of(module)
        called = f"{path}{sign}{after}"
        roles = self._places_of_calls.get(called)
        if roles is None:
            roles = self._places_of_calls[called] = Roles()
        role = roles.of(place, self._iteration)
        call = self._count(f"{called}{role}:")
        self._role = None if call else (roles, role)
        return path, f"{after}{role}:{call}" if role else f"{after}{call}"

    def _may_begin(self, module: nn.Module) -> None:
        begin = self.before_training
        if begin is None:
            return
        with DisableTorchFunction():
            trains = any(each.requires_grad for each in module.parameters())
        if trains:
            self.before_training = None
            begin()

    def _count(self, name: str) -> int:
        """How many calls of that name came before in this iteration."""
        self._entered.append(name)
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        return call

    def _take_back(self) -> None:
        """An exception has ended the outermost call: it does not count, for whoever catches it tries again with the next batch."""
        for name in self._entered:
            if self._calls.get(name):
                self._calls[name] -= 1
        if self._role is not None:
            self._role[0].release(self._role[1])

    def _path_of(self, module: nn.Module) -> str:
        place = self._places.get(module)
        root = place.root() if place is not None else None
        if place is None or root is None:
            if self._stack:
                return bounded(f"{self._stack[-1].path}.<{type(module).__name__}>", _MOST_CHARACTERS)
            place, root = self._put(module), module
        return bounded(self._root_name(root) + place.path, _MOST_CHARACTERS)

    def _root_name(self, root: nn.Module) -> str:
        kind = type(root).__name__
        which = (kind, torch.is_grad_enabled(), self._loop.is_at_its_end)
        roles = self._roots.get(which)
        if roles is None:
            roles = self._roots[which] = roles_of_modules()
        number = roles.of(root, self._iteration)
        return f"{kind}({number + 1})" if number else kind

    def _put(self, root: nn.Module) -> _Place:
        """Outermost module `root` is called for the first time: it and all modules below it that have no place get theirs."""
        self._labels.of(root)
        reference = weakref.ref(root)
        for path, module in root.named_modules():
            known = self._places.get(module)
            if known is None or known.root() is None:
                self._places[module] = _Place(reference, f".{path}" if path else "")
        return self._places[root]

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        if self.paused or not self.thread.is_here or not self._stack:
            return
        frame = self._stack.pop()
        if self._stack:
            self.current = self._stack[-1]
            return
        if output is None and sys.exc_info()[0] is not None:
            self._take_back()
        elif not frame.without_gradients and not frame.outermost.startswith("+"):
            self._go_outside(f"@{frame.key}")
        if self.without_gradients is not None and frame.without_gradients:
            self.without_gradients(False, "")
        self.current = self._outside
        for each in self.sleepers if frame.without_gradients else ():
            each.evaluated()

    def _go_outside(self, key: str) -> None:
        if self.named is None or key in self.named:
            self._outside = Frame(key)
