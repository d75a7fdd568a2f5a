"""Configuration of a run: immutable classes, and nothing that can touch a GPU.

Read `settings/root.py` first: it defines the tree. `derive/` fills what is unset, `checks/` finds what cannot run, and
`effects/` what has no effect. `loading/load.py` goes from files and arguments to a checked tree, `loading/kinds.py`
lists the parts of each kind of run.
"""

from typing import TYPE_CHECKING

from skyrl.config.foundation.entry import BaseConfig, build_nested_dataclass, get_config_as_dict, get_config_as_yaml_str
from skyrl.config.loading.check import check
from skyrl.config.loading.extension import make_config
from skyrl.config.loading.load import Composed, compose, load
from skyrl.config.loading.resolve import Loaded, resolve
from skyrl.config.settings.algorithm import AlgorithmConfig, DynamicSamplingConfig, KLCtrlConfig
from skyrl.config.settings.data import DataConfig
from skyrl.config.settings.deepspeed import DeepSpeedConfig, OffloadConfig, ZeroOptimizationConfig
from skyrl.config.settings.distillation import DistillationConfig, HintConfig
from skyrl.config.settings.engines import InferenceEngineConfig
from skyrl.config.settings.environment import (
    EnvironmentConfig,
    GSM8kLLMJudgeEnvConfig,
    PairwiseJudgeEnvConfig,
    RewardModelEnvConfig,
    SearchEnvConfig,
    SkyRLGymConfig,
    Text2SQLEnvConfig,
)
from skyrl.config.settings.faults import FaultsConfig
from skyrl.config.settings.fully_async import FullyAsyncConfig
from skyrl.config.settings.generator import ChatTemplateConfig, GeneratorConfig, SamplingParams
from skyrl.config.settings.learners import (
    CriticConfig,
    FSDPConfig,
    MixedPrecisionConfig,
    OptimizerConfig,
    PolicyConfig,
    RefConfig,
    TeacherConfig,
)
from skyrl.config.settings.losses import (
    CISPOConfig,
    ClipCovConfig,
    DecoupledConfig,
    DPPOConfig,
    GMPOConfig,
    KLCovConfig,
    OffPolicyCorrectionConfig,
    OnlineDPOConfig,
    SAPOConfig,
)
from skyrl.config.settings.megatron import (
    MegatronConfig,
    MegatronDDPConfig,
    MegatronLoraConfig,
    MegatronTorchProfilerConfig,
)
from skyrl.config.settings.models import ModelConfig, SkyRLLoraConfig
from skyrl.config.settings.placement import PlacementConfig
from skyrl.config.settings.registry import (
    AdvantageEstimatorRegistry,
    PolicyLossRegistry,
    register_advantage_estimator,
    register_policy_loss,
)
from skyrl.config.settings.rewards import NormConfig, OverlongConfig, RewardShapingConfig
from skyrl.config.settings.root import SkyRLConfig, SkyRLTrainConfig
from skyrl.config.settings.samplers import (
    CurriculumConfig,
    MixtureStage,
    PoolConfig,
    SamplerConfig,
    SamplerStage,
    TargetDifficultyConfig,
)
from skyrl.config.settings.trackers import TrackersConfig
from skyrl.config.settings.trainer import TrainerConfig
from skyrl.config.settings.training_service import TrainingServiceConfig
from skyrl.errors import ConfigError

if TYPE_CHECKING:
    from skyrl.config.settings.placement import SFTPlacementConfig
    from skyrl.config.settings.preference_root import PreferenceConfig
    from skyrl.config.settings.supervised_root import RewardModelConfig, SFTConfig, SupervisedConfig

__all__ = [
    "AdvantageEstimatorRegistry",
    "AlgorithmConfig",
    "BaseConfig",
    "CISPOConfig",
    "ChatTemplateConfig",
    "ClipCovConfig",
    "Composed",
    "ConfigError",
    "CriticConfig",
    "CurriculumConfig",
    "DPPOConfig",
    "DataConfig",
    "DecoupledConfig",
    "DeepSpeedConfig",
    "DistillationConfig",
    "DynamicSamplingConfig",
    "EnvironmentConfig",
    "FSDPConfig",
    "FaultsConfig",
    "FullyAsyncConfig",
    "GMPOConfig",
    "GSM8kLLMJudgeEnvConfig",
    "GeneratorConfig",
    "HintConfig",
    "InferenceEngineConfig",
    "KLCovConfig",
    "KLCtrlConfig",
    "Loaded",
    "MegatronConfig",
    "MegatronDDPConfig",
    "MegatronLoraConfig",
    "MegatronTorchProfilerConfig",
    "MixedPrecisionConfig",
    "MixtureStage",
    "ModelConfig",
    "NormConfig",
    "OffPolicyCorrectionConfig",
    "OffloadConfig",
    "OnlineDPOConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "PairwiseJudgeEnvConfig",
    "PlacementConfig",
    "PolicyConfig",
    "PolicyLossRegistry",
    "PoolConfig",
    "PreferenceConfig",
    "RefConfig",
    "RewardModelConfig",
    "RewardModelEnvConfig",
    "RewardShapingConfig",
    "SAPOConfig",
    "SFTConfig",
    "SFTPlacementConfig",
    "SamplerConfig",
    "SamplerStage",
    "SamplingParams",
    "SearchEnvConfig",
    "SkyRLConfig",
    "SkyRLGymConfig",
    "SkyRLLoraConfig",
    "SkyRLTrainConfig",
    "SupervisedConfig",
    "TargetDifficultyConfig",
    "TeacherConfig",
    "Text2SQLEnvConfig",
    "TrackersConfig",
    "TrainerConfig",
    "TrainingServiceConfig",
    "ZeroOptimizationConfig",
    "build_nested_dataclass",
    "check",
    "compose",
    "get_config_as_dict",
    "get_config_as_yaml_str",
    "load",
    "make_config",
    "register_advantage_estimator",
    "register_policy_loss",
    "resolve",
]


def __getattr__(name: str) -> object:
    """Imports the classes of supervised runs on demand (PEP 562): an RL file is checked without them."""
    if name in ("RewardModelConfig", "SFTConfig", "SFTPlacementConfig", "SupervisedConfig"):
        from skyrl.config.settings import supervised_root as root

        return getattr(root, name)
    if name == "PreferenceConfig":
        from skyrl.config.settings.preference_root import PreferenceConfig

        return PreferenceConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
