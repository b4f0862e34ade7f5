"""Lightning: a GAN by manual optimization."""

import lightning as L
import torch
from told import tell_loss, tell_state
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(0, verbose=False)


class GAN(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.make = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 3 * 16 * 16), nn.Tanh())
        self.judge = nn.Sequential(nn.Linear(3 * 16 * 16, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))

    def training_step(self, batch, index):
        (real,) = batch
        first, second = self.optimizers()
        made = self.make(torch.randn(len(real), 32, device=self.device))
        second.zero_grad()
        loss = (
            nn.functional.softplus(-self.judge(real)).mean()
            + nn.functional.softplus(self.judge(made.detach())).mean()
        )
        self.manual_backward(loss)
        second.step()
        first.zero_grad()
        fooled = nn.functional.softplus(-self.judge(made)).mean()
        self.manual_backward(fooled)
        first.step()
        tell_loss(index, (loss + fooled).detach())

    def configure_optimizers(self):
        return torch.optim.Adam(self.make.parameters(), 1e-3), torch.optim.Adam(self.judge.parameters(), 1e-3)


model = GAN()
loader = DataLoader(TensorDataset(torch.randn(512, 3 * 16 * 16)), batch_size=64)
trainer = L.Trainer(
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir="out",
)
trainer.fit(model, loader)
tell_state(model)
