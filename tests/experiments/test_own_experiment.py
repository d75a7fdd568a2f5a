"""An experiment of a user's own, whose root class has fields of its own."""

from __future__ import annotations

from pathlib import Path

from skyrl.config import SkyRLTrainConfig, TrainerConfig, compose
from skyrl.experiments.ppo import BasePPOExp
from skyrl.tree import frozen
from tests.nano_run import overrides


@frozen
class OwnTrainer(TrainerConfig):
    bonus: float = 0.0
    """Reward that this experiment adds."""


@frozen
class OwnRun(SkyRLTrainConfig):
    trainer: OwnTrainer = OwnTrainer()


class OwnExp(BasePPOExp):
    @classmethod
    def get_config_cls(cls) -> type[OwnRun]:
        return OwnRun


def test_a_script_reads_arguments_into_the_root_class_of_its_experiment(nano: Path, tmp_path: Path) -> None:
    values = overrides(nano, tmp_path) | {"trainer.bonus": 0.5}
    run = compose([], values, root=OwnExp.get_config_cls()).config
    assert OwnExp(run).cfg.trainer == run.trainer and run.trainer.bonus == 0.5
    assert BasePPOExp.get_config_cls() is SkyRLTrainConfig
