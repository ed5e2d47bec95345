"""A pure numpy solver with pycaffe's interface: softmax regression by SGD with momentum."""

from __future__ import annotations

import numpy as np


class Blob:
    def __init__(self, *shape):
        self._data, self._diff = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    @property
    def data(self):
        return self._data

    @property
    def diff(self):
        return self._diff


class Net:
    def __init__(self, inputs, classes):
        self.params = {"score": [Blob(classes, inputs), Blob(classes)]}

    def forward(self, x):
        weight, bias = self.params["score"]
        raw = x @ weight.data.T + bias.data
        raw = np.exp(raw - raw.max(1, keepdims=True))
        return raw / raw.sum(1, keepdims=True)

    def backward(self, x, y, shares):
        weight, bias = self.params["score"]
        error = (shares - np.eye(shares.shape[1], dtype=np.float32)[y]) / len(x)
        weight.diff[...] += error.T @ x
        bias.diff[...] += error.sum(0)


class NumpySolver:
    """A solver with pycaffe's ``net``, ``iter``, ``step``, ``add_callback`` and ``apply_update``."""

    def __init__(self, batches, inputs, classes, rate=0.5, momentum=0.9):
        self.net, self.iter = Net(inputs, classes), 0
        self._batches, self._rate, self._momentum = batches, rate, momentum
        self._history = [np.zeros_like(blob.data) for blob in self.net.params["score"]]
        self._callbacks = []

    def add_callback(self, on_start, on_gradients_ready):
        self._callbacks.append((on_start, on_gradients_ready))

    def compute(self):
        for blob in self.net.params["score"]:
            blob.diff[...] = 0
        x, y = self._batches[self.iter % len(self._batches)]
        self.net.backward(x, y, self.net.forward(x))

    def apply_update(self):
        for blob, history in zip(self.net.params["score"], self._history, strict=True):
            history *= self._momentum
            history += self._rate * blob.diff
            blob.data[...] -= history
        self.iter += 1

    def step(self, iterations):
        for _ in range(iterations):
            for on_start, _ in self._callbacks:
                on_start()
            self.compute()
            for _, on_gradients_ready in self._callbacks:
                on_gradients_ready()
            self.apply_update()

    def accuracy(self, x, y):
        return float((self.net.forward(x).argmax(1) == y).mean())
