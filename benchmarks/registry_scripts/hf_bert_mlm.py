"""Masked language modelling with datasets.map, a tokenizers tokenizer and a collator; a loader with workers."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from told import DEVICE, tell_loss, tell_state
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)

torch.manual_seed(0)
words = ["[PAD]", "[UNK]", "[MASK]", "[CLS]", "[SEP]", *[f"w{i}" for i in range(500)]]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
fast = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    pad_token="[PAD]",
    mask_token="[MASK]",
    cls_token="[CLS]",
    sep_token="[SEP]",
    unk_token="[UNK]",
)
texts = Dataset.from_dict(
    {"text": [" ".join(f"w{int(i)}" for i in torch.randint(0, 500, (64,))) for _ in range(80)]}
)
data = texts.map(lambda row: fast(row["text"], truncation=True, max_length=64), remove_columns=["text"])
loader = DataLoader(data, batch_size=10, num_workers=2, collate_fn=DataCollatorForLanguageModeling(fast))
model = BertForMaskedLM(
    BertConfig(
        vocab_size=512, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256
    )
).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 2, 8)
for step, batch in enumerate(loader):
    loss = model(**{key: value.to(DEVICE) for key, value in batch.items()}).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    tell_loss(step, loss.detach())
tell_state(model, optimizer)
