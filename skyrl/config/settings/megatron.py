"""How Megatron-core splits a model; read when `trainer.strategy` is `megatron`."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from skyrl.config.foundation.entry import BaseConfig
from skyrl.tree import FREE, FrozenDict, field, frozen
from skyrl.tree.validators import positive, rule_of_one_field

OPTIMIZER_DEFAULTS = FrozenDict(
    {
        "overlap_cpu_optimizer_d2h_h2d": False,
        "use_precision_aware_optimizer": False,
        "optimizer_cpu_offload": False,
        "optimizer_offload_fraction": 0.0,
    }
)
"""Default content of `optimizer_config_kwargs`: optimizer state stays on the GPU."""

TRANSFORMER_DEFAULTS = FrozenDict(
    {
        "recompute_granularity": "full",
        "recompute_modules": ["core_attn"],
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
)
"""Default content of `transformer_config_kwargs`: every layer is recomputed in backward."""


def filled_up(defaults: Mapping[str, Any]) -> Callable[[Any], Any]:
    """A converter that adds entries of `defaults` missing from a table. To switch an entry off, set it explicitly."""

    def convert(value: object) -> object:
        return {**defaults, **value} if isinstance(value, Mapping) else value

    return convert


@frozen
class MegatronDDPConfig(BaseConfig):
    """Megatron's distributed data parallelism."""

    grad_reduce_in_fp32: bool = True
    """Sum gradients over ranks in float32 whatever the model computes in."""

    overlap_grad_reduce: bool = False
    """Sum gradients during the backward pass."""

    overlap_param_gather: bool = False
    """Gather updated weights during the forward pass; needs `overlap_grad_reduce`."""

    average_in_collective: bool = True
    """Average in the collective itself; false divides before and sums."""


@frozen
class MegatronLoraConfig(BaseConfig):
    """The form of adapters under Megatron; their size is in `model.lora`."""

    lora_type: Literal["lora", "canonical_lora"] = "lora"
    """lora: layers that Megatron-core fuses (query, key and value; gate and up) share the factor A of their adapters;
    canonical_lora: each has its own, as under the other strategies, whose adapters it can resume."""


@frozen
class MegatronTorchProfilerConfig(BaseConfig):
    """Traces by torch.profiler of a training phase."""

    enable: bool = field(default=False, metadata=FREE)
    """Record traces."""

    ranks: tuple[int, ...] = field(
        default=(),
        validator=rule_of_one_field(lambda ranks: all(rank >= 0 for rank in ranks), "a list of ranks (0 and up)"),
        metadata=FREE,
    )
    """Ranks that are traced. With `enable` it may not be empty."""

    save_path: str | None = field(default=None, metadata=FREE)
    """Local folder for the traces. With `enable` it must be given."""


@frozen
class MegatronConfig(BaseConfig):
    """Degrees of parallelism and options of Megatron-core. Ranks = data x tensor x pipeline x context."""

    tensor_model_parallel_size: int = field(default=1, validator=positive)
    """Ranks that share each matrix."""

    pipeline_model_parallel_size: int = field(default=1, validator=positive)
    """Ranks that each hold a run of layers."""

    context_parallel_size: int = field(default=1, validator=positive)
    """Ranks that share one sequence; above 1 it needs `trainer.use_sample_packing`."""

    expert_model_parallel_size: int = field(default=1, validator=positive)
    """Ranks that the experts of each layer are distributed over (GShard, arXiv:2006.16668), within a pipeline stage.
    Divides the experts of a layer; its product with `expert_tensor_parallel_size` divides the ranks of a stage."""

    expert_tensor_parallel_size: int | None = field(default=None, validator=positive)
    """Ranks that split the matrices of each expert; divides the intermediate size of an expert. None:
    `tensor_model_parallel_size`."""

    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens reach experts on other ranks. alltoall: each token goes to the ranks of its experts; allgather: every
    rank gets all tokens; flex: the package DeepEP sends them, on CUDA."""

    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"] = "none"
    """Load balancing of the router. none: the router is unchanged, as in the engines. aux_loss, seq_aux_loss and
    global_aux_loss: a loss (arXiv:2101.03961) over a micro-batch, a sequence or all ranks, times
    `transformer_config_kwargs.moe_aux_loss_coeff`, or else the model's own `router_aux_loss_coef`. sinkhorn: tokens
    are assigned evenly (arXiv:2103.16716) in training, with weights that do not sum to 1."""

    moe_grouped_gemm: bool = True
    """Compute all experts of a rank in one kernel (bfloat16 on CUDA). false: one matrix product per expert."""

    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] | None = None
    """Function from router logits to scores. None: as the model's own configuration says. Megatron-core 0.16 has no
    sqrtsoftplus."""

    moe_router_enable_expert_bias: bool | None = None
    """Choose experts by score plus a bias per expert, which is raised after each step for experts with few tokens and
    lowered for the others (arXiv:2408.15664). Needs `moe_router_score_function = "sigmoid"`. The bias is in
    checkpoints, not in exports. None: as the model's own configuration says."""

    ddp_config: MegatronDDPConfig = MegatronDDPConfig()
    """Data parallelism."""

    torch_profiler_config: MegatronTorchProfilerConfig = MegatronTorchProfilerConfig()
    """Traces."""

    lora_config: MegatronLoraConfig = MegatronLoraConfig()
    """Form of adapters."""

    optimizer_config_kwargs: Mapping[str, Any] = field(
        default=OPTIMIZER_DEFAULTS, converter=filled_up(OPTIMIZER_DEFAULTS)
    )
    """Fields of Megatron's OptimizerConfig, without those that have a setting of their own, such as `lr`. Entries that
    are not written keep the defaults shown."""

    transformer_config_kwargs: Mapping[str, Any] = field(
        default=TRANSFORMER_DEFAULTS, converter=filled_up(TRANSFORMER_DEFAULTS)
    )
    """Fields of Megatron's TransformerConfig. Entries that are not written keep the defaults shown; recomputation is
    switched off by `recompute_granularity = null`, in TOML `"none"`."""

    empty_cuda_cache: bool | None = field(default=None, metadata=FREE)
    """Give cached GPU memory back after every optimizer step. None: no."""

    model_config_kwargs: Mapping[str, Any] = FrozenDict()
    """Overrides of the Hugging Face model configuration before it is translated to Megatron's."""

    dist_ckpt_optim_fully_reshardable: bool = field(default=False, metadata=FREE)
    """Store optimizer state so that any other number of ranks and any parallelism can load it; slower to write."""
