"""`apply --verify N`: the script plain and enforced, in two processes with the same seeds, compared bit for bit.

Each process writes one line an iteration: digests of the losses, gradients, parameters and buffers. The module is also the
program of those processes: `python -c BOOTSTRAP plan plain|enforced[-deterministic] N out`.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from memopt.enforcers.scratch import copy_folder, moved
from memopt.enforcers.spread import beside_the_spread
from memopt.errors import VerifyFailed
from memopt.instrument.script.command import Command
from memopt.instrument.script.on_import import call_after_import
from memopt.instrument.script.runner import run, stop_script
from memopt.outcome import Outcome
from memopt.plan import Plan, load_plan

if TYPE_CHECKING:
    import torch

_PIECE_BYTES = 16 << 20
_BOOTSTRAP = "import sys; sys.path.insert(0, {root!r}); from memopt.enforcers.verify import child; sys.path.remove({root!r}); child()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Iterations that were the same bit for bit, and what the plan did in them."""

    iterations: int
    exit_code: int
    """Of either run: a script that fails by itself fails twice."""
    outcome: Outcome | None
    """None where the script ended by other means than its end."""


def verify(
    plan_path: Path,
    argv: list[str],
    steps: int,
    swap_dir: Path,
    *,
    deterministic: bool = False,
    in_place: bool = False,
) -> Verified:
    """Compare `steps` iterations, with torch's deterministic algorithms if asked. Raises `VerifyFailed` at the first difference, and where there was nothing to compare.

    Each run has a copy of the present folder, so that it resumes from no checkpoint that another one has left; with `in_place`
    they all run in it.
    """
    mode = "-deterministic" if deterministic else ""
    where = None if in_place else Path.cwd()
    plain, code, _ = _run(f"plain{mode}", plan_path, argv, steps, swap_dir, where, 0)
    enforced, enforced_code, outcome = _run(f"enforced{mode}", plan_path, argv, steps, swap_dir, where, 1)
    if not plain:
        raise VerifyFailed(
            "nothing could be compared",
            why=f"the plain run ended with exit code {code} before an iteration was over",
            try_="the script by itself, with arguments that make it train",
        )
    difference = _difference(plain, enforced)
    if not difference and code != enforced_code:
        difference = f"the plain run ended with exit code {code}, the enforced one with {enforced_code}"
    if not difference:
        if outcome is not None and outcome.actions.planned and not outcome.actions.done:
            raise VerifyFailed(
                "nothing was verified: none of the plan's actions was taken",
                why="; ".join(outcome.notes) or "the script ended before one was due",
                try_="memopt profile and memopt advise again, for the script as it is now",
            )
        return Verified(iterations=len(plain), exit_code=code, outcome=outcome)
    for number, (way, first) in enumerate((("plain", plain), ("enforced", enforced), ("plain", plain)), 2):
        again, _, _ = _run(f"{way}{mode}", plan_path, argv, steps, swap_dir, where, number)
        if _difference(first, again):
            third, _, _ = _run(f"plain{mode}", plan_path, argv, steps, swap_dir, where, 5)
            plains = [plain, third, again] if way == "plain" else [plain, third]
            raise VerifyFailed(
                f"the runs differ, but so do two {way} runs: the script does not repeat by itself",
                why=f"{_difference(first, again)}; {beside_the_spread(enforced, plains)}",
                try_="--deterministic, or fixed seeds in the script",
            )
    raise VerifyFailed(
        "the enforced run differs from the plain one",
        why=difference,
        try_="please report this plan and script: it is a bug",
    )


def _run(
    mode: str,
    plan_path: Path,
    argv: list[str],
    steps: int,
    swap_dir: Path,
    copy_of: Path | None,
    number: int,
) -> tuple[list[dict[str, Any]], int, Outcome | None]:
    """Digests of each iteration, the exit code, and what the plan came to."""
    root = str(Path(__file__).resolve().parent.parent)
    package_root = str(Path(root).parent) if Path(root).name == "memopt" else root
    with tempfile.TemporaryDirectory(prefix="memopt-verify-") as folder:
        out = Path(folder) / "digests.jsonl"
        told = _beside(out)
        words = [str(plan_path.absolute()), mode, str(steps), str(out), str(swap_dir.absolute()), *argv]
        code = _BOOTSTRAP.format(root=package_root)
        work = copy_of
        if copy_of is not None:
            work = Path(folder) / copy_of.name
            copy_folder(copy_of, work)
            words[5:] = [moved(word, copy_of, work) for word in argv]
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            stdout=subprocess.DEVNULL,
            check=False,
            cwd=work,
            env=_apart(os.environ, number),
        )
        lines = out.read_text().splitlines() if out.exists() else []
        outcome = msgspec.json.decode(told.read_bytes(), type=Outcome) if told.exists() else None
    return [json.loads(line) for line in lines], done.returncode, outcome


def _apart(environment: Mapping[str, str], number: int) -> dict[str, str]:
    """The environment of run `number`: under torchrun it meets the same run of the other ranks, at a store of its own."""
    found = dict(environment)
    if "WORLD_SIZE" in found and found.get("MASTER_PORT", "").isdecimal():
        found["MASTER_PORT"] = str(1024 + (int(found["MASTER_PORT"]) - 1023 + number) % (2**16 - 1024))
        found["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    return found


def _beside(digests: Path) -> Path:
    """Where the enforced run writes its outcome."""
    return digests.with_name("outcome.json")


def _difference(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> str:
    for number, (left, right) in enumerate(zip(a, b, strict=False), 1):
        for part in ("losses", "gradients", "parameters and buffers"):
            if left[part] != right[part]:
                names = [name for name in left[part] if left[part][name] != right[part].get(name)]
                return f"iteration {number}: {part} differ, first {names[0] if names else 'in number'}"
    if len(a) != len(b):
        return f"{len(a)} iterations against {len(b)}"
    return ""


def child() -> None:
    """One of the two runs."""
    plan_path, mode, steps, out, swap_dir, *argv = sys.argv[1:]
    plan = load_plan(Path(plan_path))
    digests = _Digests(Path(out), int(steps))
    mode, _, deterministic = mode.partition("-")
    if deterministic:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":16:8"
        )  # cuDNN's recurrent layers repeat themselves with this one only
        call_after_import("torch", _use_deterministic_algorithms)
    if mode == "enforced":
        from memopt.enforcers.session import ApplySession, Options

        session = ApplySession(plan, Options(swap_dir=Path(swap_dir), measure=False), also=digests)
        session.install()
    else:
        session = None
        digests.install(plan.optimizers)
    call_after_import("torch", _seed)
    code = run(command_of(plan, argv))
    outcome = session.finished() if session is not None else None
    if outcome is not None:
        outcome.save(_beside(Path(out)))
    sys.exit(code)


def command_of(plan: Plan, argv: list[str]) -> Command:
    """The command that `plan` was made from, or the same script with other arguments."""
    return Command(tuple(argv or plan.script.argv), plan.script.as_module)


def _use_deterministic_algorithms() -> None:
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


def _seed() -> None:
    import random

    import torch

    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


class _Digests:
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
        from memopt.instrument.stepping.gradient_reads import kept_gradient

        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if kept_gradient(parameter) is not None:
                    self.gradient_is_whole(optimizer, parameter)
        self._step += 1

    def gradient_is_whole(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        from memopt.instrument.stepping.gradient_reads import kept_gradient

        position = 0
        for group in optimizer.param_groups:
            for each in group["params"]:
                if each is parameter:
                    gradient = kept_gradient(parameter)
                    assert gradient is not None
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
    """Digests of every parameter and buffer of the modules that live."""
    found = {}
    for top, module in _modules():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
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
    """Digest of shape, dtype and every bit of `tensor`."""
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
        plain.data_ptr()  # a weight that is away comes back for whoever asks for its address: no mode would see the ops here
        whole = plain.resolve_conj().resolve_neg().contiguous().cpu()
        found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
        pieces = whole.reshape(-1).view(torch.uint8).split(_PIECE_BYTES) if whole.numel() else ()
        for piece in pieces:
            # numpy is lent a copy: a storage that it was lent itself can never be resized again
            found.update(piece.clone().numpy())
    return found.hexdigest()
