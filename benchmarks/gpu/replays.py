"""Which ops give other bits when they run again? torch's own samples of each op, on this machine's device.

Each op that memopt would replay runs four times more on the same inputs: twice in the thread that called it, once in autograd's
(whose handles, workspaces and plan caches are its own), once with the device busy. Ops that differ must not be recomputed.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from memopt.enforcers.records import generator_state, rewound
from memopt.instrument.ops import is_plain, kind_of

DTYPES = ("float32", "bfloat16", "float16")
_LIMIT_S = 200.0
_DRY_LIMIT_S = 15.0
_WANTED = ("cudnn_attention", "_cudnn_rnn")
"""Looked at though memopt does not replay them."""
SHAPES = ((64, 128), (64, 1000), (64, 2048), (128, 1024), (256, 512))
"""Of attention: head size and length."""


def _device() -> str:
    return "cpu" if os.environ.get("MEMOPT_CAMPAIGN_DRY") else "cuda"


class _InAutogradsThread(torch.autograd.Function):
    """Runs a function while autograd runs backward."""

    work: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _InAutogradsThread.work()
        return gradients[0]


class _Again(TorchDispatchMode):
    """Runs every replayable op again, and counts those whose bits differ."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.ops: Counter[str] = Counter()
        self.differ: dict[str, Counter[str]] = {}
        self.errors: dict[str, str] = {}
        self._calls: list[Any] = []
        self._seed = torch.ones(1, device=device, requires_grad=True)
        self._load = torch.rand(512, 512, device=device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(func)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        looked_at = kind.replayable or any(word in kind.name for word in _WANTED)
        if kind.is_view or not looked_at or not all(map(is_plain, tensors)):
            return func(*args, **kwargs)
        if not any(tensor.device.type == self._device for tensor in tensors):
            return func(*args, **kwargs)
        before = _copied(args, kwargs)
        rng = generator_state(tree_leaves((args, kwargs))) if kind.random else None
        out = func(*args, **kwargs)
        if "empty" not in kind.name:
            self._calls.append((func, kind.name, before, rng, torch.is_grad_enabled(), _digest(out)))
        return out

    def run_again(self) -> None:
        """What was called since, outside of the mode: autograd does not work under it."""
        calls, self._calls = self._calls, []
        for func, name, given, rng, grad, first in calls:
            self.ops[name] += 1
            for way in ("again", "in autograd's thread", "again", "under load"):
                try:
                    again = self._once_more(func, given, rng, grad, way)
                    other = [n for n, (a, b) in enumerate(zip(first, again, strict=True)) if a != b]
                    if other:
                        self.differ.setdefault(name, Counter())[f"{way}, outputs {other}"] += 1
                except Exception as error:
                    self.errors.setdefault(name, f"{way}: {type(error).__name__}: {str(error)[:200]}")

    def _once_more(self, func: Any, given: Any, rng: Any, grad: bool, way: str) -> list[Any]:
        """`grad`: whether autograd recorded; oneDNN's recurrent layers compute otherwise where it does not."""
        result: list[Any] = []

        def work() -> None:
            args, kwargs = _copied(*given)
            with rewound(*rng) if rng else nullcontext(), torch.set_grad_enabled(grad):
                result.extend(_digest(func(*args, **kwargs)))

        if way == "in autograd's thread":
            _InAutogradsThread.work = work
            _InAutogradsThread.apply(self._seed).sum().backward()
            return result
        if way == "under load":
            for _ in range(3):
                torch.mm(self._load, self._load)
        work()
        return result


def _copied(args: Any, kwargs: Any) -> Any:
    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.untyped_storage().nbytes() == 0:
            return leaf
        whole = leaf.untyped_storage().clone()
        return torch.empty(0, dtype=leaf.dtype, device=leaf.device).set_(whole, leaf.storage_offset(), leaf.size(), leaf.stride())  # fmt: skip

    guard = torch._C._DisableTorchDispatch()
    try:
        with torch.no_grad():
            return tree_map(copy, args), tree_map(copy, kwargs)
    finally:
        del guard


def _digest(out: Any) -> list[Any]:
    found: list[Any] = []
    for leaf in tree_leaves(out):
        if isinstance(leaf, torch.Tensor):
            row = leaf.detach().contiguous().reshape(-1)
            found.append(row.view(torch.uint8).cpu().numpy().tobytes() if row.numel() else b"")
        else:
            found.append(repr(leaf))
    return found


def replays(dtype_name: str) -> dict[str, Any]:
    """Forward of each sample under the mode; ops by name that differ, and how many were looked at."""
    from torch.testing._internal.common_methods_invocations import op_db

    device = _device()
    dtype = getattr(torch, dtype_name)
    mode = _Again(device)
    limit_s = _DRY_LIMIT_S if device == "cpu" else _LIMIT_S
    end = time.monotonic() + limit_s
    looked, left = 0, 0
    warnings.simplefilter("ignore")
    for info in op_db:
        if dtype not in info.supported_dtypes(device):
            continue
        if time.monotonic() > end:
            left += 1
            continue
        looked += 1
        try:
            for number, sample in enumerate(info.sample_inputs(device, dtype, requires_grad=False)):
                if number >= 12:
                    break
                with mode:
                    info(sample.input, *sample.args, **sample.kwargs)
                mode.run_again()
        except Exception as error:
            mode.errors.setdefault(info.name, f"{type(error).__name__}: {str(error)[:160]}")
    _large(mode, device, dtype)
    reason = {"left out": f"{left} of {looked + left} ops: {limit_s:.0f} s were up"} if left else {}
    return reason | {
        "infos": looked,
        "infos_left": left,
        "ops": len(mode.ops),
        "calls": sum(mode.ops.values()),
        "differ": {name: dict(ways) | {"of": mode.ops[name]} for name, ways in sorted(mode.differ.items())},
        "errors": mode.errors,
    }


def _large(mode: _Again, device: str, dtype: torch.dtype) -> None:
    """Sizes at which a kernel splits its work over blocks: torch's samples are tiny."""
    n = 64 if device == "cpu" else 1024

    def r(*size: int) -> torch.Tensor:
        return torch.randn(*(_small(size) if device == "cpu" else size), device=device, dtype=dtype)

    index = torch.randint(0, 50, (8 * n,), device=device)
    works = {
        "mm": lambda: r(n, 4 * n) @ r(4 * n, n),
        "addmm": lambda: torch.addmm(r(n), r(n, n), r(n, n)),
        "bmm": lambda: torch.bmm(r(16, n, 64), r(16, 64, n)),
        "conv": lambda: F.conv2d(r(16, 64, 56, 56), r(64, 64, 3, 3), padding=1),
        "conv 7": lambda: F.conv2d(r(16, 3, 224, 224), r(64, 3, 7, 7), stride=2, padding=3),
        "conv depthwise": lambda: F.conv2d(r(16, 96, 28, 28), r(96, 1, 7, 7), padding=3, groups=96),
        "conv transposed": lambda: F.conv_transpose2d(r(8, 64, 28, 28), r(64, 32, 2, 2), stride=2),
        "conv nhwc": lambda: F.conv2d(r(16, 64, 56, 56).contiguous(memory_format=torch.channels_last), r(64, 64, 3, 3)),
        "batch norm": lambda: F.batch_norm(r(32, 64, 56, 56), None, None, training=True),
        "layer norm": lambda: F.layer_norm(r(n, 4 * n), (4 * n,)),
        "group norm": lambda: F.group_norm(r(16, 64, 56, 56), 32),
        "rms norm": lambda: F.rms_norm(r(n, 4 * n), (4 * n,)),
        "softmax": lambda: F.log_softmax(r(n, 8 * n), -1),
        "sum": lambda: r(4 * n, n).sum(),
        "mean": lambda: r(4 * n, n).mean(0),
        "var": lambda: r(4 * n, n).var(),
        "cumsum": lambda: r(4 * n * n).cumsum(0),
        "cumsum rows": lambda: r(n, 4 * n).cumsum(1),
        "cumprod": lambda: r(4 * n * n).cumprod(0),
        "logcumsumexp": lambda: r(4 * n * n).logcumsumexp(0),
        "logsumexp": lambda: r(n, 8 * n).logsumexp(1),
        "norm": lambda: r(4 * n, n).norm(),
        "attention": lambda: F.scaled_dot_product_attention(r(4, 8, n, 64), r(4, 8, n, 64), r(4, 8, n, 64), is_causal=True),
        "attention dropout": lambda: F.scaled_dot_product_attention(r(4, 8, n, 64), r(4, 8, n, 64), r(4, 8, n, 64), dropout_p=0.1),
        "dropout": lambda: F.dropout(r(n, 4 * n), 0.1, True),
        "embedding": lambda: F.embedding(index, r(50, n)),
        "embedding bag": lambda: F.embedding_bag(index.view(n, -1), r(50, n), mode="sum"),
        "index": lambda: r(50, n)[index],
        "gather": lambda: r(50, n).gather(0, index[: 8 * n].view(-1, 1).expand(-1, n)[:50]),
        "scatter": lambda: r(50, n).scatter(0, index[:50].view(-1, 1).expand(-1, n), r(50, n)),
        "scatter reduce": lambda: torch.zeros(50, device=device, dtype=dtype).scatter_reduce(0, index, r(8 * n), "amax"),
        "index copy": lambda: torch.zeros(50, n, device=device, dtype=dtype).index_copy(0, index[:40], r(40, n)),
        "index reduce": lambda: torch.zeros(50, n, device=device, dtype=dtype).index_reduce(0, index[:400], r(400, n), "prod"),
        "sort": lambda: r(n, 4 * n).sort(),
        "topk": lambda: r(n, 4 * n).topk(50),
        "kthvalue": lambda: torch.randint(0, 9, (n, 64), device=device).to(dtype).kthvalue(5),
        "median": lambda: torch.randint(0, 9, (n, 65), device=device).to(dtype).median(1),
        "mode": lambda: torch.randint(0, 9, (n, 65), device=device).to(dtype).mode(1),
        "max pool": lambda: F.max_pool2d(r(16, 64, 56, 56), 2),
        "avg pool": lambda: F.adaptive_avg_pool2d(r(16, 64, 56, 56), 1),
        "interpolate": lambda: F.interpolate(r(16, 64, 28, 28), scale_factor=2, mode="bilinear"),
        "nll 2d": lambda: _cross_entropy_2d(r(8, 19, 64, 64)),
        "cross entropy": lambda: F.cross_entropy(r(8 * n, 1000), torch.randint(0, 1000, (8 * n,), device=device)),
        "ctc": lambda: F.ctc_loss(r(50, 16, 20).float().log_softmax(2), torch.randint(1, 20, (16, 30), device=device), *(torch.full((16,), n, device=device) for n in (50, 30))),
        "grid sample": lambda: _grid_sample(r(4, 16, 64, 64)),
        "fft": lambda: torch.fft.rfft(r(64, 4096).float()),
        "einsum": lambda: torch.einsum("bhid,bhjd->bhij", r(4, 8, n // 4, 64), r(4, 8, n // 4, 64)),
        "attention full": lambda: F.scaled_dot_product_attention(r(4, 8, n, 64), r(4, 8, n, 64), r(4, 8, n, 64)),
        "attention 128": lambda: F.scaled_dot_product_attention(r(2, 8, n, 128), r(2, 8, n, 128), r(2, 8, n, 128), is_causal=True),
        "attention masked": lambda: F.scaled_dot_product_attention(r(4, 8, n, 64), r(4, 8, n, 64), r(4, 8, n, 64), attn_mask=r(1, 1, n, n)),
        "lstm": lambda: _lstm(r(*((2, 2) if device == "cpu" else (16, 50)), 64)),
        "conv tuned": lambda: F.conv2d(r(16, 64, 56, 56), r(64, 64, 3, 3), padding=1),
        "conv tuned 7": lambda: F.conv2d(r(16, 3, 224, 224), r(64, 3, 7, 7), stride=2, padding=3),
        "conv tuned 1": lambda: F.conv2d(r(16, 256, 56, 56), r(64, 256, 1, 1)),
        "conv tuned large": lambda: F.conv2d(r(64, 64, 112, 112), r(128, 64, 3, 3), padding=1),
        "rand": lambda: torch.rand(n, device=device) + torch.randn(n, device=device),
        "rrelu": lambda: F.rrelu(r(n, n), training=True),
    }  # fmt: skip
    for name, work in works.items():
        _thrice(mode, f"large {name}", work, tuned="tuned" in name)


def _small(size: tuple[int, ...]) -> tuple[int, ...]:
    """Images and square heads as a CPU can take them in float16; kernels of convolutions stay."""
    if len(size) == 4 and size[2] == size[3] > 16:
        return (min(size[0], 2), size[1], 16, 16)
    return size


def _cross_entropy_2d(x: torch.Tensor) -> torch.Tensor:
    classes = torch.randint(0, x.shape[1], (x.shape[0], *x.shape[2:]), device=x.device)
    return F.cross_entropy(x, classes)


def _grid_sample(x: torch.Tensor) -> torch.Tensor:
    grid = torch.randn(x.shape[0], *x.shape[2:], 2, device=x.device, dtype=x.dtype)
    return F.grid_sample(x, grid.clamp(-1, 1))


def _thrice(mode: _Again, name: str, work: Callable[[], Any], *, tuned: bool) -> None:
    """`tuned`: with `cudnn.benchmark`, whose caches each thread has for itself. Once torch's samples are imported, it is set so only."""
    for _ in range(3):
        try:
            with torch.backends.cudnn.flags(enabled=True, benchmark=tuned):
                with mode:
                    work()
                mode.run_again()
        except Exception as error:
            mode.errors.setdefault(name, f"{type(error).__name__}: {str(error)[:160]}")
            break


def attention() -> dict[str, Any]:
    """cuDNN's attention by dtype, head size, length and dropout. Without dropout its seed and offset (outputs 6 and 7), which nobody reads
    then, are whatever lay there."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    device = _device()
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float16):
        for head, length in SHAPES:
            for causal in (False, True):
                for dropout in (0.0, 0.1):
                    mode = _Again(device)
                    heads = (2, 8, length if device == "cuda" else 16, head)
                    q, k, v = (torch.randn(heads, device=device, dtype=dtype) for _ in range(3))
                    words = (
                        f"{str(dtype)[6:]} {head}x{length}{' causal' if causal else ''}, dropout {dropout}"
                    )
                    backends = [SDPBackend.CUDNN_ATTENTION] if device == "cuda" else [SDPBackend.MATH]
                    try:
                        for _ in range(8 if device == "cuda" else 1):
                            with sdpa_kernel(backends), mode:
                                F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
                            mode.run_again()
                    except RuntimeError as error:
                        mode.errors[words] = str(error)[:160]
                    found[words] = {
                        "ops": dict(mode.ops),
                        "differ": {name: dict(ways) for name, ways in mode.differ.items()},
                        "errors": mode.errors,
                    }
    return found


def attention_words(found: dict[str, Any]) -> str:
    ran = {
        words: each for words, each in found.items() if any("cudnn_attention" in name for name in each["ops"])
    }
    other = [words for words, each in ran.items() if each["differ"]]
    return f"{len(ran)} of {len(found)} ran; other bits: {'; '.join(other) or 'none'}"


def _lstm(x: torch.Tensor) -> None:
    layer = torch.nn.LSTM(64, 128, 2, dropout=0.2, batch_first=True).to(x.device, x.dtype)
    layer(x)
