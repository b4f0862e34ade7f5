"""bitsandbytes' 8-bit Adam."""

import bitsandbytes as bnb
import torch
from told import DEVICE, tell_loss, tell_state
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(1000, 128),
    nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 256, batch_first=True), 3),
    nn.Linear(128, 1000),
).to(DEVICE)
optimizer = bnb.optim.AdamW8bit(model.parameters(), lr=1e-3)
for step in range(6):
    ids = torch.randint(0, 1000, (8, 64), device=DEVICE)
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    tell_loss(step, loss.detach())
tell_state(model)
