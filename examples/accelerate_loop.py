"""A training loop under Accelerate, with gradient accumulation and a saved state."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from data import images
from torch import nn
from torch.utils.data import DataLoader

from gossipx.integrations.accelerate import join, shard  # gossipx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, help="cifar-10-batches-bin; default: Fashion-MNIST")
    parser.add_argument("--steps", type=int, default=500, help="updates of the model")
    parser.add_argument("--accumulate", type=int, default=2, help="batches per update")
    parser.add_argument("--mixed-precision", default="no", choices=("no", "bf16", "fp16"))
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate, mixed_precision=args.mixed_precision)
    train, test = images(args.data_dir)
    train = shard(train)  # gossipx
    model = nn.Sequential(nn.Flatten(), nn.Linear(train[0][0].numel(), 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader, held_out = accelerator.prepare(
        model, optimizer, DataLoader(train, 64, shuffle=True), DataLoader(test, 500)
    )

    peer = join(accelerator, model, optimizer)  # gossipx
    done = 0
    while done < args.steps:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                if done % 100 == 0:
                    accelerator.print(f"step {done}: loss {loss.item():.3f}")
                if done == args.steps:
                    break
    accelerator.save_state("accelerated")
    peer.finish()  # gossipx

    model.eval()
    with torch.no_grad():
        found = [accelerator.gather_for_metrics((model(x).argmax(1) == y).float()) for x, y in held_out]
    accelerator.print(f"accuracy {torch.cat(found).mean().item():.3f}")


if __name__ == "__main__":
    main()
