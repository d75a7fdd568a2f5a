"""The stretches of a packed row that do not attend to each other."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch
from torch import Tensor


@attrs.frozen
class Segment:
    """A stretch of a packed row, positions `start` to `start + prompt + sum(answers)`: a prompt, then answers to it.

    A sequence on its own is a prompt without answers.
    """

    start: int
    prompt: int
    answers: tuple[int, ...] = ()
    """Number of tokens of each answer; every answer sees the prompt and itself."""

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and of all answers."""
        return self.prompt + sum(self.answers)

    @property
    def sequences(self) -> Iterator[tuple[range, range]]:
        """Positions of the prompt before each sequence, and of the sequence: the prompt itself, then each answer."""
        prompt = range(self.start, self.start + self.prompt)
        yield prompt[:0], prompt
        first = prompt.stop
        for tokens in self.answers:
            yield prompt, range(first, first + tokens)
            first += tokens

    @property
    def stop(self) -> int:
        """The position after its last token."""
        return self.start + self.tokens


def joined_ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """The numbers start, start + 1, ... of each range, one range after the other.

    Shapes: both (R,) int64, with any lengths from 0 -> (sum of the lengths,).
    """
    shifts = starts - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)
