"""torch.utils.checkpoint in the script itself, both kinds."""

import torch
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
blocks = torch.nn.ModuleList(
    torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)) for _ in range(4)
)
optimizer = torch.optim.SGD(blocks.parameters(), lr=0.01)
for step in range(4):
    x = torch.randn(256, 64, requires_grad=True)
    for number, block in enumerate(blocks):
        x = checkpoint(block, x, use_reentrant=number % 2 == 0)
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step)
