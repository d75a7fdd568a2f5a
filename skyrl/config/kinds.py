"""The kinds of run, and the tree that each is read into."""

from __future__ import annotations

from skyrl.config.entry import RunConfig
from skyrl.config.root import SkyRLTrainConfig

KINDS = ("rl", "sft", "reward_model")
"""What a file's `kind` may name."""


def root_of(kind: str) -> type[RunConfig]:
    """The class of the tree. Those of supervised runs are imported for such runs alone: checking an RL file is quick.

    Raises `KeyError` for a kind that there is not.
    """
    if kind == "rl":
        return SkyRLTrainConfig
    from skyrl.config.supervised import RewardModelConfig, SFTConfig

    return {"sft": SFTConfig, "reward_model": RewardModelConfig}[kind]
