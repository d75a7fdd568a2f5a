"""The configuration tree of a reinforcement-learning run. Read `trainer.py` and `generator.py` next."""

from typing import Literal

from skyrl.config.foundation.entry import RunConfig
from skyrl.config.settings.data import DataConfig
from skyrl.config.settings.environment import EnvironmentConfig
from skyrl.config.settings.generator import GeneratorConfig
from skyrl.config.settings.trainer import TrainerConfig
from skyrl.config.settings.training_service import TrainingServiceConfig
from skyrl.tree import IDENTITY, field, frozen


@frozen
class SkyRLTrainConfig(RunConfig):
    """One reinforcement-learning run."""

    data: DataConfig = DataConfig()
    """Prompts for training and evaluation."""

    trainer: TrainerConfig = TrainerConfig()
    """How the policy learns."""

    generator: GeneratorConfig = GeneratorConfig()
    """How samples are drawn."""

    environment: EnvironmentConfig = EnvironmentConfig()
    """Tasks that answer the policy and score it."""

    training_service: TrainingServiceConfig = TrainingServiceConfig()
    """The training service of `skyrl serve-training`, in which clients hold the loop (docs/training-service.md)."""

    kind: Literal["rl"] = field(default="rl", metadata=IDENTITY)
    """Kind of run, which decides the tree that a file is read into: this one, or that of `sft`, `reward_model` or
    `preference` (docs/sft.md, docs/preferences.md)."""


SkyRLConfig = SkyRLTrainConfig
"""The same class under the name that it has in the design of SkyRL's configuration."""
