"""A LightningModule with a checkpoint of the best epoch."""

import argparse
from pathlib import Path

import lightning
import torch
from data import images
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from gossipx.integrations.lightning import GossipCallback  # gossipx


class Classifier(lightning.LightningModule):
    """A convolutional network for images of any size."""

    def __init__(self, channels: int, lr: float):
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(
            nn.Conv2d(channels, 16, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(32 * 16, 10),
        )

    def training_step(self, batch, number):
        x, y = batch
        return nn.functional.cross_entropy(self.network(x), y)

    def validation_step(self, batch, number):
        x, y = batch
        self.log("accuracy", (self.network(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.hparams.lr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, help="cifar-10-batches-bin; default: Fashion-MNIST")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batches", type=int, default=-1, help="training batches per epoch; -1: all")
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    train, test = images(args.data_dir)
    best = ModelCheckpoint(monitor="accuracy", mode="max", filename="best")
    gossip = GossipCallback(accuracy="accuracy")  # gossipx
    train = gossip.shard(train)  # gossipx
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        limit_train_batches=args.batches if args.batches > 0 else None,
        devices=1,
        callbacks=[
            best,
            gossip,  # gossipx
        ],
        enable_progress_bar=False,
        logger=False,
    )
    model = Classifier(channels=train[0][0].shape[0], lr=args.lr)
    validation = DataLoader(test, 500)
    trainer.fit(model, DataLoader(train, 64, shuffle=True), validation)
    (final,) = trainer.validate(model, validation, verbose=False)
    print(f"accuracy {final['accuracy']:.3f}; the best epoch is in {best.best_model_path}")


if __name__ == "__main__":
    main()
