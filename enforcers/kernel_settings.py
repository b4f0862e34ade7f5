"""The settings of the process that kernels read beside their arguments: a replay runs under those that forward ran under.

A script may switch them around its forward pass alone (`torch.backends.mkldnn.flags`, `torch.set_float32_matmul_precision`,
`torch.set_num_threads`): what is made again in backward would come out in other bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memopt.instrument.torch_internals import (
    CUDA_SETTINGS,
    KERNEL_SETTINGS,
    get_fp32_precision,
    set_deterministic,
    set_fp32_precision,
)

Settings = tuple[Any, ...]

_SMALLEST = 5e-324
_ONE = 1.0
_PRECISIONS = [("mkldnn", op) for op in ("matmul", "conv", "rnn")]
_CUDA_PRECISIONS = [("cuda", op) for op in ("matmul", "conv", "rnn")]


class KernelSettings:
    """Reads the settings, and switches to those of a record for as long as a replay takes."""

    def __init__(self, *, cuda: bool) -> None:
        plain = [
            (torch.get_default_dtype, torch.set_default_dtype),
            (torch.get_num_threads, torch.set_num_threads),
            (_flushes_denormals, torch.set_flush_denormal),
            (_deterministic, _set_deterministic),
        ]
        former = [(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)] if cuda else []
        """What `cuBLAS` compares with its own precision: it sets the precisions too, and so is written before them."""
        pairs = plain + KERNEL_SETTINGS + (CUDA_SETTINGS + former if cuda else [])
        precisions = [*map(_precision, _PRECISIONS + _CUDA_PRECISIONS * cuda)]
        self._pairs = [*map(_readable, pairs), *precisions]
        self._reads = [read for read, _ in (*pairs, *precisions)]
        self._last: Settings = ()

    def now(self) -> Settings:
        """The settings of this moment; the same object for as long as they stay."""
        try:  # read for each op that is recorded
            found = tuple([read() for read in self._reads])
        except RuntimeError:
            found = tuple([read() for read, _ in self._pairs])
        if found != self._last:
            self._last = found
        return self._last

    def of_one_by_one(self) -> Settings:
        """The same for an op that a GPU computes element by element: of all settings the default dtype alone can change its bits."""
        last = self._last
        return last if last and last[0] is torch.get_default_dtype() else self.now()

    def switch(self, wanted: Settings) -> None:
        """Write what is not as `wanted`."""
        for (read, write), value in zip(self._pairs, wanted, strict=True):
            if read() != value:
                write(value)


def _readable(
    pair: tuple[Callable[[], Any], Callable[[Any], Any]],
) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """`pair`, which gives None where torch refuses to say (old and new names mixed), and leaves that as it is."""
    read, write = pair

    def read_or_none() -> Any:
        try:
            return read()
        except RuntimeError:
            return None

    return read_or_none, lambda value: write(value) if value is not None else None


def _precision(where: tuple[str, str]) -> tuple[Callable[[], str], Callable[[str], None]]:
    backend, op = where

    def write(value: str) -> None:
        """Have the op follow its backend again, as by default, where that says the same."""
        set_fp32_precision(backend, op, "none")
        if get_fp32_precision(backend, op) != value:
            set_fp32_precision(backend, op, value)

    return lambda: get_fp32_precision(backend, op), write


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    set_deterministic(value[0], warn_only=value[1])


def _flushes_denormals() -> bool:
    """torch does not tell; the interpreter's own floats are computed in the same mode."""
    return _SMALLEST * _ONE == 0.0


SETTINGS = KernelSettings(cuda=torch.backends.cuda.is_built())
