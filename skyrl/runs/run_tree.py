"""The configuration of any kind of run."""

from __future__ import annotations

from skyrl.config import SkyRLTrainConfig, SupervisedConfig

AnyRun = SkyRLTrainConfig | SupervisedConfig
"""The root of a configuration: `.trainer` has the settings that every kind of run has."""
