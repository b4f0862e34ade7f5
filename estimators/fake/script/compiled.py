"""`torch.compile` of a module or function for a run on the CPU: inductor's own plan of buffers, without its kernels.

What is compiled is traced and partitioned by AOTAutograd and scheduled by inductor, as torch.compile does after Dynamo; the program that
comes out is run on fake tensors, so that its buffers come and go as in the real run. C++ kernels are neither compiled nor run.
What differs: it is traced whole, where Dynamo may break it in two; what cannot be traced runs eagerly. On a pretended GPU
inductor needs Triton, and all runs eagerly too.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from memopt.estimators.fake.torch_internals import (
    AsyncCompile,
    assert_alignment,
    assert_size_stride,
    check_build,
    compile_fx,
    empty_strided,
    inductor_config,
    reinterpret,
)
from memopt.estimators.fake.values.lines import is_users
from memopt.instrument.torch_internals import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from memopt.estimators.fake.recorder import FakeRecorder

_HOLE = object()
"""Where a tensor goes."""


class CompiledForward:
    """Calls a module's forward as inductor would run it, each kind of input compiled once."""

    tracing: ClassVar[bool] = False
    """Whether a module is being traced: compiled ones inside it are part of it."""

    def __init__(
        self, recorder: FakeRecorder, module: torch.nn.Module, eager: Callable[..., Any] | None = None
    ) -> None:
        self.recorder, self.module = recorder, module
        self.eager: Callable[..., Any] = eager or module.forward
        self._known: dict[Any, Callable[..., Any]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        made = CompiledForward.__new__(CompiledForward)
        made.recorder, made._known = self.recorder, {}
        made.module, made.eager = copy.deepcopy(self.module, memo), copy.deepcopy(self.eager, memo)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if CompiledForward.tracing:
            return self.eager(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        key = (
            spec, self.module.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
            *((x.shape, x.stride(), x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else repr(x) for x in leaves),
        )  # fmt: skip
        if key not in self._known:
            self._known[key] = self._compiled(leaves, spec)
        return self._known[key](*args, **kwargs)

    def _compiled(self, leaves: list[Any], spec: Any) -> Callable[..., Any]:
        CompiledForward.tracing = True
        try:
            with self.recorder.paused():
                tensors = [self._twin(x) for x in leaves if isinstance(x, torch.Tensor)]
                return _compile(_Flat(self.module, self.eager, leaves, spec), tensors)
        except Exception as error:
            why = (str(error).strip().splitlines() or [""])[0][:120]
            return self._eagerly(f"{type(error).__name__}: {why}")
        finally:
            CompiledForward.tracing = False

    def _eagerly(self, why: str) -> Callable[..., Any]:
        self.recorder.guesser.remark(
            f"torch.compile could not be followed ({why}): what it compiles ran eagerly"
        )
        return self.eager

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """An example of an input: what is traced with keeps its examples."""
        with self.recorder.fake_mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return made.requires_grad_(tensor.requires_grad)


class CompiledFunction(CompiledForward):
    """Calls a function, or a method, likewise. The modules that it reaches beside its arguments are part of the program."""

    def __init__(self, recorder: FakeRecorder, function: Callable[..., Any]) -> None:
        super().__init__(recorder, torch.nn.Module(), function)
        functools.update_wrapper(self, function)

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else functools.partial(self, owner)

    def _compiled(self, leaves: list[Any], spec: Any) -> Callable[..., Any]:
        reached = [
            *_reached(self.eager, set()),
            *_held([x for x in leaves if not isinstance(x, torch.Tensor)]),
        ]
        if _TRAINS in reached:
            return self._eagerly("it trains, or is a library's")
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in reached):
            return self._eagerly("it reads a tensor that requires grad and is not among its arguments")
        self.module = torch.nn.ModuleList(dict.fromkeys(x for x in reached if isinstance(x, torch.nn.Module)))
        return super()._compiled(leaves, spec)


_TRAINS = object()
"""Reached by code that calls backward or an optimizer."""


def _reached(function: Any, seen: set[Any]) -> list[Any]:
    """What the script's own code in `function` names outside itself, and what the functions so named do."""
    code = getattr(function, "__code__", None)
    if code is None or not is_users(code.co_filename):
        return [] if seen else [_TRAINS]  # an optimizer's step, or no function at all
    if code in seen:
        return []
    seen.add(code)
    named = inspect.getclosurevars(function)
    values = [
        *named.nonlocals.values(),
        *named.globals.values(),
        *_held([getattr(function, "__self__", None)]),
    ]
    inner = [x for value in values if inspect.isfunction(value) for x in _reached(value, seen)]
    return [*values, *inner, *([_TRAINS] if {"backward", "step"} & set(code.co_names) else [])]


def _held(values: list[Any]) -> list[Any]:
    """Objects, and what they hold by name."""
    return [each for value in values for each in (value, *getattr(value, "__dict__", {}).values())]


class _Flat(torch.nn.Module):
    """A module that takes and gives tensors only."""

    def __init__(
        self, module: torch.nn.Module, eager: Callable[..., Any], leaves: list[Any], spec: Any
    ) -> None:
        super().__init__()
        self.module = module
        self.given = eager, [_HOLE if isinstance(x, torch.Tensor) else x for x in leaves], spec
        self.made: Any = None

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        eager, rest, spec = self.given
        left = iter(tensors)
        args, kwargs = tree_unflatten([next(left) if x is _HOLE else x for x in rest], spec)
        outputs, self.made = tree_flatten(eager(*args, **kwargs))
        return tuple(outputs)


def _compile(flat: _Flat, tensors: list[torch.Tensor]) -> Callable[..., Any]:
    run: Any
    with inductor_config().patch({"cpp.vec_isa_ok": True, "fx_graph_cache": False, "compile_threads": 1}):
        run = compile_fx()(_graph_of(flat, tensors), tensors)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        return tree_unflatten(list(run(*given)), flat.made)

    return call


def _graph_of(flat: _Flat, tensors: list[torch.Tensor]) -> torch.fx.GraphModule:
    """`flat` as the one call of a graph: of a graph inductor knows which outputs are the script's, whose strides it keeps."""
    count = len(flat(*tensors))
    graph = torch.fx.Graph()
    made = graph.call_module("flat", tuple(graph.placeholder(f"x{n}") for n in range(len(tensors))))
    graph.output(tuple(graph.call_function(operator.getitem, (made, n)) for n in range(count)))
    return torch.fx.GraphModule({"flat": flat}, graph)


def follow() -> None:
    """Make inductor's programs run on fake tensors, for good."""
    async_compile = AsyncCompile()
    check_build.put(lambda isa, code: True)
    async_compile.cpp_pybinding = async_compile.cpp = lambda *args: lambda *pointers: None
    empty_strided.put(lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype))
    reinterpret.put(
        lambda tensor, size, stride, offset=0: tensor.as_strided(
            size, stride, tensor.storage_offset() + offset
        )
    )
    assert_size_stride.put(lambda *args: None)
    assert_alignment.put(lambda *args: None)
