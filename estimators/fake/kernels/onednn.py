"""oneDNN's convolutions and recurrent layers on the CPU: which calls to ask about (see `fake/kernels/probe.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from memopt.estimators.fake.kernels.hidden import hidden
from memopt.estimators.fake.kernels.probe import Call, Spec

aten = torch.ops.aten
_CHEAP_FLOPS = 1 << 30
_CHEAP_BYTES = 16 << 20


@hidden("cpu", aten.convolution.default)
def _convolution(recorder: Any, args: Any, kwargs: Any, result: Any) -> Iterable[int]:
    specs = [Spec(x) if isinstance(x, torch.Tensor) else None for x in args[:3]]
    rest = args[3:]

    def make(batch: int) -> Call:
        inputs = [s.zeros(0 if i == 0 else None, batch) if s else None for i, s in enumerate(specs)]
        return lambda: (aten.convolution.default(*inputs, *rest),)

    _ask(
        recorder,
        ("conv", *(s.key if s else None for s in specs), repr(rest)),
        make,
        args[0].shape[0],
        "convolution",
        _cheap(args[0], args[1], result, args[6]),
    )
    return ()


@hidden("cpu", aten.convolution_backward.default)
def _convolution_backward(recorder: Any, args: Any, kwargs: Any, result: Any) -> Iterable[int]:
    specs = [Spec(x) for x in args[:3]]
    rest = args[3:]

    def make(batch: int) -> Call:
        inputs = [specs[0].zeros(0, batch), specs[1].zeros(0, batch), specs[2].zeros(None, batch)]
        return lambda: [x for x in aten.convolution_backward.default(*inputs, *rest) if x is not None]

    key = ("conv backward", *(s.key for s in specs), repr(rest))
    cheap = _cheap(args[1], args[2], args[0], args[7])
    _ask(recorder, key, make, args[0].shape[0], "convolution_backward", cheap)
    return ()


def _cheap(input: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, transposed: bool) -> int:
    """The batch size up to which a convolution takes some tens of milliseconds and little memory."""
    if not input.shape[0]:
        return 0
    places = (input if transposed else output)[0, 0].numel()
    flops = 2 * places * weight.numel()
    return _samples(
        flops, input[0].numel() * input.element_size() + output[0].numel() * output.element_size()
    )


def _samples(flops: int, size_bytes: int) -> int:
    """How many cost next to nothing where one takes so much."""
    return min(_CHEAP_FLOPS // max(1, flops), _CHEAP_BYTES // max(1, size_bytes))


def _ask(recorder: Any, key: Any, make: Any, batch: int, op: str, cheap: int = 0) -> None:
    probe = recorder.probes.add(key, make, batch, cheap)
    probe.workspaces.append(recorder.workspace_later(op))


@hidden("cpu", aten.mkldnn_rnn_layer.default)
def _rnn(recorder: Any, args: Any, kwargs: Any, result: Any) -> Iterable[int]:
    make, batch, key = _rnn_call(args)
    probe = recorder.probes.add(("rnn", key), make, batch, _cheap_rnn(args))
    probe.workspaces.append(recorder.workspace_later("mkldnn_rnn_layer"))
    if torch.is_grad_enabled():
        probe.outputs.append((recorder.index_of(result[3]), 3))
    return ()


def _rnn_call(args: Any) -> tuple[Any, int, Any]:
    specs = [Spec(x) for x in args[:7]]
    rest = args[7:]
    states = (5, 6)

    def make(batch: int) -> Call:
        inputs = [
            s.zeros(1 if i == 0 else len(s.shape) - 2 if i in states else None, batch)
            for i, s in enumerate(specs)
        ]

        def call() -> Any:
            with torch.set_grad_enabled(training):
                return aten.mkldnn_rnn_layer.default(*inputs, *rest)

        return call

    training = torch.is_grad_enabled()  # only then does the kernel keep its workspace
    return make, args[0].shape[1], (*(s.key for s in specs), repr(rest), training)


@hidden("cpu", aten.mkldnn_rnn_layer_backward.default)
def _rnn_backward(recorder: Any, args: Any, kwargs: Any, result: Any) -> Iterable[int]:
    specs = [Spec(x) if isinstance(x, torch.Tensor) else None for x in args[:13]]
    rest = args[13:22]
    reverse, mode, hidden_size, layers, biases, _, both, sizes, first = rest

    def make(batch: int) -> Call:
        def zeros(index: int) -> torch.Tensor | None:
            spec = specs[index]
            if spec is None:
                return None
            dim = None if 1 <= index <= 4 else len(spec.shape) - 2
            return spec.zeros(dim, batch)

        inputs = [zeros(i) for i in range(13)]
        with torch.enable_grad():
            forward = aten.mkldnn_rnn_layer.default(
                *inputs[:7], reverse, sizes, mode, hidden_size, layers, biases, both, first, True
            )
        workspace = forward[3]
        return lambda: aten.mkldnn_rnn_layer_backward.default(*inputs, *rest, workspace)

    key = ("rnn backward", *(s.key if s else None for s in specs), repr(rest))
    _ask(recorder, key, make, args[0].shape[1], "mkldnn_rnn_layer_backward", _cheap_rnn(args))
    return ()


def _cheap_rnn(args: Any) -> int:
    """As `_cheap`, of a layer on `(time, batch, features)`: what it keeps is padded, more at some batch sizes than at others."""
    steps, width = args[0].shape[0], args[2].shape[1]
    flops = 2 * steps * (args[1].numel() + args[2].numel())
    return _samples(flops, 16 * steps * width * args[0].element_size())
