"""Four backward calls before each step, and clipping."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 400), torch.nn.GELU(), torch.nn.Linear(400, 10))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(5):
    for _ in range(4):
        loss = torch.nn.functional.cross_entropy(model(torch.randn(128, 32)), torch.randint(0, 10, (128,)))
        (loss / 4).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step)
