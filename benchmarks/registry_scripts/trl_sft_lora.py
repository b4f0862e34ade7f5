"""TRL's SFTTrainer on a Llama with a peft LoRA."""

from datasets import Dataset
from peft import LoraConfig
from told import tell_loss, tell_state
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer
from words import invented, sentence

set_seed(0)
data = Dataset.from_dict({"text": [sentence(i, 60) for i in range(64)]})
config = LlamaConfig(
    vocab_size=304,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
)
arguments = SFTConfig(
    "out",
    max_steps=6,
    per_device_train_batch_size=8,
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    max_length=64,
    bf16=False,
    use_cpu=False,
    gradient_checkpointing=False,
    learning_rate=1e-3,
)
trainer = SFTTrainer(
    LlamaForCausalLM(config),
    arguments,
    train_dataset=data,
    processing_class=invented(),
    peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj", "down_proj"]),
)
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        tell_loss(entry["step"], entry["loss"])
tell_state(trainer.model)
