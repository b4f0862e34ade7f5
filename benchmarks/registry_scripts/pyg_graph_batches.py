"""PyG: batches of many small graphs, of another size every time."""

import torch
from told import DEVICE, tell_loss, tell_state
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, SAGEConv, global_mean_pool

torch.manual_seed(0)


def graph(seed: int) -> Data:
    nodes = 20 + seed % 7
    return Data(
        x=torch.randn(nodes, 32),
        edge_index=torch.randint(0, nodes, (2, 4 * nodes)),
        y=torch.tensor([seed % 3]),
    )


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = GINConv(
            torch.nn.Sequential(
                torch.nn.Linear(32, 96), torch.nn.BatchNorm1d(96), torch.nn.ReLU(), torch.nn.Linear(96, 96)
            )
        )
        self.two, self.out = SAGEConv(96, 96), torch.nn.Linear(96, 3)

    def forward(self, data):
        x = torch.relu(self.one(data.x, data.edge_index))
        return self.out(global_mean_pool(self.two(x, data.edge_index).relu(), data.batch))


model = Net().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, batch in enumerate(DataLoader([graph(i) for i in range(256)], batch_size=32, shuffle=True)):
    batch = batch.to(DEVICE)
    loss = torch.nn.functional.cross_entropy(model(batch), batch.y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    tell_loss(step, loss.detach())
tell_state(model, optimizer)
