"""Children forked in the middle of training, one of which falls through to the end of the script."""

import os
import sys

import torch

torch.manual_seed(0)
model = torch.nn.Linear(50, 50)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
child = False
for step in range(5):
    loss = model(torch.randn(20, 50)).square().mean()
    if step in (0, 2) and not child:
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            print("child ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        else:
            child = True
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if child:
    sys.exit(6)
print("parent")
