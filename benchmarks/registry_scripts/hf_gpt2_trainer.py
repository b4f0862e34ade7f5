"""transformers' Trainer on a datasets.Dataset: GPT-2."""

import torch
from datasets import Dataset
from told import tell_loss, tell_state
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

set_seed(0)
rows = torch.randint(0, 1000, (64, 96)).tolist()
data = Dataset.from_dict({"input_ids": rows, "labels": rows}).with_format("torch")
model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=96, n_embd=128, n_layer=4, n_head=4))


class Told(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            tell_loss(state.global_step, logs["loss"])


arguments = TrainingArguments(
    "out",
    max_steps=6,
    per_device_train_batch_size=8,
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    learning_rate=1e-3,
)
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Told()])
trainer.train()
tell_state(model)
