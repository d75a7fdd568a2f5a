"""Groups as plain data, for a checkpoint: everything but the prompt, which is found again by its id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from skyrl.trajectory import Failure, Prompt, Trajectory, TrajectoryGroup, TurnReward


def group_as_data(group: TrajectoryGroup) -> dict[str, Any]:
    """What `json` can write; every float comes back as it was."""
    return {
        "prompt": group.prompt.id,
        "baseline": group.baseline,
        "trajectories": [attrs.asdict(row) for row in group.trajectories],
    }


def group_from_data(data: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> TrajectoryGroup:
    """The group again; `prompts` by their ids."""
    return TrajectoryGroup(
        prompt=prompts[data["prompt"]],
        trajectories=tuple(map(_trajectory, data["trajectories"])),
        baseline=data["baseline"],
    )


def _trajectory(data: Mapping[str, Any]) -> Trajectory:
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    fields["rewards"] = tuple(TurnReward(**turn) for turn in data["rewards"])
    fields["failures"] = tuple(Failure(**failure) for failure in data["failures"])
    return Trajectory(**fields)
