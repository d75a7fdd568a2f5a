"""The mini-batches that learners are compared on."""

from __future__ import annotations

import torch

from skyrl.batch import TrainingBatch

LENGTHS = (5, 12, 8, 12, 6, 9, 7, 10)


def batch(rows: int = 6, seed: int = 3) -> TrainingBatch:
    """At most 8 rows of different lengths, each with a few selected tokens in its second half."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(LENGTHS[:rows])
    columns = torch.arange(int(lengths.max()))
    mask = (columns >= lengths.unsqueeze(1) // 2) & (columns < lengths.unsqueeze(1))
    shape = mask.shape
    return TrainingBatch(
        input_ids=torch.randint(0, 250, shape, generator=generator),
        lengths=lengths,
        loss_mask=mask,
        rollout_logprobs=torch.zeros(shape),
        rewards=torch.zeros(shape),
        groups=torch.arange(rows) // 2,
        advantages=torch.randn(rows, 1, generator=generator) * mask,
    )
