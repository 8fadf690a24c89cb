"""Lightning's ``Trainer`` on a cached data set: nothing changes but the dataset.

python examples/lightning_module.py [--samples 512]      (pip install lightning)
"""

from __future__ import annotations

import argparse
import logging

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData
from torchvision.transforms import v2

from torchcache import CachedDataset

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--samples", type=int, default=512)
parser.add_argument("--epochs", type=int, default=3)
arguments = parser.parse_args()


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
to_tensor = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()])
train = CachedDataset(FakeData(arguments.samples, image_size=(3, 16, 16), transform=to_tensor))
trainer = lightning.Trainer(
    max_epochs=arguments.epochs,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(), DataLoader(train, batch_size=32, shuffle=True))
print(f"{trainer.global_step} steps; {train.stats.source_reads} source reads, {train.stats.hits} hits")
