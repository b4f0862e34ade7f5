"""What a lint's finding asks for where the line is a library's: the argument through which its user changes it."""

from __future__ import annotations

_FUSED = 'optim="adamw_torch_fused" in TrainingArguments, or AdamW(..., fused=True)'
_SDPA = 'attn_implementation="sdpa" in from_pretrained() or in the configuration'
_BUCKETS = "DistributedDataParallelKwargs(gradient_as_bucket_view=True) among Accelerator's kwargs_handlers"
_LIGER = "use_liger_kernel=True in TrainingArguments (other kernels: the last bits differ)"

ARGUMENTS = {
    ("attention-without-sdpa", "transformers"): _SDPA,
    ("attention-without-sdpa", "diffusers"): "model.set_attn_processor(AttnProcessor2_0())",
    ("attention-without-sdpa", "timm"): "timm.layers.set_fused_attn(True) before create_model()",
    ("materialised-mask", "transformers"): _SDPA,
    ("gelu-by-hand", "transformers"): 'hidden_act or activation_function "gelu_pytorch_tanh" in the configuration, instead of "gelu_new" (the same function; the last bits differ)',
    ("logits-upcast", "transformers"): _LIGER,
    ("norm-by-hand", "transformers"): _LIGER,
    ("foreach-optimizer-peak", "transformers"): _FUSED,
    ("foreach-optimizer-peak", "accelerate"): _FUSED,
    ("foreach-optimizer-peak", "lightning"): "AdamW(..., fused=True) in configure_optimizers",
    ("foreach-optimizer-peak", "pytorch_lightning"): "AdamW(..., fused=True) in configure_optimizers",
    ("gradients-copied-into-buckets", "transformers"): _BUCKETS,
    ("gradients-copied-into-buckets", "accelerate"): _BUCKETS,
    ("gradients-copied-into-buckets", "lightning"): "strategy=DDPStrategy(gradient_as_bucket_view=True)",
    ("gradients-copied-into-buckets", "pytorch_lightning"): "strategy=DDPStrategy(gradient_as_bucket_view=True)",
}  # fmt: skip
"""(lint, library) -> what its user writes."""


def instead(lint: str, line: str, usual: str) -> str:
    """What to write: `usual` where the line is the user's own."""
    library = line.partition(": ")[0] if ": " in line else ""
    if not library:
        return usual
    argument = ARGUMENTS.get((lint, library))
    return argument or f"{usual} (the line is {library}'s: it changes there, or a plan does without)"
