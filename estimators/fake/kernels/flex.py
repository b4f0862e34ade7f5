"""`flex_attention` on fake tensors: a higher-order operator, which no dispatch mode sees, told as the kernels that it becomes.

Compiled, it is one kernel that writes the output and the logarithms of the softmax's sums, and a backward pass that recomputes the
scores block by block (torch/_inductor/kernel/flex); not compiled, it makes the whole matrix of scores in float32.
Gradients of what `score_mod` captures are not followed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from memopt.estimators.fake.recorder import FakeRecorder
from memopt.instrument.script.on_import import call_after_import

_MODULE = "torch.nn.attention.flex_attention"
_FORWARD_SCORES, _BACKWARD_SCORES = 3, 4
"""Matrices of scores at once where they are made: as they are, modified, and as probabilities; in backward one more."""


def install(recorder: FakeRecorder) -> None:
    """Replace the function when it is imported."""
    call_after_import(_MODULE, lambda: _replace(recorder))


def _replace(recorder: FakeRecorder) -> None:
    module: Any = sys.modules[_MODULE]
    kept = module.flex_attention

    def flex_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: Any = None,
        *,
        return_aux: Any = None,
    ) -> Any:
        if recorder.fusion.compiles:
            scores = 0
        else:
            recorder.guesser.remark(
                "flex_attention is not compiled: the matrices of scores that it makes were counted"
            )
            scores = 4 * query.shape[:-1].numel() * key.shape[-2]
        out, lse = _Flex.apply(recorder, scores, query, key, value)  # type: ignore[no-untyped-call]
        if return_aux is not None:
            most = lse.detach() if getattr(return_aux, "max_scores", False) else None
            return out, module.AuxOutput(lse=lse if return_aux.lse else None, max_scores=most)
        return (out, lse) if return_lse else out

    flex_attention.__doc__ = kept.__doc__
    module.flex_attention = flex_attention


class _Flex(torch.autograd.Function):
    """Saves what the kernels save: the inputs, the output and the logarithms of the sums."""

    @staticmethod
    def forward(
        ctx: Any, recorder: FakeRecorder, scores_bytes: int, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        recorder.workspace(_FORWARD_SCORES * scores_bytes, "flex_attention")
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.recorder, ctx.scores_bytes = recorder, scores_bytes
        ctx.save_for_backward(query, key, value, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, _, lse = ctx.saved_tensors
        delta = torch.empty_like(lse)
        ctx.recorder.workspace(_BACKWARD_SCORES * ctx.scores_bytes, "flex_attention_backward")
        made = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del delta
        return None, None, *made
