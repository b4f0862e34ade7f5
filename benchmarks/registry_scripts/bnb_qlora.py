"""QLoRA: bitsandbytes' 4-bit layers under a peft LoRA."""

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model
from told import DEVICE, tell_loss
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=304,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config)
for layer in model.model.layers:
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        old = getattr(layer.self_attn, name)
        new = bnb.nn.Linear4bit(
            old.in_features, old.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
        )
        new.weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, quant_type="nf4")
        setattr(layer.self_attn, name, new)
model = get_peft_model(model.to(DEVICE), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
trained = [each for each in model.parameters() if each.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-3)
for step in range(6):
    ids = torch.randint(0, 304, (8, 64), device=DEVICE)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    tell_loss(step, loss.detach())
print("state", sum(float(each.detach().double().sum()) for each in trained).hex())
