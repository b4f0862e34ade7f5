"""An LSTM that forecasts sums of sines, trained on sequences of varying frequency.

python examples/lstm.py --steps 60
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def waves(count, length, features):
    """`features` channels, each a sum of two sines with random frequency and phase, plus a little noise."""
    time = torch.arange(length + 1).view(1, -1, 1, 1) / 10
    frequency = 0.3 + 2 * torch.rand(count, 1, features, 2)
    phase = 6.28 * torch.rand(count, 1, features, 2)
    series = torch.sin(frequency * time + phase).sum(-1)
    return series + 0.05 * torch.randn_like(series)


class Forecaster(nn.Module):
    def __init__(self, features, hidden, layers):
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.lstm = nn.LSTM(features, hidden, layers, dropout=0.2, batch_first=True)
        self.head = nn.Sequential(
            nn.Linear(hidden, hidden), nn.Tanh(), nn.Dropout(0.2), nn.Linear(hidden, features)
        )

    def forward(self, x, state=None):
        hidden, state = self.lstm(self.norm(x), state)
        return x + self.head(hidden), state


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    series = waves(512, args.length, features=8)
    loader = DataLoader(TensorDataset(series), args.batch, shuffle=True, drop_last=True)
    model = Forecaster(8, args.hidden, layers=3).to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.5)
    criterion = nn.SmoothL1Loss()

    step = 0
    while step < args.steps:
        for (batch,) in loader:
            batch = batch.to(device)
            forecast, _ = model(batch[:, :-1])
            loss = criterion(forecast, batch[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            print(f"step {step} loss {loss.item():.6f}", flush=True)
            step += 1
            if step >= args.steps:
                break

    model.eval()
    with torch.no_grad():
        start = waves(1, args.length, features=8).to(device)
        value, state = model(start[:, :-1])
        path = [value[:, -1:]]
        for _ in range(8):
            value, state = model(path[-1], state)
            path.append(value)
    print("forecast", " ".join(f"{v:.3f}" for v in torch.cat(path, 1)[0, :, 0].tolist()))


if __name__ == "__main__":
    main()
