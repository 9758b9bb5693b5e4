"""A small character-level transformer over packed documents, with flexattn in the place of attention.

It has no position embedding: the learnt ALiBi slopes, which the score function captures, are all it knows of order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flexattn
from demo.attention import alibi_slopes, causal_documents, soft_cap_and_alibi

CAP = 20.0


class Attention(nn.Module):
    """Multi-head attention whose heads learn how fast they forget."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.log_slope = nn.Parameter(alibi_slopes(heads).log())

    def forward(self, x: Tensor, block_mask: flexattn.BlockMask) -> Tensor:
        """x: [batch, length, dim] -> the same shape."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        score_mod = soft_cap_and_alibi(CAP, self.log_slope.exp())  # a new closure each step; no new kernel
        out = flexattn.flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask)
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a skip connection."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.feed_norm = nn.LayerNorm(dim)
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, block_mask: flexattn.BlockMask) -> Tensor:
        """x: [batch, length, dim] -> the same shape."""
        x = x + self.attention(self.attention_norm(x), block_mask)
        return x + self.feed(self.feed_norm(x))


class CharacterModel(nn.Module):
    """Predicts the next character of every position of a packed sequence."""

    def __init__(self, alphabet: int, *, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(alphabet, dim)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor, document: Tensor) -> Tensor:
        """tokens, document: int [length] -> logits, float [length, alphabet]."""
        length = len(tokens)
        block_mask = flexattn.create_block_mask(
            causal_documents(document), None, None, length, length, device=tokens.device
        )
        x = self.embed(tokens)[None]
        for block in self.blocks:
            x = block(x, block_mask)
        return F.linear(self.norm(x)[0], self.embed.weight)  # the output layer is the embedding, transposed


@torch.no_grad()
def sample(model: CharacterModel, prompt: Tensor, count: int, *, seed: int = 0) -> Tensor:
    """`count` further tokens, drawn at temperature 0.7; every step has another length: int64 [count]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt
    for _ in range(count):
        logits = model(tokens, torch.zeros_like(tokens, dtype=torch.int32))[-1]
        probability = torch.softmax(logits.float().cpu() / 0.7, dim=-1)
        drawn = torch.multinomial(probability, 1, generator=generator)
        tokens = torch.cat((tokens, drawn.to(tokens.device)))
    return tokens[len(prompt) :]
