"""memopt's measuring leaves nothing behind that could bring the script down later."""

from __future__ import annotations

from tests.support import warm

SCRIPT = """
import gc, sys
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from memopt.instrument.memory.meter import CpuMeter

meters, peaks = [], []

def after_step(optimizer, args, kwargs):
    if meters:
        peaks.append(meters.pop().stop())
    else:
        meters.append(CpuMeter())
        meters[0].start()

register_optimizer_step_post_hook(after_step)
layer = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(12):
    layer(torch.randn(2048, 64)).relu().sum().backward()
    optimizer.step()
    gc.collect()
print(len(peaks), min(peaks) > 2048 * 64 * 4)
"""


def test_profiles_inside_optimizer_hooks_do_not_crash_a_later_garbage_collection() -> None:
    done = warm.python(["-c", SCRIPT])
    assert (done.returncode, done.stdout) == (0, "6 True\n"), done.stderr
