"""peft: DoRA on a Qwen in bfloat16, a loop by hand."""

import torch
from peft import LoraConfig, get_peft_model
from told import DEVICE, tell_loss, tell_state
from transformers import Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=500,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = get_peft_model(
    Qwen2ForCausalLM(config).to(torch.bfloat16),
    LoraConfig(r=8, use_dora=True, lora_dropout=0.05, target_modules=["q_proj", "up_proj"]),
).to(DEVICE)
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
for step in range(6):
    ids = torch.randint(0, 500, (8, 64), device=DEVICE)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    tell_loss(step, loss.detach())
tell_state(model, optimizer)
