"""diffusers: an unconditional DDPM with its EMA, under accelerate."""

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from told import tell_loss, tell_state
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator()
model = UNet2DModel(
    sample_size=32,
    in_channels=3,
    out_channels=3,
    layers_per_block=1,
    block_out_channels=(32, 64),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    norm_num_groups=8,
)
ema = EMAModel(model.parameters(), decay=0.99)
noiser = DDPMScheduler(num_train_timesteps=100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = get_cosine_schedule_with_warmup(optimizer, 2, 6)
loader = DataLoader(TensorDataset(torch.randn(48, 3, 32, 32)), batch_size=8)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
ema.to(accelerator.device)
for step, (images,) in enumerate(loader):
    noise = torch.randn_like(images)
    times = torch.randint(0, 100, (images.shape[0],), device=images.device)
    with accelerator.accumulate(model):
        loss = torch.nn.functional.mse_loss(
            model(noiser.add_noise(images, noise, times), times).sample, noise
        )
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    ema.step(model.parameters())
    tell_loss(step, loss.detach())
tell_state(accelerator.unwrap_model(model))
