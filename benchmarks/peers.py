"""PyTorch's own ways to save activation memory, switched on in `train.py` by name.

compile:BACKEND:SOLVER:RATIO   `torch.compile` of model and loss under `activation_memory_budget` RATIO, its knapsack by SOLVER
                               (dp, greedy, ilp). BACKEND: `eager` (min-cut partitioner, the very kernels of eager PyTorch), `decomp`
                               (torch's `aot_eager_decomp_partition`: the same after inductor's decompositions), or `inductor`.
sac:FILE                       selective checkpointing of the modules, and of the ops in them, that `sac_plan.py` wrote to FILE.
checkpoint                     `torch.utils.checkpoint` around every block.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

LossOf = Callable[[Tensor, Tensor], Tensor]
"""Inputs and targets -> loss."""


def saved_by(peer: str, model: nn.Module, loss_of: LossOf) -> LossOf:
    """`loss_of`, which calls `model`, as `peer` runs it. Raises `ValueError` for a name that is not there."""
    kind, *rest = peer.split(":", 1)
    if kind == "compile" and rest and rest[0].count(":") == 2:
        backend, solver, ratio = rest[0].split(":")
        return compiled(loss_of, backend, solver, float(ratio))
    if kind == "sac" and rest:
        checkpoint_selected(model, json.loads(Path(rest[0]).read_text())["save"])
        return loss_of
    raise ValueError(f"no peer {peer!r}")


def compiled(loss_of: LossOf, backend: str, solver: str, ratio: float) -> LossOf:
    """`loss_of` compiled so that what it saves is at most `ratio` of what the min-cut partitioner would save."""
    from torch._functorch import config

    config.activation_memory_budget = ratio
    config.activation_memory_budget_solver = solver
    backends = {"eager": eager_kernels, "decomp": "aot_eager_decomp_partition", "inductor": "inductor"}
    return torch.compile(loss_of, backend=backends[backend], dynamic=False)


def eager_kernels(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """A backend that partitions into forward and backward, decomposes nothing and generates no code."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import get_nop_func

    compiler = get_nop_func()
    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        decompositions={
            torch.ops.aten._native_batch_norm_legit_functional.default: batch_norm,
            torch.ops.aten.native_batch_norm_backward.default: batch_norm_backward,
        },
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
    )(graph, inputs)


def batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """The same kernel without the running statistics, and their update beside it.

    Saved to run the kernel again, they would be found mutated by the update that ends the compiled forward.
    """
    if not training:
        return NotImplemented
    out, now, inverse = torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)
    count = x.numel() // x.shape[1]
    unbiased = (inverse.pow(-2) - eps) * (count / (count - 1))
    return out, now, inverse, mean.lerp(now, momentum), var.lerp(unbiased, momentum)


def batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, var: Tensor | None, *rest: Any
) -> Any:
    """The same kernel without the running statistics, which it does not read in training."""
    if mean is None or not rest[2]:
        return NotImplemented
    return torch.ops.aten.native_batch_norm_backward(grad, x, weight, None, None, *rest)


def checkpoint_selected(model: nn.Module, save: dict[str, list[int]]) -> None:
    """Checkpoint every module named in `save`; of the ops that it runs, those with a 1 are saved, in order of execution."""
    for name, decisions in save.items():
        module = model.get_submodule(name)
        module.forward = functools.partial(  # type: ignore[method-assign]
            checkpoint,
            module.forward,
            use_reentrant=False,
            context_fn=functools.partial(contexts, decisions),
        )


def contexts(decisions: list[int]) -> Any:
    """Contexts for one call of a module: the n-th op that counts is saved if `decisions[n]`."""
    wanted = iter(decisions)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        # what the estimator skips it has no decision for; torch calls a policy in forward only
        if op in OPS_TO_ALWAYS_SKIP or context.is_recompute or not next(wanted):
            return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    # ops that write in place are saved together with what they write to, which is then found mutated
    return create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=True)
