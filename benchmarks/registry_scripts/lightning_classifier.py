"""Lightning: accumulation, clipping, a validation in between, a checkpoint callback."""

import lightning as L
import torch
from told import tell_loss, tell_state
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(0, verbose=False)


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2, 1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(1024, 10),
        )

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        tell_loss(index, loss.detach())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


data = TensorDataset(torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,)))
model = Classifier()
trainer = L.Trainer(
    max_epochs=2,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir="out",
)
trainer.fit(model, DataLoader(data, batch_size=16), DataLoader(data, batch_size=64))
tell_state(model)
