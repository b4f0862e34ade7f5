"""Updates by hand: no optimizer object anywhere."""

import torch

torch.manual_seed(0)
weights = torch.randn(100, 50, requires_grad=True)
for step in range(6):
    x = torch.randn(400, 100)
    loss = (x @ weights).tanh().square().mean()
    loss.backward()
    with torch.no_grad():
        weights -= 0.1 * weights.grad
        weights.grad = None
    print(step)
