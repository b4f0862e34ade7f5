"""Recurrent layers on a pretended GPU: one kernel with a reserve space, in exact bytes on toys; every kind runs a whole step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memopt.estimators.fake.recorder import FakeRecorder
from memopt.estimators.fake.script.request import Request
from memopt.estimators.fake.script.run import record_script

STEPS, BATCH, INPUTS, HIDDEN = 50, 30, 40, 64


def test_an_lstm_keeps_its_reserve_space_until_backward() -> None:
    with FakeRecorder("cuda") as recorder:
        layer = nn.LSTM(INPUTS, HIDDEN, 2, bidirectional=True)
        weights = [recorder.parameter(w.shape) for w in layer._flat_weights]
        x, zeros = recorder.fake((STEPS, BATCH, INPUTS)), recorder.fake((4, BATCH, HIDDEN))
        output, _, _ = torch.ops.aten.lstm.input(x, [zeros, zeros], weights, True, 2, 0.0, True, True, False)
        forward = {row.size_bytes: row.category for row in recorder.rows}
        assert tuple(output.shape) == (STEPS, BATCH, 2 * HIDDEN)
        output.sum().backward()
        backward = [row for row in recorder.rows if row.phase == "backward"]
        assert [w.grad.shape for w in weights] == [w.shape for w in weights]  # type: ignore[union-attr]
    units = STEPS * BATCH * HIDDEN * 2  # of one layer, both directions
    assert units * 2 * 6 * 4 in forward
    assert forward[units * 4 * 4] == "workspace"
    assert units * 4 in forward
    flat = sum(w.numel() for w in weights) * 4
    assert sum(row.size_bytes == flat for row in backward) == 1


def test_cells_run_fused_and_keep_their_gates_and_a_workspace() -> None:
    """Of one step: two products of the gates, state and workspace stay for backward; on the host nothing of it."""
    batch, units = 32, 128
    for cell, gates, saved in ((nn.LSTMCell(64, units), 4, 4 + 4 + 4 + 1 + 1), (nn.GRUCell(64, units), 3, 3 + 3 + 5 + 1)):  # fmt: skip
        with FakeRecorder("cuda") as recorder:
            weights = [recorder.parameter(w.shape) for w in cell.parameters()]
            x, h, c = (recorder.fake((batch, size)) for size in (64, units, units))
            before = recorder.live_bytes
            kernel: Any = torch.ops.aten.lstm_cell if gates == 4 else torch.ops.aten.gru_cell
            new = kernel(x, [h, c] if gates == 4 else h, *weights)
            blas = sum(row.size_bytes for row in recorder.rows if row.op == "cuBLAS workspace")
            assert recorder.live_bytes - before - blas == saved * batch * units * 4
            (new[0] if gates == 4 else new).sum().backward()
            assert [w.grad.shape for w in weights] == [w.shape for w in weights]  # type: ignore[union-attr]


SCRIPT = """
import torch, torch.nn as nn
assert torch.cuda.is_available()
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.layers = nn.ModuleList([
            nn.LSTM(32, 48, 2, dropout=0.2, proj_size=32), nn.GRU(32, 16, bidirectional=True), nn.RNN(32, 32, nonlinearity="relu"), nn.RNN(32, 32),
        ])
        self.out = nn.Linear(32, 100)
        self.cells = nn.ModuleList([nn.LSTMCell(32, 32), nn.GRUCell(32, 32, bias=False)])
    def forward(self, ids, lengths):
        x = self.embed(ids)
        h, c = self.cells[0](x[0])
        x = x + self.cells[1](x[1], h) + c
        for layer in self.layers[:2]:
            x, _ = layer(x)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths)
        for layer in self.layers[2:]:
            packed, _ = layer(packed)
        return self.out(nn.utils.rnn.pad_packed_sequence(packed)[0])
model = Model().cuda()
optimizer = torch.optim.Adam(model.parameters())
lengths = torch.tensor([20, 18, 18, 5])
for half in (False, True, True):
    ids = torch.randint(0, 100, (20, 4)).cuda()
    with torch.autocast("cuda", dtype=torch.float16, enabled=half):
        out = model(ids, lengths)
        assert out.dtype is (torch.float16 if half else torch.float32)
        loss = nn.functional.cross_entropy(out.flatten(0, 1), ids.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
    optimizer.step()
host = nn.LSTMCell(8, 8)(nn.GRUCell(8, 8)(nn.GRU(8, 8)(torch.randn(3, 2, 8))[0][0]))[0]
assert not host.is_cuda
"""


def test_every_kind_trains_on_a_pretended_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    recording, partial = record_script(Request(argv=["train.py"], target="cuda", steps=9))
    assert not partial
    assert any("cuDNN" in note for note in recording.notes)
