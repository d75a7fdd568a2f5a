"""The stretches of a packed row that do not attend to each other."""

from __future__ import annotations

import attrs


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
    def stop(self) -> int:
        """The position after its last token."""
        return self.start + self.tokens
