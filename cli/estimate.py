"""`memopt estimate`: the peak memory of a training run before anything is run, from a script, an ONNX file or a profile."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memopt.cli.requests import EstimateRequest
from memopt.cli.shared.device_name import DeviceName
from memopt.cli.shared.numbers import Real
from memopt.cli.shared.typed_again import typed_again
from memopt.errors import GateFailed, UsageError

if TYPE_CHECKING:
    from memopt.estimators.estimate import Estimate


class _Command(click.Command):
    """What follows a script is the script's own; what follows an ONNX file or a profile is ours."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.allow_interspersed_args = self._names_a_file(args)
        return super().parse_args(ctx, args)

    def _names_a_file(self, words: list[str]) -> bool:
        """Whether the target is a file; what follows a flag that takes a value is that value."""
        takes = {name for param in self.params if not getattr(param, "is_flag", True) for name in param.opts}
        rest = iter(words)
        for word in rest:
            if word == "-m":
                return False
            if word in takes:
                next(rest, None)
            elif not word.startswith("-"):
                return _kind(word, False) != "script"
        return False


@click.command(cls=_Command, context_settings={"allow_interspersed_args": False})
@click.option("--device", type=DeviceName(), default=None, metavar="NAME", help="The device to estimate for, such as a100-40gb or rtx-4090; cpu: a run on this machine.  [default: a100-80gb]")  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), default=None, metavar="N", help="Training steps to follow; of a script also what comes after them, while that is quick.  [default: 3]")  # fmt: skip
@click.option("--timeout", type=Real(min=1), default=600, show_default=True, metavar="SECONDS", help="Give a script up after so long.")  # fmt: skip
@click.option("--alloc-conf", default="", metavar="SETTINGS", help="Allocator settings, as PYTORCH_ALLOC_CONF takes them.")  # fmt: skip
@click.option("--fail-over", metavar="BYTES", default=None, help="Exit with 3 when the process may need more than this.")  # fmt: skip
@click.option("--max-batch", is_flag=True, help="Find the largest batch that fits the device.")
@click.option("--batch-arg", metavar="FLAG", default=None, help="The script's own flag that sets the batch size, for --max-batch and profiles (--batch-arg=--batch-size).")  # fmt: skip
@click.option("--method", type=click.Choice(["auto", "retrace", "scale"]), default="auto", help="Run the profile's script on fake tensors, or scale what was recorded.  [default: the first, if it works]  (profile)")  # fmt: skip
@click.option("--calibration", type=click.Path(path_type=Path), default=None, metavar="FILE", help="What memopt calibrate measured on such a GPU.  [default: MEMOPT_CALIBRATION, or memopt/calibration.json in the configuration folder]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--explain", is_flag=True, help="Show modules, policies and every assumption.")
@click.option("-m", "as_module", is_flag=True, help="TARGET is a module's name, as in python -m.")
@click.option("--batch-size", type=click.IntRange(min=1), default=None, help="Batch size. (ONNX, profile)")
@click.option("--dim", "dims", multiple=True, metavar="NAME=N", help="A free dimension of the model. (ONNX)")
@click.option("--optimizer", default="adamw", show_default=True, help="What would train the model. (ONNX)")
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "amp-bf16", "amp-fp16"]), default="fp32", show_default=True, help="Precision of training. (ONNX)")  # fmt: skip
@click.option("--loss", default=None, help="What is minimised. (ONNX)")
@click.option("--faithful", is_flag=True, help="Match nothing back to fused operators. (ONNX)")
@click.option("--assume-bn/--no-assume-bn", default=None, help="Put batch norms back where the exporter folded them.  [default: where that is seen]  (ONNX)")  # fmt: skip
@click.argument("target")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def estimate(**options: Any) -> int:
    """Tell the peak memory of training TARGET: a script with its arguments, a model.onnx, or a recorded profile.

    A script is run on fake tensors: nothing is computed, no memory is taken, nothing is saved.
    """
    from memopt.units import parse_budget

    request = _as_typed(EstimateRequest(**options))
    gate = parse_budget(request.fail_over, option="--fail-over") if request.fail_over else None
    found = _estimate(request)
    if request.as_json:
        click.echo(_encoded(found.as_json()))
    else:
        from memopt.cli.shared.console import out
        from memopt.reports.estimate import print_estimate

        print_estimate(out(), found, request.target, explain=request.explain)
    if gate is not None:
        _gate(found, gate, request)
    return 0


def _as_typed(request: EstimateRequest) -> EstimateRequest:
    """With the script as target, where a whole command was typed."""
    if _kind(request.target, request.as_module) != "script":
        return request
    from memopt.cli.shared.as_typed import command_as_typed

    command = command_as_typed((request.target, *request.args), as_module=request.as_module)
    return replace(request, target=command.argv[0], args=command.argv[1:], as_module=command.as_module)


def _estimate(request: EstimateRequest) -> Estimate:
    target, kind = request.target, _kind(request.target, request.as_module)
    _refuse_unread(kind, target)
    if kind == "script":
        return _script(request)
    if request.args:
        raise UsageError(
            f"'{request.args[0]}' is not understood",
            why="an ONNX file or a profile takes no arguments",
            try_="memopt estimate --help",
        )
    if not Path(target).is_file():
        raise UsageError(
            f"there is no file {target}", try_="the path of a script, an ONNX model or a profile"
        )
    if kind == "onnx":
        return _onnx(Path(target), request)
    if kind == "profile":
        return _profile(Path(target), request)
    raise UsageError(
        f"cannot estimate from {target}",
        why="it is neither a script nor an ONNX model nor a profile",
        try_="the script that trains these weights; of a memory snapshot of PyTorch's, memopt profile --from-snapshot FILE makes a profile",
    )


def _kind(target: str, as_module: bool) -> str:
    """`script`, `onnx`, `profile` or `other`, by name; Python files and anything unknown are scripts."""
    name = Path(target).name.lower()
    if as_module or name.endswith(".py"):
        return "script"
    if name.endswith(".onnx"):
        return "onnx"
    if ".profile" in name or name.endswith((".json", ".json.gz")):
        return "profile"
    return "other" if Path(name).suffix in _NO_SCRIPTS else "script"


_NO_SCRIPTS = {".bin", ".ckpt", ".gguf", ".npy", ".npz", ".pb", ".pickle", ".pkl", ".pt", ".pt2", ".pth", ".safetensors"}  # fmt: skip
_READ_FOR = {
    **dict.fromkeys(("dims", "optimizer", "dtype", "loss", "faithful", "assume_bn"), ("onnx",)),
    "batch_size": ("onnx", "profile"),
    "batch_arg": ("script", "profile"),
    "timeout": ("script", "profile"),
    "method": ("profile",),
}
"""Options that only some kinds of target have a use for."""
_WORDS = {"script": "a script", "onnx": "an ONNX model", "profile": "a profile"}


def _refuse_unread(kind: str, target: str) -> None:
    """Raise for an option that was typed and would change nothing."""
    ctx = click.get_current_context()
    for param in ctx.command.params:
        name = param.name or ""
        read_for = _READ_FOR.get(name, (kind,))
        typed = ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if typed and kind in _WORDS and kind not in read_for:
            flag = param.opts[0]
            raise UsageError(
                f"{flag} changes nothing for {_WORDS[kind]}",
                why=f"it is read for {' or '.join(_WORDS[each] for each in read_for)}",
                try_=f"memopt estimate {target} with the script's own arguments behind it"
                if kind == "script"
                else f"memopt estimate {target} without {flag}",
            )


def _script(request: EstimateRequest) -> Estimate:
    from memopt.cli.shared.console import progress
    from memopt.estimators.estimate import DEFAULT_DEVICE, estimate_script

    def once(words: list[str]) -> Estimate:
        return estimate_script(
            words,
            device=request.device or DEFAULT_DEVICE,
            as_module=request.as_module,
            alloc_conf=request.alloc_conf,
            steps=request.steps,
            further=True,
            timeout_s=request.timeout,
            calibration=request.calibration,
        )

    argv = [request.target, *request.args]
    _say_strays(argv)
    if request.max_batch:
        return _largest(once, argv, request.batch_arg)
    with progress(f"following {argv[0]} on fake tensors"):
        return once(argv)


def _say_strays(argv: list[str]) -> None:
    """An option of ours behind a script that does not know its name was hardly meant for the script."""
    from memopt.cli.shared.console import say

    own = {name for param in estimate.params for name in param.opts if name.startswith("--")}
    given = [word.partition("=")[0] for word in argv[1:]]
    source = _text_of(argv[0]).replace("-", "_")
    if not own.intersection(given) or not source:
        return
    for name in own.intersection(given):
        if name.strip("-").replace("-", "_") not in source:
            say(f"{name} went to {argv[0]}, which does not name it; options of memopt come before the script")


def _text_of(script: str) -> str:
    """Empty where it is no file: a module's name."""
    return Path(script).read_text(encoding="utf-8", errors="replace") if Path(script).is_file() else ""


def _largest(once: Callable[[list[str]], Estimate], argv: list[str], flag: str | None) -> Estimate:
    from memopt.cli.shared.console import say
    from memopt.estimators.batch_search import largest_batch
    from memopt.estimators.elsewhere.batch import batch_arguments, batch_flag

    seen = batch_arguments(argv)
    if not flag and len(seen) != 1:
        raise UsageError(
            "--max-batch needs to know how the script takes its batch size",
            why="its arguments name "
            + (", ".join(each.flag for each in seen) if seen else "no batch size")
            + ": --batch-arg tells the flag",
            try_=typed_again(batch_arg=seen[0].flag if seen else batch_flag(_text_of(argv[0]))),
        )

    def words(size: int) -> list[str]:
        return _with_flag(argv, flag, size) if flag else seen[0].set(argv, size)

    batch, found = largest_batch(lambda size: once(words(size)), say, instead=_without_search)
    say(f"the largest batch that fits is {batch}")
    return found


def _with_flag(argv: list[str], flag: str, size: int) -> list[str]:
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        if word == flag:
            next(words, None)
        elif not word.startswith(f"{flag}="):
            kept.append(word)
    return [*kept, flag, str(size)]


def _onnx(path: Path, request: EstimateRequest) -> Estimate:
    from memopt.estimators.estimate import DEFAULT_DEVICE
    from memopt.estimators.fake.script.request import STEPS
    from memopt.estimators.onnx.estimate import estimate_onnx

    def once(batch: int | None) -> Estimate:
        return estimate_onnx(
            path,
            batch_size=batch,
            dims=_dims(request.dims),
            optimizer=request.optimizer,
            dtype=request.dtype,
            loss=request.loss,
            device=request.device or DEFAULT_DEVICE,
            faithful=request.faithful,
            assume_bn=request.assume_bn,
            alloc_conf=request.alloc_conf,
            calibration=request.calibration,
            steps=request.steps or STEPS,
        )

    if not request.max_batch:
        return once(request.batch_size)
    from memopt.cli.shared.console import say
    from memopt.estimators.batch_search import largest_batch

    batch, found = largest_batch(once, say, instead=_without_search)
    say(f"the largest batch that fits is {batch}")
    return found


def _dims(given: tuple[str, ...]) -> dict[str, int]:
    dims: dict[str, int] = {}
    for text in given:
        name, _, size = text.partition("=")
        if not name or not size.isdecimal() or int(size) < 1:
            raise UsageError(f"'--dim {text}' is not understood", try_="--dim seq=512")
        if dims.get(name, int(size)) != int(size):
            raise UsageError(
                f"--dim gives '{name}' two sizes, {dims[name]} and {size}", try_=f"--dim {name}={size}"
            )
        dims[name] = int(size)
    return dims


def _profile(path: Path, request: EstimateRequest) -> Estimate:
    from memopt.cli.shared.console import say
    from memopt.estimators.elsewhere.from_profile import FromProfile, device_of
    from memopt.estimators.hidden.calibrated import calibrated_by
    from memopt.trace import load_trace

    trace = load_trace(path)
    asked = FromProfile(
        trace,
        calibrated_by(device_of(trace, request.device), request.calibration),
        alloc_conf=request.alloc_conf,
        flag=request.batch_arg,
        method=request.method,
        steps=request.steps or 3,
        timeout_s=request.timeout,
    )
    return asked.largest(say, _without_search) if request.max_batch else asked.at(request.batch_size)


def _gate(found: Estimate, gate_bytes: int, request: EstimateRequest) -> None:
    from memopt.units import format_bytes

    told = found.process_bytes or found.allocated_bytes
    need = max(told, found.most_bytes.get("process" if found.process_bytes else "allocated", 0))
    if need > gate_bytes:
        up_to = f"up to {format_bytes(need)} ({format_bytes(told)} told, the rest left out)"
        raise GateFailed(
            f"the run needs {up_to if need > told else format_bytes(need)}, more than {format_bytes(gate_bytes)}",
            why=", ".join(
                f"{name} {format_bytes(size)}" for name, size in list(found.by_category.items())[:4]
            ),
            try_=_within(found, need, request),
        )


def _within(found: Estimate, need_bytes: int, request: EstimateRequest) -> str:
    """The command that has the run need less; where none can be given from here, the one whose gate it passes."""
    from memopt.units import typed_bytes

    kind = _kind(request.target, request.as_module)
    budget = ["--budget", request.fail_over or ""]
    if kind == "script" and found.device == "cpu":
        words = ["run", *budget, *(["-m"] if request.as_module else []), request.target, *request.args]
        return shlex.join(["memopt", *words])
    if kind == "profile" and found.method == "replayed" and not found.partial:
        device = ["--device", request.device] if request.device else []
        return shlex.join(["memopt", "advise", request.target, *budget, *device])
    return typed_again(fail_over=typed_bytes(need_bytes))


def _without_search(smallest: Estimate) -> str:
    """Where `--max-batch` finds no batch: the command that finds one on the next larger GPU; where none is large enough for the smallest
    batch, or the size changes nothing, the one that tells what takes the memory."""
    larger = [each for each in smallest.fits if each.verdict != "no"]
    here = smallest.fits_named
    if here is not None and here.verdict == "no" and larger:
        return typed_again(device=min(larger, key=lambda each: each.memory_bytes).name)
    return typed_again(max_batch=None, explain=True)


def _encoded(figures: dict[str, Any]) -> str:
    """Indented, with the curve, which is long, on one line."""
    curve = json.dumps(figures.pop("curve", None), separators=(",", ":"))
    return f'{json.dumps(figures, indent=2)[:-2]},\n  "curve": {curve}\n}}'
