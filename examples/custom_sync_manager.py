"""A custom SyncManager: a budget of exchanges, beside what the run's policy decides."""

import argparse
from pathlib import Path

import torch
from data import images
from torch import nn
from torch.utils.data import DataLoader

import gossipx  # gossipx


class Budget(gossipx.SyncManager):  # gossipx
    """Starts no exchange once this peer has mixed in `most` models."""  # gossipx

    most = 20  # gossipx

    def step(self, step, delta, drift=None):  # gossipx
        fired = super().step(step, delta, drift)  # gossipx
        if fired and self.retrievals >= self.most:  # gossipx
            self.fired = False  # gossipx
            self.skipped += 1  # so that the run's decisions still add up  # gossipx
        return self.fired  # gossipx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, help="cifar-10-batches-bin; default: Fashion-MNIST")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--budget", type=int, default=20)  # gossipx
    args = parser.parse_args()

    train, test = images(args.data_dir)
    model = nn.Sequential(nn.Flatten(), nn.Linear(train[0][0].numel(), 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    Budget.most = args.budget  # gossipx
    peer = gossipx.join(model, optimizer, sync_manager=Budget)  # gossipx
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
