"""DistributedDataParallel that sends its gradients through a codec: no gossip, but fewer bytes per step."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from data import images
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from gossipx.integrations import ddp  # gossipx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, help="cifar-10-batches-bin; default: Fashion-MNIST")
    parser.add_argument("--codec", default="3lc:sparsity=1.75")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    train, test = images(args.data_dir)
    network = nn.Sequential(nn.Flatten(), nn.Linear(train[0][0].numel(), 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(network)
    state, hook = ddp.hook(args.codec)  # gossipx
    model.register_comm_hook(state, hook)  # gossipx
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 64, sampler=sampler)

    done = 0
    while done < args.steps:
        sampler.set_epoch(done)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            done += 1
            if done == args.steps:
                break

    if dist.get_rank() == 0:
        with torch.no_grad():
            right = sum((network(x).argmax(1) == y).sum() for x, y in DataLoader(test, 500))
        print(f"accuracy {int(right) / len(test):.3f}")
        plain = done * sum(parameter.nbytes for parameter in network.parameters())
        print(f"gradients of {plain:,} bytes were sent as {state.bytes_sent:,}")  # gossipx
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
