"""What kind of op an overload is: does it write, draw random numbers, only make a view; may it run again?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter

from memopt.instrument.by_identity import cached_by_identity
from memopt.instrument.torch_internals import STAND_INS, OpOverload

PLAIN_TYPES = (Tensor, Parameter, torch.nn.Buffer)
CLONE = "aten.clone.default"

_VIEWS_WITHOUT_ALIAS_INFO = {
    "aten::_unsafe_view",
    "aten::_reshape_alias",
    "aten::lift_fresh",
    "aten::alias",
    "aten::detach",
}

_RUNNING_STATISTICS = {
    "aten::native_batch_norm": (3, 4, 5),
    "aten::_native_batch_norm_legit": (3, 4, 5),
    "aten::_batch_norm_with_update": (3, 4, None),
    "aten::cudnn_batch_norm": (3, 4, 5),
    "aten::miopen_batch_norm": (3, 4, 5),
    "aten::batch_norm_update_stats": (1, 2, None),
    "aten::batch_norm_gather_stats": (3, 4, None),
    "aten::batch_norm_gather_stats_with_counts": (3, 4, None),
}
"""Overload packet -> positions of running mean, running variance and of the `training` flag (None: always training)."""

_UNREAD_STATISTICS: dict[str, tuple[int, int, int | None]] = {
    "aten::native_batch_norm_backward": (3, 4, 7),
    "aten::batch_norm_backward": (3, 4, 7),
    "aten::cudnn_batch_norm_backward": (3, 4, None),
    "aten::miopen_batch_norm_backward": (3, 4, None),
}
"""The same of those that are given them and, in training, do not read them: a batch norm's backward reads the batch's own."""

_NOT_REPLAYABLE = {
    "aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::unique_dim", "aten::_unique2",
    "aten::set_", "aten::resize_", "aten::record_stream", "aten::_pin_memory", "aten::is_pinned",
    "aten::index_add", "aten::index_add_", "aten::scatter_add", "aten::scatter_add_", "aten::index_put_",
    "aten::_index_put_impl_", "aten::put_", "aten::bincount", "aten::histc", "aten::scatter_reduce", "aten::scatter_reduce_",
    "aten::_to_copy.cross_device", "aten::_cudnn_rnn", "aten::_thnn_fused_lstm_cell", "aten::lstsq",
    "aten::linalg_lstsq", "aten::linalg_pinv", "aten::_trilinear", "aten::_cudnn_attention_forward", "aten::equal", "aten::is_same_size",
}  # fmt: skip
"""Ops whose result depends on more than their inputs' values, that need not give the same bits twice, or that move memory."""


_GATHERS = {"aten::index", "aten::masked_select"}
"""Of a mask they take as many elements as it has ones, which a second run finds again. (Of indices, torch tags `index` all the same.)"""

_OTHER_BITS_ON_A_GPU = {
    f"aten::{name}" for name in (
        "nll_loss2d_forward", "kthvalue", "median", "nanmedian", "mode", "index_put", "_unsafe_index_put",
        "scatter", "scatter_", "index_copy", "index_copy_", "index_reduce", "index_reduce_", "put", "max_unpool2d", "max_unpool3d",
        "_embedding_bag", "_embedding_bag_forward_only",
    )
}  # fmt: skip
"""Kernels that add or choose in the order in which threads happen to come by (duplicate indices, ties): their bits differ from run to run.
Those of torch's list under `use_deterministic_algorithms`, and what differed in `benchmarks/gpu/replays.py` on an H100."""

_SCANS = {
    f"aten::{name}{end}"
    for name in ("cumsum", "cumprod", "logcumsumexp", "_logcumsumexp")
    for end in ("", "_")
}
"""Not of floating point numbers, on a GPU: the blocks of a scan join as they get done."""

_TUNED = {"aten::convolution", "aten::_convolution", "aten::cudnn_convolution", "aten::cudnn_convolution_transpose", "aten::cudnn_convolution_relu", "aten::cudnn_convolution_add_relu"}  # fmt: skip
"""With `cudnn.benchmark` each thread times the engines for itself: autograd's may choose another one than forward did."""


_FORMULAS = {
    f"aten::{name}" for name in (
        "tanh_backward", "threshold_backward", "logit_backward", "sigmoid_backward", "native_dropout_backward", "silu_backward",
        "gelu_backward", "elu_backward", "leaky_relu_backward", "softplus_backward", "hardtanh_backward", "hardsigmoid_backward",
        "hardswish_backward", "hardshrink_backward", "softshrink_backward", "mish_backward", "log_sigmoid_backward", "glu_backward",
        "mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward", "binary_cross_entropy_backward",
        "_softmax_backward_data", "_log_softmax_backward_data", "slice_backward", "select_backward", "diagonal_backward",
    )
}  # fmt: skip
"""Of backward's own ops those that compute each element, or row, by itself, or copy: of the others many add up with atomics on a GPU."""


@dataclass(frozen=True, slots=True)
class OpKind:
    """What matters of an overload; positions index the flattened positional arguments of the schema."""

    name: str
    """`aten.addmm.default`."""
    is_view: bool
    """Makes an alias and computes nothing: no op of the trace."""
    writes: tuple[int, ...]
    """Positions of arguments that it writes in place."""
    write_names: tuple[str, ...]
    random: bool
    one_by_one: bool
    """Computes each element of its result from those at its place in the arguments."""
    replayable: bool
    statistics: tuple[int, int, int | None] | None
    """Running statistics that it updates though its schema does not say so."""
    unread: tuple[int, int, int | None] | None
    """Running statistics that it is given, and does not read in training."""
    changes: bool
    """Does it write arguments in place, told or untold?"""
    may_differ: bool
    """Its bits may differ when it runs again, on some devices or under some settings: `same_bits_again` says."""


@cached_by_identity
def kind_of(func: OpOverload) -> OpKind:
    """The kind of overload `func`."""
    schema = func._schema
    packet = schema.name
    writes = tuple(
        i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )
    aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    random = torch.Tag.nondeterministic_seeded in func.tags
    own = packet.startswith(("aten::", "prims::"))
    return OpKind(
        name=str(func),
        is_view=(aliases and not writes) or packet in _VIEWS_WITHOUT_ALIAS_INFO,
        writes=writes,
        write_names=tuple(schema.arguments[i].name for i in writes),
        random=random,
        one_by_one=torch.Tag.pointwise in func.tags,
        replayable=own
        and packet not in _NOT_REPLAYABLE
        and torch.Tag.data_dependent_output not in func.tags
        and (torch.Tag.dynamic_output_shape not in func.tags or packet in _GATHERS)
        and bool(schema.returns),
        statistics=_RUNNING_STATISTICS.get(packet),
        unread=_UNREAD_STATISTICS.get(packet),
        changes=bool(writes) or packet in _RUNNING_STATISTICS,
        may_differ=packet in _OTHER_BITS_ON_A_GPU
        or packet in _SCANS
        or packet in _TUNED
        or ("_backward" in packet and packet not in _FORMULAS),
    )


def same_bits_again(func: OpOverload, tensors: Sequence[Tensor]) -> bool:
    """Does the op give the same bits when it runs again on inputs like these, in another thread too? Only asked of replayable ops.

    Of sparse and quantized inputs nobody knows whether they are still what they were: `_to_dense` alone, run again, moves the
    version counter of a CSR tensor.
    """
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return False
    if not kind_of(func).may_differ:
        return True
    packet = func._schema.name
    there = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    if packet in _TUNED:
        return not (there and torch.backends.cudnn.benchmark)
    if packet in _SCANS:
        return not any(tensor.is_floating_point() or tensor.is_complex() for tensor in there)
    return not there


_NO_TENSORS = frozenset((int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout))
"""Types of most arguments that are no tensor: to ask whether they are one of some subclass takes four times as long."""


def tensors_in(arguments: Iterable[object]) -> list[Tensor]:
    """All tensors among a call's arguments, those in lists too: what torch's own walk finds, in a tenth of its time."""
    found: list[Tensor] = []
    for given in arguments:
        if type(given) in _NO_TENSORS:
            continue
        if isinstance(given, Tensor):
            found.append(given)
        elif isinstance(given, (list, tuple)):
            found += tensors_in(given)
        elif isinstance(given, dict):
            found += tensors_in(given.values())
    return found


def just_goes_on(types: Iterable[type]) -> bool:
    """Must an op on tensors of such types run as it is, unseen? A compiler calls it on tensors that stand for others, or no type takes
    ops for itself (the uninitialized parameters of lazy modules): there is nobody to hand it to."""
    types = list(types)
    return any(t.__module__.startswith(STAND_INS) for t in types) or all(
        getattr(t, "__torch_dispatch__", None) is Tensor.__torch_dispatch__ for t in types
    )


def updated_statistics(kind: OpKind, args: tuple[object, ...]) -> tuple[Tensor, ...]:
    """Running statistics that this call of a batch norm updates; empty in evaluation mode."""
    return _statistics_at(kind.statistics, args)


def unread_statistics(kind: OpKind, args: tuple[object, ...]) -> tuple[Tensor, ...]:
    """Running statistics among the arguments on which the results of this call of a batch norm, or its backward, do not depend."""
    return _statistics_at(kind.statistics or kind.unread, args)


def _statistics_at(
    positions: tuple[int, int, int | None] | None, args: tuple[object, ...]
) -> tuple[Tensor, ...]:
    if positions is None:
        return ()
    mean, variance, training = positions
    if training is not None and not (len(args) > training and args[training]):
        return ()
    return tuple(a for a in (args[mean], args[variance]) if isinstance(a, Tensor))


def is_plain(tensor: Tensor) -> bool:
    """Is `tensor` a strided tensor of no subclass, not nested, neither conjugate nor negative view, with a storage of its own bytes?

    The zeros of forward-mode differentiation have a storage whose bytes are never allocated.
    """
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
        and not tensor.is_meta
    )


def is_lent(storage: torch.UntypedStorage) -> bool:
    """Do the bytes belong to somebody else (numpy, a mapped file), who may write them without any version counter moving?

    Shared memory is not meant: what a DataLoader's worker put there stays as it is. On a GPU torch calls every storage shared; what comes
    through DLPack or from another process cannot be resized there, and what torch allocates can.
    """
    return not storage.resizable() and not is_shared(storage)


def is_shared(storage: torch.UntypedStorage) -> bool:
    """Does the host's memory that it is in belong to several processes?"""
    return storage.device.type == "cpu" and storage.is_shared()


def copies_bytes(name: str, source: object, out: object) -> bool:
    """Is the op `name` a clone whose result's whole storage has the bytes of its source's? autograd clones what it saves of an op in place."""
    return (
        name == CLONE
        and isinstance(source, Tensor)
        and isinstance(out, Tensor)
        and is_plain(source)
        and is_plain(out)
        and source.stride() == out.stride()
        and source.storage_offset() == out.storage_offset()
        and source.untyped_storage().nbytes() == out.untyped_storage().nbytes()
    )


def fills_its_memory(tensor: Tensor) -> bool:
    """Do its elements lie without gaps or overlaps, in whatever order?"""
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`."""
    return str(dtype).removeprefix("torch.")


def version_of(tensor: Tensor) -> int:
    """How often `tensor` has been written in place; 0 where torch does not count."""
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode
        return 0
