"""The whole training loop in a thread, as notebooks and servers do."""

import threading

import torch


def train():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 400), torch.nn.ReLU(), torch.nn.Linear(400, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        model(torch.randn(100, 40)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step)


thread = threading.Thread(target=train)
thread.start()
thread.join()
print("joined")
