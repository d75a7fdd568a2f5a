"""Settings of DeepSpeed's ZeRO; read when `trainer.strategy` is `deepspeed`. Names and meanings are DeepSpeed's.

Batch sizes, precision, clipping and the optimizer are not here: each has one place in the tree, for every strategy.
`"auto"` leaves a size to DeepSpeed's own default.
"""

from typing import Literal

from skyrl.config.foundation.entry import BaseConfig
from skyrl.config.settings.models import Dtype
from skyrl.tree import FREE, field, frozen
from skyrl.tree.validators import left_alone, positive, rule_of_one_field

Auto = Literal["auto"]

_size = rule_of_one_field(lambda value: value == "auto" or value >= 0, 'zero or positive, or "auto"', minimum=0)
_positive_size = rule_of_one_field(
    lambda value: value == "auto" or value > 0, 'positive, or "auto"', exclusiveMinimum=0
)


@frozen
class OffloadConfig(BaseConfig):
    """Location of sharded state while it is not in use."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """Device that holds the state. none: it stays on the GPU."""

    pin_memory: bool = field(default=False, metadata=FREE)
    """Page-locked CPU memory: faster copies, and memory that nothing else can use."""

    nvme_path: str | None = field(default=None, metadata=FREE)
    """Folder on the local NVMe drive; needed by, and only for, `device = "nvme"`."""


@frozen
class ZeroOptimizationConfig(BaseConfig):
    """The Zero Redundancy Optimizer (arXiv:1910.02054)."""

    stage: Literal[0, 1, 2, 3] = 3
    """State that is sharded over ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too."""

    offload_param: OffloadConfig = OffloadConfig()
    """Offloading of the weights; stage 3 only."""

    offload_optimizer: OffloadConfig = OffloadConfig()
    """Offloading of the optimizer state, whose step then runs on the CPU; stages 1 to 3."""

    zero_hpz_partition_size: int = field(default=1, validator=positive)
    """Ranks that keep a second sharded copy of the weights among them, so that backward gathers inside that group:
    usually the GPUs of a node. 1: none. Stage 3 only."""

    zero_quantized_weights: bool = False
    """Gather weights as 8-bit integers: less traffic, and a rounding error in every forward. Stage 3 only."""

    zero_quantized_gradients: bool = False
    """Sum gradients as 4-bit integers between nodes. Stage 3 only."""

    overlap_comm: bool = True
    """Sum gradients during the backward pass."""

    contiguous_gradients: bool = True
    """Copy gradients into one buffer as they appear, to avoid fragmentation."""

    round_robin_gradients: bool = False
    """Spread the copying of gradients over ranks, with an offloaded optimizer. Stages 1 and 2 only."""

    reduce_bucket_size: int | Auto = field(default="auto", validator=_positive_size)
    """Elements summed over ranks at a time."""

    allgather_bucket_size: int | Auto = field(default="auto", validator=_positive_size)
    """Elements of updated weights gathered at a time. Stages 1 and 2 only."""

    sub_group_size: int | Auto = field(default="auto", validator=_positive_size)
    """Weights that the optimizer updates at a time; smaller bounds what an offloaded step holds. Stage 3 only."""

    stage3_max_live_parameters: int | Auto = field(default="auto", validator=_size)
    """Gathered weights that a GPU may hold at once. 0: release at once."""

    stage3_max_reuse_distance: int | Auto = field(default="auto", validator=_size)
    """A weight that is needed again within this many weights is not released. 0: always release."""

    stage3_prefetch_bucket_size: int | Auto = field(default="auto", validator=_size)
    """Weights gathered ahead of their use. 0: none."""

    stage3_param_persistence_threshold: int | Auto = field(default="auto", validator=_size)
    """A tensor with fewer weights than this is never sharded. 0: all are."""

    stage3_gather_16bit_weights_on_model_save: bool = field(default=False, metadata=FREE)
    """Gather the whole model when DeepSpeed itself saves one; checkpoints and exports of a run do not need it."""


@frozen
class DeepSpeedConfig(BaseConfig):
    """One model's DeepSpeed engine."""

    zero_optimization: ZeroOptimizationConfig = ZeroOptimizationConfig()
    """Sharding and offloading."""

    communication_data_type: Dtype | None = None
    """Type in which gradients travel. None: the type that the model computes in."""

    prescale_gradients: bool = False
    """Divide gradients by the number of ranks before they are summed, not after, to avoid overflow in float16."""

    gradient_clipping: float | None = field(
        default=None, validator=left_alone("set optimizer_config.max_grad_norm, which clips under every strategy")
    )
    """Stays None: clipping is set by `optimizer_config.max_grad_norm`, under every strategy."""

    wall_clock_breakdown: bool = field(default=False, metadata=FREE)
    """Log the time of forward, backward and step; each is then waited for, which is slower."""
