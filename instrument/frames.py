"""Where the script is: module calls with stable names, and counters inside each, so that the next run finds the same op.

A call is named by the module's path below the outermost module that ran, and by how often it was called in this iteration:
`GPT.blocks.0.attn#0`. What runs outside any module is named after the outermost call that ended last: `@`, `@GPT#0`.
Calls without gradients count apart (`GPT~0`), so that an evaluation between two training steps shifts nothing.
Outermost modules of one class are numbered as each iteration meets them (`GPT`, `GPT(2)`): the next model of an ensemble, or a loss
made anew in each step, is where the one before was.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from memopt.instrument.compiled import CompiledRegions
from memopt.instrument.memory.resizes import Resizes
from memopt.instrument.script.training_thread import TrainingThread
from memopt.instrument.torch_internals import ask_for_module_hooks, module_hook_tables
from memopt.instrument.traced import keep_out_of_compiler, unless_compiling


class Frame:
    """One module call: its name, and how many packs it has run itself, and how many ops by their overloads' names."""

    __slots__ = ("diverged", "key", "ops", "packs")

    def __init__(self, key: str) -> None:
        self.key = key
        self.ops: dict[str, int] = {}
        self.packs = 0
        self.diverged = False

    def next_op(self, name: str) -> int:
        """How many ops of this name came before. One more of another name, in some steps only, shifts nothing."""
        count = self.ops.get(name, 0)
        self.ops[name] = count + 1
        return count


@dataclass(frozen=True, slots=True)
class _Place:
    root: weakref.ref[nn.Module]
    path: str
    """Below it: `.blocks.0`, empty for itself."""


class _Names:
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
        self._roots = {False: _Names(), True: _Names()}
        """Names of outermost modules in this iteration, without and with gradients."""
        self._labels = _Names()
        """For people: of the whole run, in the same order."""
        self._calls: dict[str, int] = {}
        self._entered: list[str] = []
        """Of the outermost call, and of those inside it."""
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
        self._handles = [
            module_hooks.register_module_forward_pre_hook(unless_compiling(self._enter)),
            module_hooks.register_module_forward_hook(unless_compiling(self._leave), always_call=True),
        ]
        self._count_hooks = ask_for_module_hooks(self._has_hooks_of_others)
        self.regions.install()
        self.resizes.install()
        keep_out_of_compiler()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
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
        self._roots = {False: _Names(), True: _Names()}
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
        if self.paused or not self.thread.is_here:
            return
        name = self._name_of(module) + ("#" if torch.is_grad_enabled() else "~")
        if not self._stack:
            self._entered.clear()
        self._entered.append(name)
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        frame = Frame(f"{name}{call}")
        self._stack.append(frame)
        self.current = frame

    def _take_back(self) -> None:
        """An exception has ended the outermost call: it does not count, for whoever catches it tries again with the next batch."""
        for name in self._entered:
            if self._calls.get(name):
                self._calls[name] -= 1

    def _name_of(self, module: nn.Module) -> str:
        place = self._places.get(module)
        root = place.root() if place is not None else None
        if place is None or root is None:
            if self._stack:
                return f"{self._stack[-1].key.rstrip('0123456789')[:-1]}.<{type(module).__name__}>"
            place, root = self._put(module), module
        return self._roots[torch.is_grad_enabled()].of(root) + place.path

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
        elif "~" not in frame.key:
            self._outside = Frame(f"@{frame.key}")
        self.current = self._outside
