"""Digests of what a training loop computes, one line an iteration: losses, gradients, parameters and buffers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from memopt.instrument.script.on_import import call_after_import
from memopt.instrument.script.runner import stop_script

if TYPE_CHECKING:
    import torch

_PIECE_BYTES = 16 << 20
"""Bytes that are hashed at once: numpy is lent a copy of them."""


class Digests:
    """A listener that writes digests of what the loop computes, and stops it after some iterations."""

    def __init__(self, out: Path, steps: int) -> None:
        self._file = out.open("w")
        self._steps = steps
        self._losses: dict[str, str] = {}
        self._values: dict[str, float] = {}
        """Of losses that are one number."""
        self._gradients: dict[str, str] = {}
        self._step = 0
        self._pid = os.getpid()
        self.gradient_of: Callable[[torch.Tensor], torch.Tensor | None] | None = None
        """How a gradient is found that may be in a tier; none: where torch has it."""

    def install(self, optimizers: int) -> None:
        """Divide the run as the enforced one is divided, whose plan knows how many `optimizers` step in the first round."""

        def watch() -> None:
            from memopt.instrument.iterations import Iterations

            Iterations(self, optimizers=optimizers).install()

        call_after_import("torch", watch)

    def iteration_ended(self, count: int, milliseconds: float) -> None:
        if os.getpid() != self._pid:
            return
        line = {
            "losses": self._losses,
            "values": self._values,
            "gradients": self._gradients or _gradients(),
            "parameters and buffers": _state(),
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._losses, self._values, self._gradients, self._step = {}, {}, {}, 0
        if count >= self._steps:
            stop_script()

    def backward_begins(
        self, roots: tuple[torch.Tensor, ...], *, keep_graph: bool, create_graph: bool
    ) -> None:
        from memopt.instrument.torch_internals import is_functorch_wrapped

        for root in roots:
            if not is_functorch_wrapped(root):  # has no bytes of its own, and torch.func is left alone
                name = f"loss {len(self._losses)}"
                self._losses[name] = digest(root)
                self._values |= _number(name, root)

    def backward_ended(self) -> None:
        return None

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.gradient_is_whole(optimizer, parameter)
        self._step += 1

    def gradient_is_whole(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        from memopt.instrument.stepping.gradient_reads import kept_gradient

        gradient = (self.gradient_of or kept_gradient)(parameter)
        if gradient is None:
            return
        position = 0
        for group in optimizer.param_groups:
            for each in group["params"]:
                if each is parameter:
                    name = f"{type(optimizer).__name__} step {self._step} parameter {position}"
                    self._gradients[name] = digest(gradient)
                position += 1

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        return None

    def thread_changed(self) -> None:
        return None


def _modules() -> list[tuple[str, torch.nn.Module]]:
    import gc

    import torch

    from memopt.instrument.live_objects import living

    gc.collect()  # a module that nobody holds (what was scripted or traced, say) lives until then, in one run longer than in another
    (found,) = living(torch.nn.Module)
    children = {id(child) for module in found for child in module._modules.values() if child is not None}
    roots = [module for module in found if id(module) not in children]
    return [(f"{type(module).__name__}.{number}", module) for number, module in enumerate(roots)]


def _state() -> dict[str, str]:
    """Digests of every parameter and buffer of the modules that live, but of lazy ones, which have no shape yet."""
    from torch.nn.parameter import is_lazy

    found = {}
    for top, module in _modules():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if not is_lazy(tensor):
                found[f"{top}.{name}"] = digest(tensor)
    return _by_content(found)


def _gradients() -> dict[str, str]:
    from memopt.instrument.stepping.gradient_reads import kept_gradient

    found = {}
    for top, module in _modules():
        for name, parameter in module.named_parameters():
            gradient = kept_gradient(parameter)
            if gradient is not None:
                found[f"{top}.{name}"] = digest(gradient)
    return _by_content(found)


def _by_content(found: dict[str, str]) -> dict[str, str]:
    """The order in which the garbage collector lists modules may differ between processes; the names below them do not."""
    counts: dict[str, int] = {}
    named = {}
    for name, content in sorted(found.items(), key=lambda item: (_short(item[0]), item[1])):
        short = _short(name)
        counts[short] = counts.get(short, 0) + 1
        named[f"{short} ({counts[short]})" if counts[short] > 1 else short] = content
    return named


def _number(name: str, tensor: torch.Tensor) -> dict[str, float]:
    """The value of `tensor` by `name`, if it is one number."""
    import torch

    from memopt.instrument.torch_internals import disable_current_modes, is_wrapper

    if is_wrapper(tensor) or tensor.numel() != 1 or tensor.is_complex():
        return {}
    with torch.no_grad(), disable_current_modes():
        return {name: float(tensor.detach())}


def _short(name: str) -> str:
    top, _, rest = name.partition(".")
    return f"{top}.{rest.partition('.')[2]}"


def digest(tensor: torch.Tensor) -> str:
    """Digest of shape, dtype and every bit of `tensor`; one on the meta device has none."""
    import torch

    from memopt.instrument.torch_internals import disable_current_modes, is_wrapper

    if is_wrapper(tensor):  # DTensor: this process's part of it
        parts, _ = tensor.__tensor_flatten__()
        found = [getattr(tensor, part) for part in parts]
        return " ".join(digest(part) for part in found if isinstance(part, torch.Tensor))
    with torch.no_grad(), disable_current_modes():
        plain = tensor.detach()
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        if type(plain) is not torch.Tensor:
            plain = plain.as_subclass(torch.Tensor)
        if plain.is_meta:
            plain = plain.new_empty(0, device="cpu")
        plain.data_ptr()  # a weight that is away comes back for whoever asks for its address: no mode would see the ops here
        whole = plain.resolve_conj().resolve_neg().contiguous().cpu()
        found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
        pieces = whole.reshape(-1).view(torch.uint8).split(_PIECE_BYTES) if whole.numel() else ()
        for piece in pieces:
            # numpy is lent a copy: a storage that it was lent itself can never be resized again
            found.update(piece.clone().numpy())
    return found.hexdigest()
