"""Settings of trackers: what their services show of a run beside its metrics, and where they keep it.

Keys of services come from the environment (`WANDB_API_KEY`, `SWANLAB_API_KEY`) or the services' own logins, never from
a configuration, which is stored.
"""

from typing import Literal

from skyrl.config.foundation.entry import BaseConfig
from skyrl.tree import FREE, field, frozen
from skyrl.tree.types import Seconds
from skyrl.tree.validators import http_address, non_negative, text_like

_is_id = text_like(r"^[A-Za-z0-9_-]{1,64}$", "an id: 1 to 64 letters, digits, - and _")


@frozen
class WandbConfig(BaseConfig):
    """Weights & Biases, read where `logger` names `wandb`."""

    entity: str | None = field(default=None, metadata=FREE)
    """Team or user that the run belongs to. None: the default of the account."""

    mode: Literal["online", "offline"] | None = field(default=None, metadata=FREE)
    """online: sent during the run; offline: kept in the run's folder, for `wandb sync`. None: the variable WANDB_MODE,
    online without it."""

    id: str | None = field(default=None, validator=_is_id, metadata=FREE)
    """Id of the run. None: one is made when the run first starts; resumed runs keep it either way."""

    base_url: str | None = field(default=None, validator=http_address, metadata=FREE)
    """Address of a self-hosted server. None: the variable WANDB_BASE_URL, the public service without it."""


@frozen
class SwanLabConfig(BaseConfig):
    """SwanLab, read where `logger` names `swanlab`."""

    workspace: str | None = field(default=None, metadata=FREE)
    """Workspace that the run belongs to. None: that of the account."""

    mode: Literal["online", "offline"] | None = field(default=None, metadata=FREE)
    """online: sent during the run; offline: kept below `path`, for `swanlab sync`. None: the variable SWANLAB_MODE,
    online without it."""

    id: str | None = field(default=None, validator=_is_id, metadata=FREE)
    """Id of the run. None: one is made when the run first starts; resumed runs keep it either way."""

    path: str | None = field(default=None, metadata=FREE)
    """Folder of its local files. None: `swanlog` in the run's folder."""


@frozen
class MlflowConfig(BaseConfig):
    """MLflow, read where `logger` names `mlflow`."""

    tracking_uri: str | None = field(default=None, metadata=FREE)
    """Address of a tracking server, or `sqlite:///FILE`. None: the variable MLFLOW_TRACKING_URI; without it the file
    `mlflow.db` beside the run's folder, which runs there share."""


@frozen
class TensorBoardConfig(BaseConfig):
    """TensorBoard, read where `logger` names `tensorboard`."""

    path: str | None = field(default=None, metadata=FREE)
    """Folder of the event files, one for each run. None: `tensorboard` in the run's folder."""


@frozen
class TrackersConfig(BaseConfig):
    """Content and places of trackers other than the console; see docs/tracking.md."""

    tags: tuple[str, ...] = field(default=(), metadata=FREE)
    """Labels to find the run by."""

    notes: str | None = field(default=None, metadata=FREE)
    """Text about the run, for people to read."""

    group: str | None = field(default=None, metadata=FREE)
    """Name that runs of one experiment share, such as its seeds."""

    job_type: str | None = field(default=None, metadata=FREE)
    """Name of the run's part in its group, such as `train`."""

    sample_rows: int = field(default=8, validator=non_negative, metadata=FREE)
    """Sampled answers of each step, and evaluated ones of each data source, that are shown in tables. 0: none."""

    finish_seconds: Seconds = field(default=30.0, validator=non_negative, metadata=FREE)
    """Longest wait at the end of a run for trackers to catch up; `skyrl track` delivers the rest."""

    python: str | None = field(default=None, metadata=FREE)
    """Python interpreter that trackers run in, for a package that does not install beside the others: one with
    `skyrl-attrs[mlflow]`, for example. None: that of the run."""

    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""

    swanlab: SwanLabConfig = SwanLabConfig()
    """SwanLab."""

    mlflow: MlflowConfig = MlflowConfig()
    """MLflow."""

    tensorboard: TensorBoardConfig = TensorBoardConfig()
    """TensorBoard."""
