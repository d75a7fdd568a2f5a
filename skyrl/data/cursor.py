"""In which order prompts are trained on, and where the run is in that order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np

from skyrl.errors import ResumeError
from skyrl.trajectory import Prompt


class PromptCursor:
    """Hands out shuffled prompts in batches, epoch after epoch.

    The order of an epoch is a permutation drawn from (seed, epoch) alone, so that a resumed run needs no more than the
    number of batches already taken. What does not fill a batch at the end of an epoch is left out of that epoch.
    """

    def __init__(self, prompts: Sequence[Prompt], batch_size: int, seed: int) -> None:
        """`batch_size` counts prompts and must not exceed their number."""
        self._prompts = prompts
        self._batch_size = batch_size
        self._seed = seed
        self.batches_taken = 0

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches in one pass over the prompts."""
        return len(self._prompts) // self._batch_size

    @property
    def epoch(self) -> int:
        """Of the next batch, from 0."""
        return self.batches_taken // self.batches_per_epoch

    def take(self) -> tuple[Prompt, ...]:
        """The next batch."""
        order = np.random.default_rng([self._seed, self.epoch]).permutation(len(self._prompts))
        start = self.batches_taken % self.batches_per_epoch * self._batch_size
        self.batches_taken += 1
        return tuple(self._prompts[index] for index in order[start : start + self._batch_size])

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores."""
        return {"batches_taken": self.batches_taken, "prompts": self._digest}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on after the batches that `state` says were taken. Raises `ResumeError` if they were of other prompts."""
        if state["prompts"] != self._digest:
            raise ResumeError(
                "the training data is not what it was when the checkpoint was saved: other rows, in another order, or "
                "through another chat template. Restore it, or start a new run in a new folder"
            )
        self.batches_taken = int(state["batches_taken"])

    @cached_property
    def _digest(self) -> str:
        """sha256 over what is sampled from: the tokens and the task of every prompt, in order."""
        digest = sha256()
        for prompt in self._prompts:
            digest.update(repr((prompt.token_ids, prompt.env_class)).encode())
        return digest.hexdigest()
