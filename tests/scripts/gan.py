"""Two optimizers, two backward calls, a detached half."""

import torch

torch.manual_seed(0)
generator = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
critic = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.LeakyReLU(0.2), torch.nn.Linear(256, 1))
for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
for step in range(5):
    real, fake = torch.randn(512, 64), generator(torch.randn(512, 16))
    for_critic.zero_grad()
    (critic(fake.detach()).mean() - critic(real).mean()).backward()
    for_critic.step()
    for_generator.zero_grad()
    (-critic(fake).mean()).backward()
    for_generator.step()
    print(step)
