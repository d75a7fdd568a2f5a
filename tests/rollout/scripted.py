"""A generator whose batches have given rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl.trajectory import Prompt, Trajectory, TrajectoryGroup, TurnReward


def trajectory(reward: float, index: int) -> Trajectory:
    return Trajectory(
        prompt_id="p",
        sample_index=index,
        prompt_ids=(1,),
        response_ids=(2,),
        loss_mask=(1,),
        rollout_logprobs=(-1.0,),
        weight_versions=(0,),
        rewards=(TurnReward(token=0, reward=reward),),
        stop_reason="stop",
    )


class Scripted:
    """A generator whose batches have the rewards that it is told; it notes how it was asked."""

    def __init__(self, *batches: Sequence[Sequence[float]]) -> None:
        self.batches = list(batches)
        self.asked: list[dict[str, Any]] = []

    async def generate(self, prompts: Sequence[Prompt], **kwargs: Any) -> tuple[TrajectoryGroup, ...]:
        self.asked.append(kwargs)
        return tuple(
            TrajectoryGroup(prompt=prompt, trajectories=tuple(map(trajectory, rewards, range(len(rewards)))))
            for prompt, rewards in zip(prompts, self.batches.pop(0), strict=True)
        )
