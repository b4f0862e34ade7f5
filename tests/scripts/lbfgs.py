"""A closure that runs forward and backward several times inside one step."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 200), torch.nn.Tanh(), torch.nn.Linear(200, 1))
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=3)
x, y = torch.randn(300, 20), torch.randn(300, 1)


def closure():
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss


for step in range(5):
    print(step, optimizer.step(closure).item())
