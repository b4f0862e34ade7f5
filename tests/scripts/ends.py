"""Ends as its first argument says, in step number two of its arguments (from 0)."""

import atexit
import os
import signal
import sys
import time

import torch

HOW, WHEN = sys.argv[1], int(sys.argv[2])


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(64, 512)
        self.second = torch.nn.Linear(512, 8)
        self.step = 0

    def forward(self, x):
        hidden = self.first(x).relu()
        if self.step == WHEN:
            end(hidden)
        self.step += 1
        return self.second(hidden)


def end(hidden):
    if HOW == "raise":
        raise ValueError("no good")
    if HOW == "memory":
        torch.empty(2**50)
    if HOW == "exit":
        sys.exit(3)
    if HOW == "hard":
        os._exit(4)
    if HOW == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    if HOW == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    if HOW == "shape":
        hidden @ torch.zeros(3, 3)


atexit.register(print, "goodbye")
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters())
for step in range(WHEN if HOW == "end" else WHEN + 4):
    loss = model(torch.randn(128, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step)
print("the last line")
