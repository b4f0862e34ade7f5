"""Public shapes of language models, by the last part of their name on the hub in lower case, and how to build one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from .lm_gpt2 import GPT2
from .lm_gpt_neo import GPTNeo
from .lm_llama import Llama
from .lm_neox import NeoX
from .lm_opt import OPT
from .lm_t5 import T5

_CEREBRAS = partial(GPT2, positions=2048, dropout=0.0, exact_gelu=True)
_QWEN2 = partial(Llama, vocab=151936, biased=True)
_QWEN3 = partial(Llama, vocab=151936, normed=True, dims=128)
_LLAMA3 = partial(Llama, vocab=128256)
_FLAN = partial(T5, gated=True)


def _shape(make: Callable[..., nn.Module], **sizes: Any) -> Callable[[], nn.Module]:
    return partial(make, **sizes)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "distilgpt2": _shape(GPT2, layers=6),
    "gpt2": _shape(GPT2),
    "gpt2-medium": _shape(GPT2, width=1024, layers=24, heads=16),
    "gpt2-large": _shape(GPT2, width=1280, layers=36, heads=20),
    "cerebras-gpt-111m": _shape(_CEREBRAS, layers=10),
    "cerebras-gpt-256m": _shape(_CEREBRAS, width=1088, layers=14, heads=17),
    "cerebras-gpt-590m": _shape(_CEREBRAS, width=1536, layers=18, heads=12),
    "gpt-neo-125m": _shape(GPTNeo),
    "gpt-neo-1.3b": _shape(GPTNeo, width=2048, layers=24, heads=16),
    "opt-125m": _shape(OPT),
    "opt-350m": _shape(OPT, width=1024, layers=24, heads=16, embedding=512, norm_first=False),
    "opt-1.3b": _shape(OPT, width=2048, layers=24, heads=32),
    "pythia-14m": _shape(NeoX, width=128, layers=6, heads=4),
    "pythia-31m": _shape(NeoX, width=256, layers=6, heads=8),
    "pythia-70m": _shape(NeoX, width=512, layers=6, heads=8),
    "pythia-160m": _shape(NeoX, width=768, layers=12, heads=12),
    "pythia-410m": _shape(NeoX, width=1024, layers=24, heads=16),
    "pythia-1b": _shape(NeoX, width=2048, layers=16, heads=8),
    "pythia-1.4b": _shape(NeoX, width=2048, layers=24, heads=16),
    "pythia-2.8b": _shape(NeoX, width=2560, layers=32, heads=32),
    "qwen2-0.5b": _shape(_QWEN2, width=896, inner=4864, layers=24, heads=14, kv=2),
    "qwen2.5-0.5b": _shape(_QWEN2, width=896, inner=4864, layers=24, heads=14, kv=2),
    "qwen2-1.5b": _shape(_QWEN2, width=1536, inner=8960, layers=28, heads=12, kv=2),
    "qwen2.5-1.5b": _shape(_QWEN2, width=1536, inner=8960, layers=28, heads=12, kv=2),
    "qwen2.5-3b": _shape(_QWEN2, width=2048, inner=11008, layers=36, heads=16, kv=2),
    "deepseek-r1-distill-qwen-1.5b": _shape(_QWEN2, width=1536, inner=8960, layers=28, heads=12, kv=2, tied=False),
    "qwen3-0.6b": _shape(_QWEN3, width=1024, inner=3072, layers=28, heads=16, kv=8),
    "qwen3-1.7b": _shape(_QWEN3, width=2048, inner=6144, layers=28, heads=16, kv=8),
    "qwen3-4b": _shape(_QWEN3, width=2560, inner=9728, layers=36, heads=32, kv=8),
    "llama-3.2-1b": _shape(_LLAMA3, width=2048, inner=8192, layers=16, heads=32, kv=8),
    "llama-3.2-3b": _shape(_LLAMA3, width=3072, inner=8192, layers=28, heads=24, kv=8),
    "tinyllama-1.1b": _shape(Llama, vocab=32000, width=2048, inner=5632, layers=22, heads=32, kv=4, tied=False),
    "smollm2-135m": _shape(Llama, vocab=49152, width=576, inner=1536, layers=30, heads=9, kv=3),
    "smollm2-360m": _shape(Llama, vocab=49152, width=960, inner=2560, layers=32, heads=15, kv=5),
    "gemma-2-2b": _shape(Llama, vocab=256000, width=2304, inner=9216, layers=26, heads=8, kv=4, dims=256, softcap=True),
    "t5-small": _shape(T5, width=512, inner=2048, layers=6, heads=8),
    "t5-base": _shape(T5, width=768, inner=3072, layers=12, heads=12),
    "flan-t5-small": _shape(_FLAN, width=512, inner=1024, layers=8, heads=6),
    "flan-t5-base": _shape(_FLAN, width=768, inner=2048, layers=12, heads=12),
}  # fmt: skip


def known_as(identity: str) -> str | None:
    """The key in `MODELS` of a hub name (`facebook/opt-125m`, `Qwen/Qwen2.5-0.5B-Instruct`); None for a stranger."""
    name = identity.rpartition("/")[2].lower()
    for suffix in ("", "-instruct", "-base", "-it", "-deduped", "-chat"):
        if name.removesuffix(suffix) in MODELS:
            return name.removesuffix(suffix)
    return None
