"""torchao: frozen weights in int8, and LoRAs that train beside them."""

import torch
from told import DEVICE, tell_loss, tell_state
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

torch.manual_seed(0)


class Adapted(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.base(x)) + self.up(self.down(x))


model = nn.Sequential(*[Adapted(256) for _ in range(4)]).to(DEVICE)
quantize_(model, Int8WeightOnlyConfig(), lambda module, name: name.endswith("base"))
trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
optimizer = torch.optim.AdamW(trained.values(), lr=1e-3)
for step in range(6):
    loss = model(torch.randn(128, 256, device=DEVICE)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    tell_loss(step, loss.detach())
tell_state(nn.ParameterDict({name.replace(".", "_"): each for name, each in trained.items()}), optimizer)
