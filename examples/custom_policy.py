"""A custom policy: pull often at first, then ever more rarely."""

import argparse
from dataclasses import dataclass  # gossipx
from pathlib import Path

import torch
from data import images
from torch import nn
from torch.utils.data import DataLoader

import gossipx  # gossipx


@dataclass(frozen=True)  # gossipx
class Growing(gossipx.policies.Policy):  # gossipx
    """Pull after `first` iterations, and after each pull wait `factor` times as long as before."""  # gossipx

    first: int = 5  # gossipx
    factor: float = 1.5  # gossipx

    def init(self):  # gossipx
        return {"next": self.first, "wait": self.first}  # plain data, which checkpoints contain  # gossipx

    def decide(self, state, observation):  # gossipx
        if observation.step < state["next"]:  # gossipx
            return False, state  # gossipx
        wait = state["wait"] * self.factor  # gossipx
        return True, {"next": observation.step + wait, "wait": wait}  # gossipx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, help="cifar-10-batches-bin; default: Fashion-MNIST")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    train, test = images(args.data_dir)
    model = nn.Sequential(nn.Flatten(), nn.Linear(train[0][0].numel(), 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    peer = gossipx.join(model, optimizer, policy=Growing(first=5, factor=1.5))  # gossipx
    train = peer.shard(train)  # gossipx
    for epoch in range(args.epochs):
        for x, y in DataLoader(train, 64, shuffle=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)
    peer.finish()  # gossipx

    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum() for x, y in DataLoader(test, 500))
    print(f"accuracy {int(right) / len(test):.3f}")


if __name__ == "__main__":
    main()
