"""Where in the script an op runs: module path, phase, and which storages are parameters, gradients and optimizer state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from memopt.estimators.fake.values.lines import user_line
from memopt.instrument.stepping.gradient_check import checks_gradients
from memopt.instrument.torch_internals import (
    current_node,
    engine_run_backward,
    sequence_nr,
    set_engine_run_backward,
)

if TYPE_CHECKING:
    from memopt.estimators.fake.asked import Recorder


# torch as something to be patched
_AUTOGRAD: Any = torch.autograd
_MODULE: Any = torch.nn.Module


class Watch:
    """Follows modules, backward passes and optimizer steps of one recording."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.paths: list[str] = []
        self.names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self.leaves: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self.steps: dict[int, int] = {}
        """Steps by optimizer, in the order in which they stepped first."""
        self.node_paths: dict[int, str] = {}
        self.backwards = 0
        self.thread = get_ident()
        """The one that is recorded."""
        self.aside: dict[str, None] = {}
        """Lines of modules' calls in other threads."""
        self.on_step: Callable[[], None] = lambda: None
        self.on_backward: Callable[[], None] = lambda: None
        self._in_backward = 0
        self._in_step = 0

    @property
    def in_backward(self) -> bool:
        """Whether autograd runs, recomputed forwards included."""
        return self._in_backward > 0

    def path(self) -> str:
        """The module that the op being run belongs to; in backward, the one whose forward made the node."""
        if self._in_backward and not self.paths:
            node = current_node()
            return self.node_paths.get(node._sequence_nr(), "") if node is not None else ""
        if self.paths and torch.is_grad_enabled():
            self.node_paths.setdefault(sequence_nr() - 1, self.paths[-1])
        return self.paths[-1] if self.paths else ""

    def _rephase(self) -> None:
        if self.paths:
            phase = "forward" if not self._in_backward else "backward"
        else:
            phase = "backward" if self._in_backward else "optimizer" if self._in_step else "forward"
        self.recorder.phase = phase

    def enter(self, module: torch.nn.Module) -> None:
        name = self.names.get(module)
        if name is None:
            root = type(module).__name__ if not self.paths else f"{self.paths[-1]}.{type(module).__name__}"
            for path, each in module.named_modules():
                self.names.setdefault(each, f"{root}.{path}" if path else root)
            name = self.names[module]
            self.mark_module(module)
        self.paths.append(name)
        self._rephase()

    def leave(self) -> None:
        self.paths.pop()
        self._rephase()

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Inside, another thread may be the one that is recorded."""
        thread, paths = self.thread, self.paths
        self.paths = []
        self._rephase()
        try:
            yield
        finally:
            self.thread, self.paths = thread, paths
            self._rephase()

    def mark_module(self, module: torch.nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self.recorder.mark(parameter, "parameter", name)
            self.leaves[id(parameter)] = parameter
        for name, buffer in module.named_buffers():
            self.recorder.mark(buffer, "buffer", name)

    def backward_begins(self) -> None:
        if not self._in_backward:
            self.recorder.marks.append(("backward", len(self.recorder.events)))
        self._in_backward += 1
        self._rephase()

    def backward_ends(self) -> None:
        self._in_backward -= 1
        if not self._in_backward:
            self.node_paths.clear()
            self.mark_gradients()
            self.backwards += not checks_gradients()
        self._rephase()

    def mark_gradients(self) -> None:
        for leaf in list(self.leaves.values()):
            if leaf.grad is not None:
                self.recorder.mark(leaf.grad, "gradient")

    def step_begins(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.leaves.setdefault(id(parameter), parameter)
                for row in self.recorder.rows_of(parameter):
                    row.category = row.category or "parameter"
        self.mark_gradients()
        self._in_step += 1
        self._rephase()

    def step_ends(self, optimizer: Any) -> None:
        self._in_step -= 1
        self._rephase()
        self.mark_state(optimizer.state.values())
        self.steps[id(optimizer)] = self.steps.get(id(optimizer), 0) + 1
        self.recorder.marks.append(("step", len(self.recorder.events)))
        self.on_step()

    def mark_state(self, values: Any) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                for row in self.recorder.rows_of(value):
                    if row.category not in ("parameter", "gradient"):
                        row.category = "optimizer state"
            elif isinstance(value, dict):
                self.mark_state(value.values())
            elif isinstance(value, (list, tuple)):
                self.mark_state(value)


@contextmanager
def watching(recorder: Recorder) -> Iterator[Watch]:
    """Follow modules, backward passes and optimizers while `recorder` records; put everything back after."""
    watch = Watch(recorder)
    recorder.watch = watch
    recorder.where = watch.path
    call, engine = _MODULE.__call__, engine_run_backward()

    def module_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if get_ident() != watch.thread:
            watch.aside[user_line()] = None
            return call(module, *args, **kwargs)
        watch.enter(module)
        try:
            return call(module, *args, **kwargs)
        finally:
            watch.leave()

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        watch.backward_begins()
        try:
            result = engine(*args, **kwargs)
        finally:
            watch.backward_ends()
        watch.on_backward()
        return result

    before = register_optimizer_step_pre_hook(lambda optimizer, *_: watch.step_begins(optimizer))
    after = register_optimizer_step_post_hook(lambda optimizer, *_: watch.step_ends(optimizer))
    _MODULE.__call__ = module_call
    set_engine_run_backward(run_backward)
    try:
        yield watch
    finally:
        _MODULE.__call__ = call
        set_engine_run_backward(engine)
        before.remove()
        after.remove()
