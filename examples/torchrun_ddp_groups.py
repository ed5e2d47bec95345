"""DistributedDataParallel inside each host; the processes of a host together are one peer."""

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
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batches", type=int, help="batches per epoch and process; default: all")
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = f"cuda:{dist.get_node_local_rank()}" if on_gpu else "cpu"
    train, test = images(args.data_dir)
    train = ddp.shard(train)  # gossipx
    features = train[0][0].numel()
    network = nn.Sequential(nn.Flatten(), nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 64, sampler=sampler)

    peer = ddp.join(model, optimizer)  # gossipx
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            if number == args.batches:
                break
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)
    peer.finish()  # gossipx

    if dist.get_rank() == 0:
        with torch.no_grad():
            right = sum((network(x.to(device)).argmax(1).cpu() == y).sum() for x, y in DataLoader(test, 500))
        print(f"accuracy {int(right) / len(test):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
