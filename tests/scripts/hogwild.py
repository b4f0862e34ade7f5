"""Two processes train one model that they share; this one trains nothing."""

import sys

import torch
import torch.multiprocessing as mp


def train(rank, net):
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        net(torch.ones(512, 64)).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    mp.set_start_method(sys.argv[1])
    layers = (torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    shared = torch.nn.Sequential(*layers).share_memory()
    processes = [mp.Process(target=train, args=(rank, shared)) for rank in range(2)]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    print([each.exitcode for each in processes])
