"""timm: a ResNet with mixup, an EMA, its scheduler and its Lamb."""

import numpy
import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from told import DEVICE, tell_loss, tell_state

torch.manual_seed(0)
numpy.random.seed(0)
model = timm.create_model("resnet18", num_classes=10, drop_path_rate=0.1).to(DEVICE)
ema = ModelEmaV3(model, decay=0.99)
optimizer = create_optimizer_v2(model, opt="lamb", lr=1e-3, weight_decay=0.02)
schedule = CosineLRScheduler(optimizer, t_initial=6)
mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=10)
lossy = SoftTargetCrossEntropy()
for step in range(6):
    images, labels = mixup(
        torch.randn(8, 3, 64, 64, device=DEVICE), torch.randint(0, 10, (8,), device=DEVICE)
    )
    loss = lossy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ema.update(model, step)
    schedule.step(step)
    tell_loss(step, loss.detach())
tell_state(model, optimizer)
