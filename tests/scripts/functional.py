"""torch.func inside a training step: per-sample gradients by vmap(grad), and a Jacobian product."""

import torch
from torch.func import functional_call, grad, jvp, vmap

torch.manual_seed(0)
model = torch.nn.Linear(30, 20)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def loss_of(parameters, x, y):
    return (functional_call(model, parameters, (x,)) - y).square().mean()


for step in range(4):
    x, y = torch.randn(64, 30), torch.randn(64, 20)
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    each = vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, x, y)
    tangent = jvp(model, (x,), (torch.ones_like(x),))[1]
    weight = 1 / (1 + each["weight"].flatten(1).norm(dim=1))
    loss = ((model(x) - y).square().mean(1) * weight).mean() + tangent.detach().mean() * 0
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
