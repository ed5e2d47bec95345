"""A transformer that predicts the next character or token of a text."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

DEVIATION = 0.02
"""Standard deviation of the initial weights, as GPT-2's."""


class Block(nn.Module):
    """Causal self-attention and two dense layers, each added to its input and with layer normalisation before it."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.dense_norm = nn.LayerNorm(width)
        self.dense = nn.Linear(width, 4 * width)
        self.dense_out = nn.Linear(4 * width, width)

    def forward(self, states: Tensor) -> Tensor:
        queries, keys, values = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.queries_keys_values(self.attention_norm(states)).chunk(3, 2)
        )
        seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        states = states + self.attention_out(seen.transpose(1, 2).flatten(2))
        dense: Tensor = self.dense_out(functional.gelu(self.dense(self.dense_norm(states))))
        return states + dense


class Transformer(nn.Module):
    """A decoder like GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019).

    It has learned positions and an output layer of its own. It has no dropout: it sees little of a text more than once.
    Three blocks of width 96 are the built-in model, small enough to train on a CPU.

    Input (N, T) int64, T up to the context; output (N, classes, T): logits of the character that follows each one.

    Args:
        classes: size of the vocabulary.
        channels: unused, since text has none.
        context: the largest T.
        width: number of elements of a state.
        heads: number of attention heads in a block, a divisor of ``width``.
        blocks: number of blocks.
    """

    def __init__(self, classes: int, channels: int, context: int, *, width: int = 96, heads: int = 4, blocks: int = 3):
        super().__init__()
        self.characters = nn.Embedding(classes, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:  # the sum of all blocks must not grow with their number (the paper's section 2.3)
                scale = math.sqrt(2 * blocks) if name.endswith("_out.weight") else 1.0
                nn.init.normal_(parameter, std=DEVIATION / scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, text: Tensor) -> Tensor:
        positions = torch.arange(text.shape[1], device=text.device)
        states = self.blocks(self.characters(text) + self.positions(positions))
        logits: Tensor = self.head(self.norm(states))
        return logits.transpose(1, 2)
