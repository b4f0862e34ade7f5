"""torchao: quantization-aware training of a small transformer, 8-bit activations and 4-bit weights."""

import torch
from told import DEVICE, tell_loss, tell_state
from torch import nn
from torchao.quantization.qat import Int8DynActInt4WeightQATQuantizer

torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(300, 128),
    *[
        nn.Sequential(
            nn.LayerNorm(128), nn.Linear(128, 256, bias=False), nn.GELU(), nn.Linear(256, 128, bias=False)
        )
        for _ in range(3)
    ],
    nn.Linear(128, 300, bias=False),
)
model = Int8DynActInt4WeightQATQuantizer(groupsize=32).prepare(model).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(6):
    ids = torch.randint(0, 300, (8, 64), device=DEVICE)
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    tell_loss(step, loss.detach())
tell_state(model, optimizer)
