"""A small ResNet on CIFAR-10, or on Fashion-MNIST without --data-dir."""

import argparse
from pathlib import Path

import torch
from data import images
from torch import nn
from torch.utils.data import DataLoader, Subset

import gossipx  # gossipx


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        is_same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if is_same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def resnet(channels: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Block(width, width, 1),
        Block(width, 2 * width, 2),
        Block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def flipped(x: torch.Tensor) -> torch.Tensor:
    """Mirror about half of the images."""
    return torch.where(torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5, x.flip(-1), x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, help="cifar-10-batches-bin, the binary version of CIFAR-10")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--limit", type=int, help="train and test on this many images only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    train, test = images(args.data_dir)
    if args.limit:
        train, test = Subset(train, range(args.limit)), Subset(test, range(args.limit))
    model = resnet(train[0][0].shape[0], args.width).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)

    def accuracy(model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            right = sum((model(x.to(args.device)).argmax(1).cpu() == y).sum() for x, y in DataLoader(test, 500))
        model.train()
        return float(right) / len(test)

    peer = gossipx.join(model, optimizer, evaluate=accuracy)  # gossipx
    train = peer.shard(train)  # gossipx
    loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, epochs=args.epochs, steps_per_epoch=len(loader))
    for epoch in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(flipped(x.to(args.device))), y.to(args.device))
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, accuracy {accuracy(model):.3f}", flush=True)
        peer.log("train/loss", loss)  # gossipx
    peer.finish()  # gossipx
    print(f"accuracy of the final model: {accuracy(model):.3f}")


if __name__ == "__main__":
    main()
