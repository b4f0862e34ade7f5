"""All that memopt uses of torch's private parts, by name, with what it is for. No other file spells a private name of torch's,
but for what a pretended GPU needs (`estimators/fake/torch_internals.py`, built with the same two functions).

A torch release may lose any of them. A name that is lost stands for a `Gone` here, which raises where it is used; whoever begins
something calls `require` first, so that a feature is off as a whole and says so, and the script runs as it does under `python`.
`docs/torch-internals.md` is written from this file.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn.modules import module as _modules

from memopt.errors import NotPossibleHere

WATCH = "profile, apply and run"
"""Features: what does not work without the name."""
ON_GPU = "profile, apply and run on a GPU"
COMPILED = "plans for what torch.compile has compiled"
EDGES = "the times of small ops on a GPU, and the allocator's snapshot of a run that died"


@dataclass(frozen=True, slots=True)
class Name:
    """A private name of torch's."""

    spelling: str
    feature: str
    purpose: str
    found: bool | None
    """None: of a part that torch imports late, and that is not looked for before it is used."""

    @property
    def there(self) -> bool:
        return self.found if self.found is not None else not isinstance(resolve(self), Gone)


class Gone:
    """Stands for a name that this torch does not have: whatever is done with it raises."""

    def __init__(self, spelling: str, feature: str) -> None:
        self.__dict__.update(spelling=spelling, feature=feature)

    def _raise(self) -> NoReturn:
        raise _gone(self.__dict__["feature"], [self.__dict__["spelling"]])

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._raise()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Gone(f"{self.__dict__['spelling']}.{name}", self.__dict__["feature"])

    def __enter__(self) -> NoReturn:
        self._raise()

    def __exit__(self, *error: object) -> None: ...

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        def refuse(made: Any, *args: Any, **kwargs: Any) -> NoReturn:
            self._raise()

        return (type("Gone", (), {"__init__": refuse}),)


def find(names: list[Name], spelling: str, feature: str, purpose: str, *, here: bool = True) -> Any:
    """What `spelling` is in this torch, or a `Gone`, noted in `names`; `here` is false where this build needs none of it."""
    found = resolve(Name(spelling, feature, purpose, None))
    names.append(Name(spelling, feature, purpose, not here or not isinstance(found, Gone)))
    return found


def find_later(names: list[Name], spelling: str, feature: str, purpose: str) -> Callable[[], Any]:
    """The same, looked for whenever what is given back is called: its module is one that `import torch` leaves out."""
    name = Name(spelling, feature, purpose, None)
    names.append(name)
    return lambda: resolve(name)


def resolve(name: Name) -> Any:
    """What the name is in this torch, or a `Gone`."""
    try:
        return pkgutil.resolve_name(name.spelling)
    except (ImportError, AttributeError):
        return Gone(name.spelling, name.feature)


class Place:
    """A private function of torch's that another can take the place of, of a part that `import torch` may leave out."""

    def __init__(self, names: list[Name], spelling: str, feature: str, purpose: str) -> None:
        self._name = Name(spelling, feature, purpose, None)
        names.append(self._name)

    def get(self) -> Any:
        """What is there now, or a `Gone`."""
        return resolve(self._name)

    def put(self, function: Any) -> None:
        owner, _, name = self._name.spelling.rpartition(".")
        setattr(pkgutil.resolve_name(owner), name, function)


def lost(names: list[Name], *features: str) -> list[str]:
    """Spellings that `import torch` has shown to be lost, of `features`; of all, where none is given."""
    return [n.spelling for n in names if n.found is False and (not features or n.feature in features)]


def require(*features: str, names: list[Name] | None = None) -> None:
    """Raises `NotPossibleHere` where this torch has lost what one of `features` needs."""
    spellings = lost(NAMES if names is None else names, *features)
    if spellings:
        raise _gone(features[0], spellings)


def _gone(feature: str, spellings: list[str]) -> NotPossibleHere:
    return NotPossibleHere(
        f"off with torch {torch.__version__}: {feature}",
        why=f"memopt needs what this torch does not have: {', '.join(spellings)}",
        try_="a newer memopt, or torch 2.13",
    )


STAND_INS = "torch._subclasses."
"""Modules whose tensors stand for others while a compiler traces."""

NAMES: list[Name] = []


def _watch(spelling: str, purpose: str) -> Any:
    return find(NAMES, spelling, WATCH, purpose)


_cuda = torch.backends.cuda.is_built()

if TYPE_CHECKING:  # what annotations name, and what is inherited from
    from torch._ops import OpOverload as OpOverload
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    is_wrapper = is_traceable_wrapper_subclass
else:
    OpOverload = _watch("torch._ops.OpOverload", "the type of what a dispatch mode is handed")
    TorchDispatchMode = _watch("torch.utils._python_dispatch.TorchDispatchMode", "sees every op")
    is_wrapper = _watch(
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
        "a tensor made of tensors (DTensor) is compared by its parts",
    )

# --- dispatch: what is on, and memopt's own ops past all of it
_D = "torch.utils._python_dispatch."
disable_current_modes = _watch(_D + "_disable_current_modes", "ops of memopt's that no mode sees")
current_mode = _watch(_D + "_get_current_dispatch_mode", "the innermost mode of the script's or ours")
current_modes = _watch(_D + "_get_current_dispatch_mode_stack", "all of them, to put ours below the script's")
pop_mode_temporarily = _watch(
    _D + "_pop_mode_temporarily", "puts the script's modes aside while ours goes in"
)
push_mode = _watch(_D + "_push_mode", "enters a mode of memopt's in this thread alone")
pop_mode = _watch(_D + "_pop_mode", "ends it")
push_function_mode = _watch(
    "torch._C._push_on_torch_function_stack",
    "sees what Python code calls in backward, and autograd's own ops not",
)
pop_function_mode = _watch("torch._C._pop_torch_function_stack", "ends it")
function_modes = _watch(
    "torch._C._len_torch_function_stack", "are there such modes, of the script's or ours?"
)
function_mode_at = _watch("torch._C._get_function_stack_at", "which is the innermost?")
set_compiler = _watch(
    "torch._C._dynamo.eval_frame.set_eval_frame", "torch.compile compiles nothing of memopt's modes"
)
DisableTorchDispatch = _watch(
    "torch._C._DisableTorchDispatch", "ops of memopt's that no mode sees, at less cost"
)
DisableTorchFunction = _watch(
    "torch._C.DisableTorchFunction",
    "looks at a tensor without running the script's own code, of a subclass or of a mode",
)
DisableAutocast = _watch("torch._C._DisableAutocast", "a replayed op has its casts behind it")
BelowAutograd = _watch("torch._C._AutoDispatchBelowAutograd", "a replay records no graph")
DispatchKey = _watch("torch._C.DispatchKey", "the layers of the dispatcher that the next two switch")
exclude_key = _watch(
    "torch._C._dispatch_tls_set_dispatch_key_excluded", "resolves conjugate views inside a mode, as outside"
)
ExcludeKey = _watch(
    "torch._C._SetExcludeDispatchKeyGuard", "autocast, and version counters, inside a mode as outside"
)
RestoreThreadState = _watch(
    "torch._C._RestorePythonTLSSnapshot", "asks whether autocast is on outside of the mode"
)
is_functorch_wrapped = _watch(
    "torch._C._functorch.is_functorch_wrapped_tensor", "tensors of vmap and grad are not looked into"
)

# --- settings of the process that kernels read beside their arguments
_SETTING = "a replayed op runs under the settings that it ran under in forward"


def _setting(name: str) -> tuple[Any, Any]:
    """How a setting is read, and written."""
    return _watch(f"torch._C._get_{name}", _SETTING), _watch(f"torch._C._set_{name}", _SETTING)


KERNEL_SETTINGS = [_setting("mkldnn_enabled"), _setting("mkldnn_deterministic")]
CUDA_SETTINGS = [
    _setting("cudnn_enabled"),
    _setting("cudnn_benchmark"),
    _setting("cudnn_deterministic"),
    _setting("cudnn_allow_tf32"),
]
set_deterministic = _watch("torch._C._set_deterministic_algorithms", _SETTING)
get_fp32_precision = _watch("torch._C._get_fp32_precision_getter", _SETTING)
set_fp32_precision = _watch("torch._C._set_fp32_precision_setter", _SETTING)

# --- arguments as trees
tree_flatten = _watch(
    "torch.utils._pytree.tree_flatten", "the tensors among a compiled function's arguments, and their places"
)
tree_node = _watch(
    "torch.utils._pytree.register_pytree_node",
    "what a `state_dict()` hands out is a dict there, as it is elsewhere",
)
tree_unflatten = _watch("torch.utils._pytree.tree_unflatten", "its arguments again, and its results")
tree_iter = _watch("torch.utils._pytree.tree_iter", "the tensors among an op's arguments")
tree_leaves = _watch("torch.utils._pytree.tree_leaves", "the same as a list")
tree_map_only = _watch("torch.utils._pytree.tree_map_only", "an op's arguments with other tensors")

# --- tensors and storages
TensorBase = _watch("torch._C.TensorBase", "properties of a tensor (`grad`, `device`) as torch has them")
storage_of = _watch(
    "torch._C.TensorBase.untyped_storage", "a tensor's bytes, asked for past what tells of whoever reads them"
)
storage_use_count = _watch("torch._C._storage_Use_Count", "is anybody else holding these bytes?")
conjugated = _watch("torch._conj", "a saved conjugate view is made again")
negated = _watch("torch._neg_view", "a saved negative view is made again")

# --- autograd
_A = "torch._C._autograd."
push_saved_hooks = _watch(_A + "_push_saved_tensors_default_hooks", "sees and replaces what autograd saves")
pop_saved_hooks = _watch(_A + "_pop_saved_tensors_default_hooks", "ends that")
saved_hooks_allowed = _watch(
    _A + "_saved_tensors_hooks_is_enabled", "tells whether torch.func forbids hooks here"
)
top_saved_hooks = _watch(
    _A + "_top_saved_tensors_default_hooks", "does the script have such hooks of its own?"
)
saved_data = _watch(_A + "SavedTensor.data", "which of a node's slots saved what (from torch 2.10 on)")
sequence_nr = _watch(_A + "_get_sequence_nr", "which node an op of forward has made")
current_node = _watch("torch._C._current_autograd_node", "which node of backward runs now")
autograd_engine = _watch(
    "torch.autograd.Variable._execution_engine", "how are references counted while it works?"
)
save_to_state_dict = _watch(
    "torch.nn.Module._save_to_state_dict", "who detaches weights makes a `state_dict()`, and reads none"
)
jit_traces = _watch("torch._C._is_tracing", "does torch.jit trace what this thread runs?")
TensorType = _watch(
    "torch._C.TensorType", "does an op want a tensor where TorchScript gives a mode a number?"
)
numbers_are_tensors = _watch("torch._C._should_allow_numbers_as_tensors", "does it take a number for one?")
JIT_TRACERS = [
    Place(NAMES, f"torch._C.{name}", WATCH, "runs what torch.jit traces, which has no mode of memopt's on")
    for name in (
        "_create_function_from_trace",
        "_create_function_from_trace_with_dict",
        "_create_graph_by_tracing",
        "ScriptModule._create_method_from_trace",
        "ScriptModule._create_method_from_trace_with_dict",
    )
]
current_graph_task = _watch("torch._C._current_graph_task_id", "is this thread inside backward?")

# --- torch.profiler, for the peaks of a CPU run
RecordFunction = _watch(
    "torch._C._profiler._RecordFunctionFast", "marks between ops in the profiler's events"
)
record_functions = _watch(_A + "_enable_record_function", "the profiler sees marks only, not each op")

# --- CUDA
cuda_memory_stats = find(
    NAMES,
    "torch._C._cuda_memoryStats",
    ON_GPU,
    "allocated bytes and peaks, at a tenth of the public call's cost",
    here=_cuda,
)
cuda_reset_peaks = find(
    NAMES, "torch._C._cuda_resetPeakMemoryStats", ON_GPU, "a peak of each op's own", here=_cuda
)
raw_cuda_stream = find(
    NAMES,
    "torch._C._cuda_getCurrentRawStream",
    ON_GPU,
    "which stream computes, at each saved tensor",
    here=_cuda,
)
cuda_device_index = find(
    NAMES, "torch.cuda._utils._get_device_index", ON_GPU, "which device the script's own question is about"
)
cuda_lazy_call = find(
    NAMES, "torch.cuda._lazy_call", ON_GPU, "`--hold` sets its limit when the script begins to use CUDA"
)
cuda_sleep = find(
    NAMES,
    "torch.cuda._sleep",
    EDGES,
    "keeps the queue full, so that launches are not timed with the ops",
    here=_cuda,
)
dump_snapshot = find(
    NAMES, "torch.cuda.memory._dump_snapshot", EDGES, "the allocator's state when memory ran out", here=_cuda
)

# --- the calls that memopt stands around
_ENGINE = _watch("torch.autograd.graph._engine_run_backward", "where backward begins and ends")


_dual_level = _watch(
    "torch.autograd.forward_ad._current_level", "are there dual tensors? `svdvals` computes more for them"
)
_any_hook = _watch(
    "torch.nn.modules.module._has_any_global_hook", "torch.compile warns of hooks: of others than ours"
)
_HOOKS = tuple(
    _watch(f"torch.nn.modules.module._global_{each}_hooks", "hooks of others for all modules")
    for each in ("forward_pre", "forward", "backward_pre", "backward")
)
_STEP_HOOKS = tuple(
    _watch(f"torch.optim.optimizer._global_optimizer_{each}_hooks", "hooks of others for all optimizers")
    for each in ("pre", "post")
)


def inside_dual_level() -> bool:
    """Is forward-mode differentiation on?"""
    return bool(torch.autograd.forward_ad._current_level >= 0)


def module_hook_tables() -> tuple[dict[int, Any], ...]:
    """Hooks for all modules, by kind: number -> hook."""
    return _HOOKS


def step_hooks() -> list[Any]:
    """Hooks for all optimizers."""
    return [hook for table in _STEP_HOOKS for hook in table.values()]


def ask_for_module_hooks(function: Any) -> Any:
    """Let `function` say whether there are hooks for all modules; what has said it before."""
    before, _modules._has_any_global_hook = _modules._has_any_global_hook, function
    return before


def engine_run_backward() -> Any:
    """What runs backward now."""
    return torch.autograd.graph._engine_run_backward


def set_engine_run_backward(function: Any) -> None:
    """Let `function` run backward; `torch.autograd` has the name a second time."""
    for module in (torch.autograd.graph, torch.autograd):
        module._engine_run_backward = function  # type: ignore[attr-defined]


# --- torch.compile
OUTPUT_GRAPH, TRACE_RULES = "torch._dynamo.output_graph", "torch._dynamo.trace_rules"
"""Modules that are waited for."""
call_compiler = Place(
    NAMES,
    f"{OUTPUT_GRAPH}.OutputGraph._call_user_compiler",
    COMPILED,
    "hands over a compiled region, of which no mode sees the ops",
)
skipped_files = find_later(
    NAMES, f"{TRACE_RULES}.FORCE_SKIP_FILES", COMPILED, "files of memopt's that are not compiled"
)
_graph_trees = find_later(
    NAMES,
    "torch._inductor.cudagraph_trees.local",
    COMPILED,
    "do CUDA graphs of torch.compile keep memory of their own?",
)


def graph_trees() -> Any:
    """That, where anything was compiled so far, else None; a `Gone` where it cannot be told. Asked at every saved tensor."""
    module = sys.modules.get("torch._inductor.cudagraph_trees")
    return None if module is None else getattr(module, "local", None) or _graph_trees()
