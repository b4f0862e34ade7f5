"""A recurrence without modules: each step's graph is 5,400 nodes deep."""

import torch

weight = torch.nn.Parameter(torch.linspace(-1, 1, 8))
optimizer = torch.optim.SGD([weight], lr=0.01)
for _ in range(2):
    state = torch.ones(8)
    for _ in range(1800):
        state = torch.tanh(state * weight + 0.1)
    loss = state.sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del state, loss
print("done", weight.detach().sum().item().hex())
