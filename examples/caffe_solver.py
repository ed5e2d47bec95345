"""Softmax regression in plain numpy, with the interface of Caffe's Python solver: no torch model, no optimizer."""

import argparse
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from data import images

import gossipx  # gossipx


class Solver:
    """SGD with momentum over the blobs of one layer; ``net.params`` is as in pycaffe."""

    def __init__(self, features: int, rate: float, momentum: float = 0.9):
        blobs = [
            SimpleNamespace(data=np.zeros(shape, np.float32), diff=np.zeros(shape, np.float32))
            for shape in ((10, features), (10,))
        ]
        self.net = SimpleNamespace(params={"score": blobs})
        self._rate, self._momentum = rate, momentum
        self._history = [np.zeros_like(blob.data) for blob in blobs]

    def forward(self, x: np.ndarray) -> np.ndarray:
        """Return the probability of each class, (N, 10)."""
        weight, bias = self.net.params["score"]
        scores = x @ weight.data.T + bias.data
        scores = np.exp(scores - scores.max(1, keepdims=True))
        return scores / scores.sum(1, keepdims=True)

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        """Train on one batch, and return its loss."""
        blobs = weight, bias = self.net.params["score"]
        shares = self.forward(x)
        error = (shares - np.eye(10, dtype=np.float32)[y]) / len(x)
        weight.diff[...] = error.T @ x
        bias.diff[...] = error.sum(0)
        for blob, history in zip(blobs, self._history, strict=True):
            history *= self._momentum
            history += self._rate * blob.diff
            blob.data[...] -= history
        return float(-np.log(shares[np.arange(len(y)), y]).mean())

    def accuracy(self, x: np.ndarray, y: np.ndarray) -> float:
        return float((self.forward(x).argmax(1) == y).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, help="cifar-10-batches-bin; default: Fashion-MNIST")
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=0.005)
    args = parser.parse_args()

    (x, y), (test_x, test_y) = (
        [tensor.flatten(1).numpy() if tensor.dim() > 1 else tensor.numpy() for tensor in part.tensors]
        for part in images(args.data_dir)
    )
    solver = Solver(x.shape[1], args.rate)
    draw = np.random.default_rng()
    attached = gossipx.attach(solver)  # gossipx
    for iteration in range(args.iterations):
        batch = draw.integers(len(x), size=64)
        loss = solver.step(x[batch], y[batch])
        attached.step()  # gossipx
        if iteration % 100 == 0:
            print(f"iteration {iteration}: loss {loss:.3f}", flush=True)
    attached.finish()  # gossipx
    print(f"accuracy {solver.accuracy(test_x, test_y):.3f}")


if __name__ == "__main__":
    main()
