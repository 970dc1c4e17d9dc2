"""A proxy loss in Lightning: the loss is a module like any other, its proxies parameters.

    python -m examples.lightning_example

Needs lightning (pip install lightning); trains a linear embedder on points around class centers.
"""

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from proximetry.losses import ProxyAnchor, parameter_groups
from proximetry.metrics import evaluate


class MetricLearner(lightning.LightningModule):
    """Any network and any loss of proximetry."""

    def __init__(self, network: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.network, self.loss = network, loss

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the loss of a batch."""
        x, labels = batch
        value: Tensor = self.loss(self.network(x), labels)
        return value

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Give the proxies their own learning rate; without it they hardly learn."""
        return torch.optim.AdamW(
            parameter_groups(self.network, self.loss, lr=1e-2, proxy_lr_multiplier=10)
        )


def main(epochs: int = 5) -> float:
    """Train, and return recall@1 on classes that were not trained on."""
    torch.manual_seed(0)
    centers = 2 * torch.randn(40, 32)
    labels = torch.arange(1280) % 20
    data = TensorDataset(centers[labels] + torch.randn(1280, 32), labels)
    learner = MetricLearner(nn.Linear(32, 16), ProxyAnchor(20, 16))
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(learner, DataLoader(data, batch_size=128, shuffle=True))
    unseen = torch.arange(400) % 20 + 20
    with torch.no_grad():
        vectors = learner.network(centers[unseen] + torch.randn(400, 32))
    return evaluate(vectors, unseen)["recall@1"]


if __name__ == "__main__":
    print(f"recall@1 on unseen classes: {main():.3f}")
