"""DataLoader workers, started by the method in the first argument; numpy in, tensors out."""

import sys

import numpy
import torch


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.from_numpy(numpy.full(1000, index, dtype=numpy.float32)), index % 10


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(1000, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loader = torch.utils.data.DataLoader(
        Rows(), batch_size=10, num_workers=1, multiprocessing_context=sys.argv[1]
    )
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{loss.item():.3f}")


if __name__ == "__main__":
    main()
