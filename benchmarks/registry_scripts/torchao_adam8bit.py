"""torchao's 8-bit AdamW, whose state is a tensor subclass."""

import torch
from told import DEVICE, tell_loss, tell_state
from torch import nn
from torchao.optim import AdamW8bit

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.LayerNorm(512), nn.Linear(512, 64)
).to(DEVICE)
optimizer = AdamW8bit(model.parameters(), lr=1e-3)
for step in range(6):
    x = torch.randn(256, 256, device=DEVICE)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    tell_loss(step, loss.detach())
tell_state(model)
