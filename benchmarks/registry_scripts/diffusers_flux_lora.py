"""diffusers: LoRA on Flux's transformer."""

import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig
from told import DEVICE, tell_loss, tell_state

torch.manual_seed(0)
model = FluxTransformer2DModel(
    patch_size=1,
    in_channels=16,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=32,
    num_attention_heads=4,
    joint_attention_dim=64,
    pooled_projection_dim=32,
    guidance_embeds=True,
    axes_dims_rope=(8, 12, 12),
).to(DEVICE)
model.requires_grad_(False)
model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "proj_out"]))
trained = [each for each in model.parameters() if each.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-3)
for step in range(6):
    x = torch.randn(2, 64, 16, device=DEVICE)
    guess = model(
        hidden_states=x,
        encoder_hidden_states=torch.randn(2, 16, 64, device=DEVICE),
        pooled_projections=torch.randn(2, 32, device=DEVICE),
        timestep=torch.rand(2, device=DEVICE),
        img_ids=torch.zeros(64, 3, device=DEVICE),
        txt_ids=torch.zeros(16, 3, device=DEVICE),
        guidance=torch.ones(2, device=DEVICE),
    ).sample
    loss = (guess - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    tell_loss(step, loss.detach())
tell_state(model, optimizer)
