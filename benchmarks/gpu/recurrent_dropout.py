"""An LSTM with dropout and a head with dropout, on a GPU: `python -m benchmarks.gpu.recurrent_dropout RNN HEAD` (probabilities).

Prints each step's loss, a digest of the gradients and one of the generator's state. Plain, and under a plan of
`benchmarks.gpu.everything PROFILE recompute PLAN`, it must print the same.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.run_scripts import repeatable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Forecaster(nn.Module):
    def __init__(self, rnn: float, head: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.lstm = nn.LSTM(8, 128, 3, dropout=rnn, batch_first=True)
        self.head = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Dropout(head), nn.Linear(128, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.head(self.lstm(self.norm(x))[0])


def checks() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """(name, function) of each combination of dropout."""
    for rnn in ("0.0", "0.2"):
        for head in ("0.0", "0.2"):
            yield f"{rnn} {head}", partial(_check, rnn, head)


def _check(rnn: str, head: str) -> dict[str, Any]:
    """Does it print the same under a plan that recomputes all it can?"""
    from benchmarks.gpu.jobs import MEMOPT, execute

    script = ["-m", "benchmarks.gpu.recurrent_dropout", rnn, head]
    with tempfile.TemporaryDirectory() as folder:
        plain = [execute([MEMOPT[0], *script], folder)[0] for _ in range(2)]
        execute([*MEMOPT, "profile", "-q", "-o", "p.json.gz", *script], folder)
        execute([MEMOPT[0], "-m", "benchmarks.gpu.everything", "p.json.gz", "recompute", "plan.json"], folder)
        enforced, err, _ = execute([*MEMOPT, "apply", "plan.json"], folder, may_fail=True)
    found = {"repeats": plain[0] == plain[1], "same": enforced == plain[0], "words": err.splitlines()[-3:]}
    if found["repeats"] and not found["same"]:
        found["failed"] = f"other output than plain's: {enforced}\n{plain[0]}"
    return found


def main() -> None:
    """Train eight steps."""
    repeatable()
    torch.manual_seed(0)
    model = Forecaster(float(sys.argv[1]), float(sys.argv[2])).to(DEVICE)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    data = torch.randn(8, 64, 97, 8) if DEVICE == "cuda" else torch.randn(3, 2, 9, 8)
    for step, batch in enumerate(data):
        batch = batch.to(DEVICE)
        loss = nn.functional.smooth_l1_loss(model(batch[:, :-1]), batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        gradients = b"".join(each.grad.cpu().numpy().tobytes() for each in model.parameters() if each.grad is not None)  # fmt: skip
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        drawn = (torch.cuda if DEVICE == "cuda" else torch).get_rng_state().numpy().tobytes()
        print(step, loss.item().hex(), *(hashlib.sha256(each).hexdigest()[:8] for each in (gradients, drawn)), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
