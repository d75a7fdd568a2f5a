"""Tokens that an engine may draw: those that the tokenizer knows.

Many models have more rows in their output matrix than tokens, padded to a multiple that hardware likes. These rows are
never drawn: their tokens have no text. Like a cut by top-k, this changes what is drawn and not the log-probabilities,
which are those of the softmax over all rows, on the learner's side too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor


class HasVocabulary(Protocol):
    """The part of a tokenizer that is read here."""

    def get_vocab(self) -> Mapping[str, int]:
        """Id of each token, added ones included."""


@frozen
class Drawable:
    """The columns of logits that stand for tokens."""

    count: int
    """Number of columns up to the last token."""

    holes: tuple[int, ...] = ()
    """Columns below `count` that stand for no token."""

    @classmethod
    def of(cls, tokenizer: HasVocabulary) -> Drawable:
        """The tokens of a tokenizer."""
        known = {*tokenizer.get_vocab().values()}
        count = max(known, default=-1) + 1
        return cls(count, tuple(each for each in range(count) if each not in known) if len(known) < count else ())

    def __call__(self, scores: Tensor) -> Tensor:
        """Scores (R, V) of the columns that may be drawn, (R, min(V, count)): a view unless there are holes."""
        kept = scores[:, : self.count]
        return kept.index_fill(1, self._holes(kept), -torch.inf) if self.holes else kept

    def leave(self, logits: Tensor) -> None:
        """Overwrite with -infinity the columns of logits (R, V) that are not drawn."""
        logits[:, self.count :] = -torch.inf
        if self.holes:
            logits.index_fill_(1, self._holes(logits), -torch.inf)

    def _holes(self, scores: Tensor) -> Tensor:
        return torch.tensor([each for each in self.holes if each < scores.shape[1]], device=scores.device)
