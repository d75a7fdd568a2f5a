"""Configuration of a run: immutable classes, and nothing that can touch a GPU.

Read `root.py` first: it defines the tree. `load.py` reads a tree from files and arguments, `resolve.py` derives values
from others, `check.py` reports why a tree cannot run, and `kinds.py` lists the parts of each kind of run.
"""

from typing import TYPE_CHECKING

from skyrl.config.algorithm import AlgorithmConfig, DynamicSamplingConfig, KLCtrlConfig
from skyrl.config.check import check
from skyrl.config.data import DataConfig
from skyrl.config.deepspeed import DeepSpeedConfig, OffloadConfig, ZeroOptimizationConfig
from skyrl.config.engines import InferenceEngineConfig
from skyrl.config.entry import BaseConfig, build_nested_dataclass, get_config_as_dict, get_config_as_yaml_str
from skyrl.config.environment import (
    EnvironmentConfig,
    GSM8kLLMJudgeEnvConfig,
    RewardModelEnvConfig,
    SearchEnvConfig,
    SkyRLGymConfig,
    Text2SQLEnvConfig,
)
from skyrl.config.extension import make_config
from skyrl.config.faults import FaultsConfig
from skyrl.config.fully_async import FullyAsyncConfig
from skyrl.config.generator import ChatTemplateConfig, GeneratorConfig, SamplingParams
from skyrl.config.learners import (
    CriticConfig,
    FSDPConfig,
    MixedPrecisionConfig,
    OptimizerConfig,
    PolicyConfig,
    RefConfig,
)
from skyrl.config.load import Composed, compose, load
from skyrl.config.loaded import Loaded
from skyrl.config.losses import (
    CISPOConfig,
    ClipCovConfig,
    DecoupledConfig,
    DPPOConfig,
    GMPOConfig,
    KLCovConfig,
    OffPolicyCorrectionConfig,
    SAPOConfig,
)
from skyrl.config.megatron import (
    MegatronConfig,
    MegatronDDPConfig,
    MegatronLoraConfig,
    MegatronTorchProfilerConfig,
)
from skyrl.config.models import ModelConfig, SkyRLLoraConfig
from skyrl.config.placement import PlacementConfig
from skyrl.config.registry import (
    AdvantageEstimatorRegistry,
    PolicyLossRegistry,
    register_advantage_estimator,
    register_policy_loss,
)
from skyrl.config.resolve import resolve
from skyrl.config.rewards import NormConfig, OverlongConfig, RewardShapingConfig
from skyrl.config.root import SkyRLConfig, SkyRLTrainConfig
from skyrl.config.tracker_settings import TrackersConfig
from skyrl.config.trainer import TrainerConfig
from skyrl.errors import ConfigError

if TYPE_CHECKING:
    from skyrl.config.supervised.placement import SFTPlacementConfig
    from skyrl.config.supervised.root import RewardModelConfig, SFTConfig, SupervisedConfig

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
    "DPPOConfig",
    "DataConfig",
    "DecoupledConfig",
    "DeepSpeedConfig",
    "DynamicSamplingConfig",
    "EnvironmentConfig",
    "FSDPConfig",
    "FaultsConfig",
    "FullyAsyncConfig",
    "GMPOConfig",
    "GSM8kLLMJudgeEnvConfig",
    "GeneratorConfig",
    "InferenceEngineConfig",
    "KLCovConfig",
    "KLCtrlConfig",
    "Loaded",
    "MegatronConfig",
    "MegatronDDPConfig",
    "MegatronLoraConfig",
    "MegatronTorchProfilerConfig",
    "MixedPrecisionConfig",
    "ModelConfig",
    "NormConfig",
    "OffPolicyCorrectionConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "PlacementConfig",
    "PolicyConfig",
    "PolicyLossRegistry",
    "RefConfig",
    "RewardModelConfig",
    "RewardModelEnvConfig",
    "RewardShapingConfig",
    "SAPOConfig",
    "SFTConfig",
    "SFTPlacementConfig",
    "SamplingParams",
    "SearchEnvConfig",
    "SkyRLConfig",
    "SkyRLGymConfig",
    "SkyRLLoraConfig",
    "SkyRLTrainConfig",
    "SupervisedConfig",
    "Text2SQLEnvConfig",
    "TrackersConfig",
    "TrainerConfig",
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
        from skyrl.config.supervised import root

        return getattr(root, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
