"""TRL's GRPOTrainer: generation, then a step, in every iteration."""

from datasets import Dataset
from told import tell_loss, tell_state
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer
from words import invented, sentence

set_seed(0)
data = Dataset.from_dict({"prompt": [sentence(i, 8) for i in range(32)]})
config = LlamaConfig(
    vocab_size=304,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
    eos_token_id=None,
)
arguments = GRPOConfig(
    "out",
    max_steps=6,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=12,
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    bf16=False,
    gradient_checkpointing=False,
    learning_rate=1e-3,
)
trainer = GRPOTrainer(
    LlamaForCausalLM(config),
    reward_funcs=lambda completions, **_: [float(len(set(text.split()))) for text in completions],
    args=arguments,
    train_dataset=data,
    processing_class=invented(),
)
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        tell_loss(entry["step"], entry["loss"])
tell_state(trainer.model)
