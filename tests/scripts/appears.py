"""Tensors whose memory no op made: from numpy, from bytes, from lists, from a file, and shared."""

import io

import numpy
import torch

torch.manual_seed(0)
model = torch.nn.Linear(1000, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
file = io.BytesIO()
torch.save(torch.ones(50, 1000), file)
for step in range(5):
    file.seek(0)
    parts = [
        torch.from_numpy(numpy.ones((100, 1000), dtype=numpy.float32)),
        torch.frombuffer(bytearray(4 * 1000 * 30), dtype=torch.float32).view(30, 1000),
        torch.tensor([[float(i) for i in range(1000)]] * 20),
        torch.load(file),
        torch.ones(10, 1000).share_memory_(),
    ]
    loss = sum(model(part).square().mean() for part in parts)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step)
