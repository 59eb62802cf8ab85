"""Sentence embeddings: all-MiniLM-L6-v2, a BERT of six layers, mean of its tokens' vectors, length 1.

Attributes have the names that the weights have in model.safetensors. Tokens come from the model's own vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, LAYERS, INNER, WORDS, POSITIONS, EPSILON = 384, 12, 6, 1536, 30522, 512, 1e-12


class Embeddings(nn.Module):
    position_ids: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(WORDS, WIDTH)
        self.position_embeddings = nn.Embedding(POSITIONS, WIDTH)
        self.token_type_embeddings = nn.Embedding(2, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, EPSILON)
        self.register_buffer("position_ids", torch.arange(POSITIONS).unsqueeze(0))

    def forward(self, ids: Tensor) -> Tensor:
        places = self.position_embeddings(self.position_ids[:, : ids.shape[1]])
        return self.LayerNorm(self.word_embeddings(ids) + places + self.token_type_embeddings.weight[0])


class Projection(nn.Module):
    """A linear layer, what it is added to, and a norm."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, EPSILON)

    def forward(self, inner: Tensor, before: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(inner) + before)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        heads = {name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "value")}
        self.attention = nn.ModuleDict({"self": nn.ModuleDict(heads), "output": Projection(WIDTH)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, INNER)})
        self.output = Projection(INNER)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = self.attention["self"]
        query, key, value = (
            heads[name](x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in ("query", "key", "value")
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, mask)
        x = self.attention["output"](mixed.transpose(1, 2).flatten(2), x)
        return self.output(functional.gelu(self.intermediate["dense"](x)), x)


class Embedder(nn.Module):
    """Token ids and a mask of [rows, tokens] to vectors of [rows, 384]."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer() for _ in range(LAYERS))})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH)})  # its weights are there, nothing uses them

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        seen = attention_mask.bool()
        x = self.embeddings(input_ids)
        for layer in self.encoder["layer"]:
            x = layer(x, seen[:, None, None, :])
        weights = seen.unsqueeze(-1).to(x.dtype)
        return functional.normalize((x * weights).sum(1) / weights.sum(1).clamp(min=1e-9))
