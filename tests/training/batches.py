"""A small batch with everything that an objective reads."""

from __future__ import annotations

import torch

from skyrl.batch import TrainingBatch


def batch_of() -> TrainingBatch:
    """Two answers to one prompt of one token, of two tokens each, one good and one bad."""
    mask = torch.tensor([[0, 1, 1], [0, 1, 1]]).bool()
    return TrainingBatch(
        input_ids=torch.tensor([[5, 1, 2], [5, 3, 4]]),
        lengths=torch.tensor([3, 3]),
        loss_mask=mask,
        rollout_logprobs=torch.tensor([[0.0, -0.8, -0.8], [0.0, -0.5, -1.0]]),
        rewards=torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
        groups=torch.tensor([7, 7]),
        answer_lengths=torch.tensor([2, 2]),
        trajectory_lengths=torch.tensor([2, 2]),
        advantages=torch.tensor([[0.0, 1.0, 1.0], [0.0, -1.0, -1.0]]),
    )
