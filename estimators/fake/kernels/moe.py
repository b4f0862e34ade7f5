"""What a mixture of experts asks of CUDA and neither the cpu's kernels nor torch's fake ones give: counted integers, and
products by group in other types than bf16."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def counted(guesser: Any, recorder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any]:
    """`histc`, of integers too."""
    bins = args[1] if len(args) > 1 else kwargs.get("bins", 100)
    return (_new(recorder, [bins], args[0].dtype),)


def grouped_product(guesser: Any, recorder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any]:
    """`_grouped_mm`: rows by group times a matrix each, or, for the gradient of the matrices, columns by group times rows."""
    left, right = args[:2]
    offsets: Any = args[2] if len(args) > 2 else kwargs.get("offs")
    rows, columns = left.shape[-2], right.shape[-1]
    groups = [] if left.dim() + right.dim() == 5 else [left.shape[0] if left.dim() == 3 else len(offsets)]
    kind = (args[4] if len(args) > 4 else kwargs.get("out_dtype")) or left.dtype
    return (_new(recorder, [*groups, rows, columns], kind),)


def _new(recorder: Any, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    with recorder.fake_mode:
        return torch.empty(shape, dtype=dtype)


EXPERTS = {aten.histc.default: counted, aten._grouped_mm.default: grouped_product}
