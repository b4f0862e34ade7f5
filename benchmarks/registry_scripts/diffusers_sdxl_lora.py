"""diffusers: LoRA on SDXL's UNet with gradient checkpointing."""

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import cast_training_params
from peft import LoraConfig
from told import DEVICE, tell_loss, tell_state

torch.manual_seed(0)
unet = UNet2DConditionModel(
    sample_size=32,
    block_out_channels=(32, 64),
    layers_per_block=1,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    attention_head_dim=(2, 4),
    use_linear_projection=True,
    addition_embed_type="text_time",
    addition_time_embed_dim=8,
    transformer_layers_per_block=(1, 2),
    projection_class_embeddings_input_dim=80,
    cross_attention_dim=64,
    norm_num_groups=8,
).to(DEVICE)
unet.requires_grad_(False)
unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
unet.enable_gradient_checkpointing()
unet.train()
cast_training_params(unet, dtype=torch.float32)
noiser = DDPMScheduler(num_train_timesteps=100)
trained = [each for each in unet.parameters() if each.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-3)
for step in range(6):
    latents, words = torch.randn(4, 4, 32, 32, device=DEVICE), torch.randn(4, 16, 64, device=DEVICE)
    noise, times = torch.randn_like(latents), torch.randint(0, 100, (4,), device=DEVICE)
    more = {"text_embeds": torch.randn(4, 32, device=DEVICE), "time_ids": torch.randn(4, 6, device=DEVICE)}
    guess = unet(noiser.add_noise(latents, noise, times), times, words, added_cond_kwargs=more).sample
    loss = torch.nn.functional.mse_loss(guess, noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    tell_loss(step, loss.detach())
tell_state(unet, optimizer)
