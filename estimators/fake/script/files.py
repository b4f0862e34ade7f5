"""`torch.save` of a script that runs on fake tensors: nothing is written, and what was saved is there again for the script.

Checkpoints are written beside the old one and renamed, copied as the best, looked for, loaded and removed: files that only
`torch.save` would have made exist for these calls alone, by their paths, whatever else lies on the disk.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from typing import Any

import torch

from memopt.estimators.fake.recorder import FakeRecorder
from memopt.estimators.fake.torch_internals import FakeTensor, tree_map

# as something to be patched
_JIT: Any = torch.jit
_OS: Any = os
_SHUTIL: Any = shutil
_TORCH: Any = torch

_FOUND = os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, 0, 0, 1, 0, 0, 0))
"""Of a file that was not written: a regular one of a byte."""


class _Saved:
    """A tensor that `torch.save` would have written: its shape, to be made again by `torch.load`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.sizes, self.dtype = tuple(tensor.shape), tensor.dtype


def _kept(value: Any) -> Any:
    """Of a fake tensor the shape; of a real one, such as an optimizer's step count, the value."""
    if isinstance(value, FakeTensor):
        return _Saved(value)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def install(recorder: FakeRecorder) -> None:
    """Patch torch and what moves, copies and finds files in this process, for good."""
    kept: dict[str, Any] = {}
    _saving(recorder, kept)
    _moving(kept)


def _name_of(file: Any) -> str:
    try:
        return str(os.path.abspath(os.fsdecode(file)))
    except TypeError:
        return f"object {id(file)}"


def _moving(kept: dict[str, Any]) -> None:
    """Renaming, copying, removing and finding files that were kept."""

    def patch(module: Any, name: str, ours: Callable[..., Any]) -> None:
        real = getattr(module, name)

        def chosen(path: Any, *args: Any, **kwargs: Any) -> Any:
            known = _name_of(path) if kept and not kwargs.get("dir_fd") else ""
            return ours(known, path, *args) if known in kept else real(path, *args, **kwargs)

        setattr(module, name, chosen)

    def move(known: str, source: Any, target: Any) -> None:
        kept[_name_of(target)] = kept.pop(known)

    def copy(known: str, source: Any, target: Any, *args: Any) -> Any:
        inside = os.path.join(target, os.path.basename(known)) if os.path.isdir(target) else target
        kept[_name_of(inside)] = kept[known]
        return inside

    def remove(known: str, path: Any) -> None:
        del kept[known]

    for name in ("rename", "replace"):
        patch(_OS, name, move)
    for name in ("remove", "unlink"):
        patch(_OS, name, remove)
    for name in ("copy", "copy2", "copyfile"):
        patch(_SHUTIL, name, copy)
    patch(_OS, "stat", lambda known, path: _FOUND)


def _saving(recorder: FakeRecorder, kept: dict[str, Any]) -> None:
    load = torch.load

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        recorder.guesser.remark("torch.save wrote nothing: a fake run has no weights to keep")
        kept[_name_of(f)] = tree_map(_kept, obj)

    def restore(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        device = _device_named(map_location)
        name = _name_of(f)
        if name in kept:
            return tree_map(lambda x: _again(recorder, x, device), kept[name])
        with recorder.paused(), recorder.fake_mode:
            found = load(f, "cpu", *args, **kwargs)

        def adopt(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                recorder.adopt(x, device)
            return x

        return tree_map(adopt, found)

    _TORCH.save = save
    _TORCH.load = restore
    _JIT.save = lambda m, f, *args, **kwargs: save({}, f)
    try:
        import safetensors.torch as safe
    except ImportError:
        return
    safe.save_file = lambda tensors, filename, metadata=None: save(tensors, filename)


def _device_named(map_location: Any) -> str:
    if isinstance(map_location, (str, torch.device)):
        return torch.device(map_location).type
    return "cpu"


def _again(recorder: FakeRecorder, value: Any, device: str) -> Any:
    if isinstance(value, _Saved):
        return _made(recorder, value, device)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _made(recorder: FakeRecorder, saved: _Saved, device: str) -> torch.Tensor:
    with recorder.paused(), recorder.fake_mode:
        made = torch.empty(saved.sizes, dtype=saved.dtype)
    recorder.adopt(made, device)
    return made
