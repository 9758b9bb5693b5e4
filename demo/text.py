"""Python's help topics -> one long sequence of characters with the number of each character's document.

Packing replaces padding: documents of 200 and of 60,000 characters share a sequence without wasting a position, and
the attention mask keeps them apart.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

START = "\f"  # form feed: the first character of every document


class PackedText(NamedTuple):
    """Documents laid end to end.

    tokens: int64 [length], indices into `alphabet`; document: int32 [length], which document each token belongs to.
    """

    tokens: Tensor
    document: Tensor
    titles: list[str]
    alphabet: str

    def window(self, start: int, length: int) -> PackedText:
        """The tokens start .. start + length; document numbers stay those of the whole text."""
        stop = start + length
        return self._replace(tokens=self.tokens[start:stop], document=self.document[start:stop])

    def to(self, device: torch.device) -> PackedText:
        """The same text with its tensors on `device`."""
        return self._replace(tokens=self.tokens.to(device), document=self.document.to(device))

    def decode(self, tokens: Tensor) -> str:
        """Tokens -> characters."""
        return "".join(self.alphabet[t] for t in tokens.tolist())


def pack_topics(seed: int = 54) -> PackedText:
    """All help topics of this Python in shuffled order, each begun by a form feed.

    Args:
        seed: of the order; the default one begins with several short topics, which makes the better picture.

    Returns: PackedText.

    Example:
        >>> text = pack_topics()
        >>> len(text.tokens) == len(text.document) and int(text.document[-1]) == len(text.titles) - 1
        True
    """
    from pydoc_data.topics import topics

    titles = sorted(topics)
    random.Random(seed).shuffle(titles)
    documents = [START + topics[title].strip() + "\n" for title in titles]
    alphabet = "".join(sorted(set("".join(documents))))
    number = {character: i for i, character in enumerate(alphabet)}
    tokens = torch.tensor([number[c] for document in documents for c in document])
    lengths = torch.tensor([len(document) for document in documents])
    return PackedText(tokens, torch.arange(len(titles), dtype=torch.int32).repeat_interleave(lengths), titles, alphabet)


def next_token_targets(text: PackedText) -> Tensor:
    """For each token the one after it, or -100 (ignored by cross entropy) where a document ends: int64 [length]."""
    targets = torch.full_like(text.tokens, -100)
    same = text.document[1:] == text.document[:-1]
    targets[:-1] = torch.where(same, text.tokens[1:], targets[:-1])
    return targets
