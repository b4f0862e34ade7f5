"""timm: fine-tuning a ViT with layer-wise learning rates and its gradient checkpointing."""

import timm
import torch
from timm.optim import create_optimizer_v2
from told import DEVICE, tell_loss, tell_state

torch.manual_seed(0)
model = timm.create_model(
    "vit_tiny_patch16_224", num_classes=10, img_size=64, depth=4, drop_path_rate=0.1
).to(DEVICE)
model.set_grad_checkpointing()
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
scaler = torch.amp.GradScaler(DEVICE, enabled=DEVICE == "cuda")
for step in range(6):
    images, labels = torch.randn(16, 3, 64, 64, device=DEVICE), torch.randint(0, 10, (16,), device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    tell_loss(step, loss.detach())
tell_state(model, optimizer)
