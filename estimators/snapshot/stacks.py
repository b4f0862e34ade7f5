"""What a stack of a memory snapshot tells of an allocation: the line of the user's that made it, the operator, the phase."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FRAME = re.compile(r"(?P<file>.*?):(?P<line>\d*) (?P<name>.*)", re.DOTALL)
_OPERATOR = re.compile(r"at::_ops::(?P<name>\w+)::(?:call|redispatch)")
_LIBRARY = ("/torch/", "site-packages", "dist-packages", "/lib/python", "<frozen", "<string>")
_OPTIMIZER = ("/optim/", "optimizer")
_BACKWARD = ("torch::autograd::Engine", "backward", "::autograd::generated::")
_MAKING = (
    "_apply",
    "reset_parameters",
    "load_state_dict",
    "__init__",
    "convert",
    "init_weights",
    "_init_weights",
)

_BRINGING = frozenset(
    (
        "_to_copy",
        "to",
        "cuda",
        "copy_",
        "empty",
        "empty_strided",
        "randn",
        "rand",
        "randint",
        "tensor",
        "full",
        "zeros",
        "ones",
        "arange",
    )
)


@dataclass(frozen=True, slots=True)
class Where:
    """Of one stack."""

    op: str
    """`aten.addmm` where the stack has C++ frames, else the innermost Python function."""
    function: str
    """`model.py:forward`, the innermost function that is not a library's; empty when there is none."""
    line: str
    """`model.py:41`."""
    phase: str
    """As in `memopt.trace.PHASES`; empty for an empty stack, as the threads of autograd have."""
    makes_parameters: bool
    """It looks like building a model, or moving it to the device."""
    brings_data: bool = False
    """A factory or a copy from elsewhere."""


def read_stack(stack: str) -> Where:
    """What `stack` (lines of `file:line function`, innermost first) tells; never raises."""
    frames = [found.groupdict() for text in stack.split("\n") if (found := _FRAME.fullmatch(text))]
    python = [
        frame for frame in frames if frame["file"].endswith(".py") or frame["file"].startswith("<ipython")
    ]
    user = next((frame for frame in python if not any(word in frame["file"] for word in _LIBRARY)), None)
    operator = _OPERATOR.search(stack)
    inner = python[0] if python else frames[0] if frames else None
    file = user["file"].rpartition("/")[2] if user else ""
    return Where(
        op=f"aten.{operator['name']}" if operator else inner["name"] if inner else "",
        function=f"{file}:{user['name']}" if user else "",
        line=f"{file}:{user['line']}" if user else "",
        phase=_phase(frames) or ("other" if stack.strip() else ""),
        makes_parameters=any(frame["name"] in _MAKING for frame in frames),
        brings_data=(operator["name"] if operator else inner["name"] if inner else "") in _BRINGING,
    )


def _phase(frames: list[dict[str, str]]) -> str:
    """By the words of the frames; backward before optimizer, as a closure runs backward inside a step."""
    texts = [f"{frame['file']} {frame['name']}" for frame in frames]
    if any(word in text for text in texts for word in _BACKWARD):
        return "backward"
    if any(word in text.lower() for text in texts for word in _OPTIMIZER):
        return "optimizer"
    if any("forward" in text or "_call_impl" in text for text in texts):
        return "forward"
    return ""
