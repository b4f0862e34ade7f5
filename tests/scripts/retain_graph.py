"""Two backward calls through one graph, and a gradient of a gradient."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 300), torch.nn.Sigmoid(), torch.nn.Linear(300, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    x = torch.randn(200, 16, requires_grad=True)
    out = model(x)
    out.mean().backward(retain_graph=True)
    out.square().mean().backward(retain_graph=True)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    slope.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step)
