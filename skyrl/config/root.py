"""The tree: everything that a run may say. Read `trainer.py` and `generator.py` next."""

from skyrl.config.data import DataConfig
from skyrl.config.entry import RunConfig
from skyrl.config.environment import EnvironmentConfig
from skyrl.config.generator import GeneratorConfig
from skyrl.config.trainer import TrainerConfig
from skyrl.tree import frozen


@frozen
class SkyRLTrainConfig(RunConfig):
    """One reinforcement-learning run."""

    data: DataConfig = DataConfig()
    """Which prompts."""

    trainer: TrainerConfig = TrainerConfig()
    """How the policy learns."""

    generator: GeneratorConfig = GeneratorConfig()
    """How samples are drawn."""

    environment: EnvironmentConfig = EnvironmentConfig()
    """What answers the policy and scores it."""
