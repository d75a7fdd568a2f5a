"""Collates groups of trajectories to one training batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.errors import RunError
from skyrl.trajectory import TokenRow, Trajectory, TrajectoryGroup


def collate(groups: Sequence[TrajectoryGroup]) -> TrainingBatch:
    """Rows in the order of the groups, of the samples in them, and of their steps: prompt, response, padding on the
    right.

    Raises `RunError` if every answer was cut off and none may be trained on.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rows = [step for trajectory in trajectories for step in trajectory.steps]
    numbers = [n for n, group in enumerate(groups) for trajectory in group.trajectories for _ in trajectory.steps]
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
    shape = (len(rows), max(lengths))
    input_ids = torch.zeros(shape, dtype=torch.long)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    logprobs = torch.zeros(shape)
    rewards = torch.zeros(shape)
    for index, row in enumerate(rows):
        answer = slice(len(row.prompt_ids), lengths[index])
        input_ids[index, : lengths[index]] = torch.tensor(row.prompt_ids + row.response_ids)
        loss_mask[index, answer] = torch.tensor(row.loss_mask, dtype=torch.bool)
        logprobs[index, answer] = torch.tensor(row.rollout_logprobs)
        _credit(rewards[index], row)
    cut_off = [trajectory.stop_reason != "stop" for trajectory in trajectories]
    if not loss_mask.any() and all(cut_off):
        raise RunError(
            "no answer of this batch came to its end, and generator.apply_overlong_filtering leaves the others out: "
            "raise generator.sampling_params.max_generate_length"
        )
    return TrainingBatch(
        input_ids=input_ids,
        lengths=torch.tensor(lengths),
        loss_mask=loss_mask,
        rollout_logprobs=logprobs,
        rewards=rewards,
        groups=torch.tensor(numbers),
        answer_lengths=torch.tensor([len(row.response_ids) for row in rows]),
        baselines=_baselines(groups),
        **_steps(trajectories),
    )


def _steps(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """The trajectory of each row, and whether the row is its last; None where each is a row."""
    if not any(trajectory.earlier for trajectory in trajectories):
        return {}
    numbers = [number for number, trajectory in enumerate(trajectories) for _ in trajectory.steps]
    last = [step == len(one.earlier) for one in trajectories for step in range(len(one.steps))]
    return {"trajectories": torch.tensor(numbers), "last_step": torch.tensor(last)}


def _credit(rewards: Tensor, row: TokenRow) -> None:
    """Put each turn's reward on the last token of it that is trained on; where there is none, on its last token, and
    where the turn sampled nothing, on the last token of the prompt.
    """
    for turn in row.rewards:
        trained = (token for token in range(turn.token, -1, -1) if row.loss_mask[token])
        rewards[len(row.prompt_ids) + next(trained, turn.token)] += turn.reward


def _baselines(groups: Sequence[TrajectoryGroup]) -> Tensor | None:
    """The reward of each prompt's greedy answer, for each of its rows; None unless all have one."""
    rewards = [group.baseline for group in groups for trajectory in group.trajectories for _ in trajectory.steps]
    known = [reward for reward in rewards if reward is not None]
    return torch.tensor(known) if len(known) == len(rewards) else None
