# top_percent.py
"""Code 4.2 and 4.3: storages that send the largest hundredth of a gradient and keep the rest for later."""

import torch

from gossipx.parts import ServerStorage, TransmitBuffer, raw, typed


class TopTransmitBuffer(TransmitBuffer):
    def add(self, gradient):
        self.data += gradient  # to what was not sent

    def encode(self):
        top = self.data.abs().topk(-(-len(self.data) // 100)).indices
        values = self.data[top]
        self.data[top] = 0
        return bytes(raw(values)) + bytes(raw(top.int()))

    def state_dict(self):  # in checkpoints
        return self.data

    def load_state_dict(self, state):
        self.data.copy_(state)


class TopServerStorage(ServerStorage):
    def decode(self, encoded):
        count = len(encoded) // (self.data.element_size() + 4)
        top = typed(encoded[len(encoded) - 4 * count :], torch.int32)
        gradient = torch.zeros_like(self.data)
        gradient[top] = typed(encoded[: len(encoded) - 4 * count], self.data.dtype)
        return gradient
