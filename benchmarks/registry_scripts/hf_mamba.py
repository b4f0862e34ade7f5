"""Mamba's sequential path: a Python loop over positions in every layer."""

import torch
from told import DEVICE, tell_loss, tell_state
from transformers import MambaConfig, MambaForCausalLM

torch.manual_seed(0)
model = (
    MambaForCausalLM(MambaConfig(vocab_size=300, hidden_size=64, num_hidden_layers=2, state_size=8))
    .to(DEVICE)
    .train()
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(6):
    ids = torch.randint(0, 300, (4, 48), device=DEVICE)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    tell_loss(step, loss.detach())
tell_state(model, optimizer)
