"""A mixture of experts whose tokens go where the router sends them: Mixtral."""

import torch
from told import DEVICE, tell_loss, tell_state
from transformers import MixtralConfig, MixtralForCausalLM

torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=500,
    hidden_size=96,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    output_router_logits=True,
)
model = MixtralForCausalLM(config).to(DEVICE).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(6):
    ids = torch.randint(0, 500, (4, 64), device=DEVICE)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    tell_loss(step, loss.detach())
tell_state(model, optimizer)
