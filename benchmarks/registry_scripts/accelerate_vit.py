"""accelerate: a ViT with accumulation, clipping and bf16 autocast."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from told import tell_loss, tell_state
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

set_seed(0)
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model = ViTForImageClassification(
    ViTConfig(
        image_size=64,
        patch_size=8,
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=192,
        num_labels=10,
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(96, 3, 64, 64), torch.randint(0, 10, (96,)))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
for step, (images, labels) in enumerate(loader):
    with accelerator.accumulate(model):
        loss = model(pixel_values=images, labels=labels).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    tell_loss(step, loss.detach())
tell_state(accelerator.unwrap_model(model))
