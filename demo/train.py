"""Packed text -> a trained model and the loss of every step, in about the given number of seconds."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch.nn import functional as F

from demo.model import CharacterModel
from demo.report import Progress
from demo.text import PackedText, next_token_targets

LEAST_STEPS = 60


class Recipe(NamedTuple):
    """Sizes that suit a device: a minute on two cores, or on a GPU a larger model for the same minute."""

    length: int
    dim: int
    heads: int
    layers: int
    rate: float

    @classmethod
    def of(cls, device: torch.device) -> Recipe:
        """The recipe for `device`."""
        if device.type == "cuda":
            return cls(length=8192, dim=256, heads=4, layers=6, rate=1e-3)
        return cls(length=1024, dim=128, heads=4, layers=3, rate=3e-3)


class Trained(NamedTuple):
    """The model and its loss in nats a character at every step."""

    model: CharacterModel
    losses: list[float]


def train(text: PackedText, recipe: Recipe, *, seconds: float, device: torch.device) -> Trained:
    """Trains on random windows of the packed text until the time is up.

    Every step has other documents in its window, hence another mask; AdamW, a short warm-up, then a cosine decay over
    the time that is left. A busy machine gets the time it needs for LEAST_STEPS.
    """
    torch.manual_seed(0)
    model = CharacterModel(len(text.alphabet), dim=recipe.dim, heads=recipe.heads, layers=recipe.layers).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.01)
    text, generator = text.to(device), torch.Generator().manual_seed(0)
    losses: list[float] = []
    start, done = time.perf_counter(), 0.0
    with Progress("training", 1.0) as progress:
        while done < 1:
            for group in optimiser.param_groups:
                group["lr"] = recipe.rate * _schedule(len(losses), done)
            first = int(torch.randint(len(text.tokens) - recipe.length, (), generator=generator))
            losses.append(_step(model, optimiser, text.window(first, recipe.length), device))
            done = min((time.perf_counter() - start) / seconds, len(losses) / LEAST_STEPS)
            progress.show(done, f"step {len(losses)}, loss {_mean(losses[-10:]):.2f}")
    return Trained(model, losses)


def falls(losses: list[float]) -> bool:
    """Whether the mean of the last tenth is at least a fifth below that of the first five steps."""
    return _mean(losses[-max(1, len(losses) // 10) :]) < 0.8 * _mean(losses[:5])


def _step(model: CharacterModel, optimiser: torch.optim.Optimizer, window: PackedText, device: torch.device) -> float:
    with _precision(device):
        logits = model(window.tokens, window.document)
    loss = F.cross_entropy(logits.float(), next_token_targets(window))
    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return float(loss.detach())


def _schedule(step: int, done: float) -> float:
    """The learning rate's factor: up over 20 steps, then down a cosine to a twentieth."""
    return min(1.0, (step + 1) / 20) * (0.05 + 0.475 * (1 + math.cos(math.pi * min(1.0, done))))


def _precision(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def _mean(values: list[float]) -> float:
    return float(sum(values) / len(values))
