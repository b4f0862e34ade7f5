"""CUDA's autocast on the cpu's autocast key: its op lists (ATen/autocast_mode.h), its casts and its cache of weight copies."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memopt.estimators.fake.torch_internals import DispatchKeySet, IncludeExclude, registrations
from memopt.instrument.script.unheard import unheard
from memopt.instrument.torch_internals import DispatchKey

if TYPE_CHECKING:
    from memopt.estimators.fake.asked import Recorder

aten = torch.ops.aten

LOWER = [
    "_convolution",
    "_convolution.deprecated",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linalg_vecdot",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "_scaled_dot_product_flash_attention",
    "scaled_dot_product_attention",
]

FLOAT = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "upsample_nearest1d",
    "_upsample_nearest_exact1d",
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
]

FLOAT_BY_DTYPE = [
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "sum",
    "sum.dim_IntList",
]

PROMOTE = [
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
]

_KEY = DispatchKeySet(DispatchKey.AutocastCPU)


class CudaAutocast:
    """The policies, as kernels for the AutocastCPU key, until `close`."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.cache: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._library = torch.library.Library("aten", "IMPL")
        self._clear = torch.clear_autocast_cache
        torch.clear_autocast_cache = self.clear
        ours = {
            **{name: self._casting(name, None) for name in LOWER},
            **{name: self._casting(name, torch.float32) for name in FLOAT},
            **{name: self._by_dtype(name) for name in FLOAT_BY_DTYPE},
            **{name: self._promoting(name) for name in PROMOTE},
        }
        self._register(ours)

    def _register(self, ours: dict[str, Callable[..., Any]]) -> None:
        with unheard():
            for name in registrations("AutocastCPU"):
                space, _, short = name.partition("::")
                if space == "aten" and short not in ours:
                    self._library.impl(
                        short, torch.library.fallthrough_kernel, "AutocastCPU", allow_override=True
                    )
            for short, kernel in ours.items():
                self._library.impl(short, kernel, "AutocastCPU", allow_override=True)

    def close(self) -> None:
        """Give the key back to the cpu's own policies."""
        self._library._destroy()
        torch.clear_autocast_cache = self._clear
        self.cache.clear()

    def clear(self) -> None:
        """Forget the copies of weights; torch does so when the outermost region ends."""
        self.cache.clear()
        self._clear()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """cached_cast: floating tensors on the device, not doubles; copies of leaf weights are kept."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.cast(each, dtype) for each in value)
        if not self._eligible(value) or value.dtype is dtype:
            return value
        lower = torch.get_autocast_dtype("cpu")
        keeps = (
            dtype is lower
            and value.dtype is torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not keeps:
            return value.to(dtype)
        found = self.cache.get(id(value))
        if found is not None and found[0]() is value:
            return found[1]
        made = value.to(dtype)
        self.cache[id(value)] = (weakref.ref(value), made)
        return made

    def _eligible(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.dtype is not torch.float64
            and self.recorder.device_of(value) == "cuda"
        )

    def _casting(self, name: str, dtype: torch.dtype | None) -> Callable[..., Any]:
        op = _op(name)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with _below():
                to = dtype or torch.get_autocast_dtype("cpu")
                return op(
                    *(self.cast(a, to) for a in args), **{k: self.cast(v, to) for k, v in kwargs.items()}
                )

        return kernel

    def _by_dtype(self, name: str) -> Callable[..., Any]:
        op = _op(name)
        at = next((i for i, a in enumerate(op._schema.arguments) if a.name == "dtype"), None)
        keyword = at is not None and op._schema.arguments[at].kwarg_only

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with _below():
                given = list(args)
                if self._eligible(given[0]) and at is not None:
                    if keyword or len(given) <= at:
                        kwargs["dtype"] = kwargs.get("dtype") or torch.float32
                    else:
                        given[at] = given[at] or torch.float32
                return op(*given, **kwargs)

        return kernel

    def _promoting(self, name: str) -> Callable[..., Any]:
        op = _op(name)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with _below():
                to = torch.get_autocast_dtype("cpu")
                if any(self._eligible(a) and a.dtype is torch.float32 for a in args):
                    to = torch.float32
                return op(*(self.cast(a, to) for a in args), **kwargs)

        return kernel


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


@contextmanager
def _below() -> Iterator[None]:
    with IncludeExclude(_KEY):
        yield
