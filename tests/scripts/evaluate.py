"""Evaluation under no_grad and in inference mode between training steps."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(32, 128), torch.nn.BatchNorm1d(128), torch.nn.ReLU(), torch.nn.Linear(128, 4)
)
optimizer = torch.optim.Adam(model.parameters())
for step in range(5):
    model.train()
    loss = model(torch.randn(64, 32)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        for _ in range(step + 1):
            model(torch.randn(64, 32))
    with torch.inference_mode():
        print(step, model(torch.randn(8, 32)).shape)
