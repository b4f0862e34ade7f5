"""Whisper with transformers' own gradient checkpointing."""

import torch
from told import DEVICE, tell_loss, tell_state
from transformers import WhisperConfig, WhisperForConditionalGeneration

torch.manual_seed(0)
config = WhisperConfig(
    vocab_size=400,
    num_mel_bins=40,
    d_model=96,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=192,
    decoder_ffn_dim=192,
    max_source_positions=100,
    max_target_positions=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
    suppress_tokens=None,
    begin_suppress_tokens=None,
)
model = WhisperForConditionalGeneration(config).to(DEVICE).train()
model.gradient_checkpointing_enable()
model.config.use_cache = False
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(6):
    sound, labels = torch.randn(4, 40, 200, device=DEVICE), torch.randint(3, 400, (4, 24), device=DEVICE)
    loss = model(input_features=sound, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    tell_loss(step, loss.detach())
tell_state(model, optimizer)
