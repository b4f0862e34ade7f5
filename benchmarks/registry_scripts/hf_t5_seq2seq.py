"""transformers' Seq2SeqTrainer: T5 with Adafactor, accumulation and an evaluation that generates."""

import torch
from datasets import Dataset
from told import tell_loss, tell_state
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

set_seed(0)
rows = torch.randint(2, 300, (48, 40)).tolist()
data = Dataset.from_dict({"input_ids": rows, "labels": [row[:20] for row in rows]}).with_format("torch")
config = T5Config(
    vocab_size=300, d_model=96, d_kv=24, d_ff=192, num_layers=2, num_heads=4, decoder_start_token_id=0
)
model = T5ForConditionalGeneration(config)
arguments = Seq2SeqTrainingArguments(
    "out",
    max_steps=5,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    optim="adafactor",
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    eval_strategy="steps",
    eval_steps=4,
    predict_with_generate=True,
    generation_max_length=8,
)
trainer = Seq2SeqTrainer(model, arguments, train_dataset=data, eval_dataset=data.select(range(8)))
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        tell_loss(entry["step"], entry["loss"])
tell_state(model)
