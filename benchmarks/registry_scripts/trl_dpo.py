"""TRL's DPOTrainer with a reference model."""

from datasets import Dataset
from told import tell_loss, tell_state
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import DPOConfig, DPOTrainer
from words import invented, sentence

set_seed(0)
data = Dataset.from_dict(
    {
        "prompt": [sentence(i, 20) for i in range(48)],
        "chosen": [" " + sentence(i + 99, 30) for i in range(48)],
        "rejected": [" " + sentence(i + 200, 30) for i in range(48)],
    }
)
config = LlamaConfig(
    vocab_size=304,
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=128,
    pad_token_id=0,
)
model = LlamaForCausalLM(config)
frozen = LlamaForCausalLM(config)
frozen.load_state_dict(model.state_dict())
arguments = DPOConfig(
    "out",
    max_steps=6,
    per_device_train_batch_size=4,
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    bf16=False,
    gradient_checkpointing=False,
    learning_rate=1e-3,
)
trainer = DPOTrainer(model, frozen, args=arguments, train_dataset=data, processing_class=invented())
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        tell_loss(entry["step"], entry["loss"])
tell_state(model)
