"""PyG: a GCN on one whole graph, a sparse adjacency beside it."""

import torch
from told import DEVICE, tell_loss, tell_state
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv
from torch_geometric.utils import to_torch_coo_tensor

torch.manual_seed(0)
data = Data(
    x=torch.randn(800, 64), edge_index=torch.randint(0, 800, (2, 6000)), y=torch.randint(0, 7, (800,))
).to(DEVICE)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = GCNConv(64, 128), GATConv(128, 16, heads=4), torch.nn.Linear(64, 7)

    def forward(self, x, edges, adjacency):
        x = torch.relu(self.one(x, adjacency))
        x = torch.nn.functional.dropout(torch.relu(self.two(x, edges)), 0.5, self.training)
        return self.three(x)


model = Net().to(DEVICE)
adjacency = to_torch_coo_tensor(data.edge_index, size=800)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for step in range(6):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(data.x, data.edge_index, adjacency), data.y)
    loss.backward()
    optimizer.step()
    tell_loss(step, loss.detach())
tell_state(model, optimizer)
