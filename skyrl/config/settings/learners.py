"""The models of a run and how each is sharded and optimized: policy, critic, reference, teacher.

The sharding settings of every strategy stand side by side; `trainer.strategy` says which of them is read.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

import attrs

from skyrl.config.foundation.entry import BaseConfig, LocatedConfig
from skyrl.config.settings.deepspeed import DeepSpeedConfig, OffloadConfig, ZeroOptimizationConfig
from skyrl.config.settings.distillation import TeacherServerConfig
from skyrl.config.settings.megatron import MegatronConfig
from skyrl.config.settings.models import Dtype, ModelConfig
from skyrl.errors import Problem
from skyrl.tree import FREE, FrozenDict, field, frozen
from skyrl.tree.validators import (
    fraction,
    fraction_below_one,
    non_negative,
    number_of_items,
    positive,
    positive_or_minus_one,
    rule_of_one_field,
)

Scheduler = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    "warmup_stable_decay",
    "greedy",
]
"""Names of learning-rate schedules, as transformers' `get_scheduler` knows them."""

DECAYING = ("linear", "cosine", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay")
"""Schedules that end at `min_lr_ratio`."""

OURS = (*DECAYING, "constant", "constant_with_warmup", "inverse_sqrt")
"""Schedules that `skyrl.learners.schedule` computes itself; the others are transformers' own."""


@frozen
class OptimizerConfig(BaseConfig):
    """Optimizer, learning-rate schedule and gradient clipping, on every strategy."""

    optimizer: Literal["adamw", "cpu_adamw", "sgd", "muon"] = "adamw"
    """Rule of the optimizer step. adamw: arXiv:1711.05101. cpu_adamw: the same rule by DeepSpeed's vectorized kernel,
    for optimizer state in CPU memory (`deepspeed_config.zero_optimization.offload_optimizer.device = "cpu"`); it is
    compiled by g++ on first use on a machine (arXiv:2101.06840). sgd: the gradient times the learning rate, without
    momentum; it keeps no state, and learns at far larger rates than AdamW's. muon: the momentum of each matrix of the
    hidden layers is orthogonalized in bfloat16, embeddings, heads, norms and biases learn by AdamW, and one learning
    rate serves both (arXiv:2502.16982); on one rank and under FSDP."""

    lr: float = field(default=1e-6, validator=non_negative)
    """Learning rate after warm-up. 0 leaves the weights as they are, which shows whether anything else moves them."""

    adam_betas: tuple[float, ...] = field(
        default=(0.9, 0.999),
        validator=number_of_items(2, lambda beta: 0 <= beta < 1, "two numbers, each at least 0 and below 1"),
    )
    """Decay rates of AdamW's running means of the gradient and of its square."""

    adam_eps: float = field(default=1e-8, validator=positive)
    """Added to the root of the squared gradient's mean, by which a step of AdamW is divided; larger means smaller steps
    of weights whose gradient is tiny."""

    muon_momentum: float = field(default=0.95, validator=fraction_below_one)
    """Decay rate of Muon's running mean of a matrix's gradient."""

    weight_decay: float = field(default=0.01, validator=non_negative)
    """Decoupled weight decay: each step shrinks a weight by this fraction times the learning rate."""

    weight_decay_on: Literal["all", "matrices"] = "all"
    """Which of the trained weights decay: all, or only tensors of two or more dimensions. "matrices" leaves out biases
    and the weights of norms, as the trainers of transformers and TRL do."""

    max_grad_norm: float = field(default=1.0, validator=non_negative)
    """The gradient's global L2 norm is scaled down to this where it is larger. 0: no clipping."""

    max_skipped_updates: int = field(default=3, validator=non_negative)
    """Maximum number of consecutive optimizer steps skipped because their gradient is not finite; one more ends the
    run. All are counted. 0: the first one ends it."""

    initial_loss_scale: float = field(default=65536.0, validator=positive)
    """Initial loss scale if `fsdp_config.mixed_precision` names float16, in which gradients below 6e-8 are lost.
    Gradients are divided by the scale again before they are clipped."""

    min_loss_scale: float = field(default=1.0, validator=positive)
    """Minimum loss scale. A step skipped while the scale is above it does not count towards `max_skipped_updates`,
    since the next step has a smaller scale."""

    loss_scale_window: int = field(default=100, validator=positive)
    """Consecutive steps with finite gradients after which the loss scale doubles. If gradients then overflow, a step is
    lost, so a small window loses many."""

    hysteresis: int = field(default=2, validator=positive)
    """Number of steps with non-finite gradients, since the loss scale last doubled, from which on the scale halves."""

    offload_after_step: bool = field(default=True, metadata=FREE)
    """Move the optimizer's state to CPU memory while other models or engines take their turn on the same GPU."""

    num_warmup_steps: int = field(default=0, validator=non_negative)
    """Steps, counted as `schedule_unit` says, over which the rate rises from `warmup_start_ratio` x `lr` to `lr`."""

    warmup_steps_proportion: float | None = field(default=None, validator=fraction_below_one)
    """Length of warm-up as a share of all steps, rounded down. None: `num_warmup_steps` gives it."""

    warmup_start_ratio: float | None = field(default=None, validator=fraction)
    """Learning rate at the start of warm-up, as a share of `lr`. None: `min_lr_ratio` with cosine and
    cosine_warmup_with_min_lr, 0 otherwise."""

    scheduler: Scheduler = "constant_with_warmup"
    """Shape of the learning rate after warm-up. Schedules that decay span the whole run and depend on its length. The
    names are those of transformers; cosine_with_min_lr and cosine_warmup_with_min_lr are cosine."""

    min_lr_ratio: float = field(default=0.0, validator=fraction)
    """Learning rate at the end of linear, cosine and warmup_stable_decay, as a share of `lr`."""

    num_decay_steps: int | None = field(default=None, validator=positive)
    """Number of last steps of warmup_stable_decay over which the rate falls linearly. None: all after warm-up."""

    schedule_unit: Literal["optimizer_step", "training_step"] = "optimizer_step"
    """Unit of the schedule: optimizer steps (mini-batches), or training steps, in all of whose mini-batches the rate is
    the same. `num_warmup_steps` and `num_decay_steps` are counted in it."""

    def own_problems(self) -> Iterator[Problem]:
        """Warm-up has one length, and the initial loss scale is not below the minimum."""
        if self.initial_loss_scale < self.min_loss_scale:
            yield Problem(
                path="initial_loss_scale",
                message=f"{self.initial_loss_scale:g} is below min_loss_scale = {self.min_loss_scale:g}",
                hint="raise it, or lower the other",
            )
        if self.warmup_steps_proportion is not None and self.num_warmup_steps:
            yield Problem(
                path="warmup_steps_proportion",
                message=f"{self.warmup_steps_proportion}, but num_warmup_steps = {self.num_warmup_steps} is set, too",
                hint="leave one of them out",
            )


@frozen
class MixedPrecisionConfig(BaseConfig):
    """Types in which FSDP computes; master weights stay float32. In float16 the loss is scaled: see
    `optimizer_config.initial_loss_scale`.
    """

    param_dtype: Dtype = "bf16"
    """Type of the gathered weights, and so of forward and backward."""

    reduce_dtype: Dtype = "fp32"
    """Type in which gradients are summed over ranks."""

    buffer_dtype: Dtype = "fp32"
    """Type of buffers, such as rotary frequencies."""


@frozen
class FSDPConfig(BaseConfig):
    """Sharding with PyTorch's fully sharded data parallelism; read when `trainer.strategy` is `fsdp` or `fsdp2`."""

    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in CPU memory and copy weights to the GPU when a layer needs them.
    Unlike the offloading between phases that colocation does, this costs time in every pass."""

    reshard_after_forward: bool | int = field(
        default=True,
        validator=rule_of_one_field(
            lambda value: isinstance(value, bool) or value > 0, "true, false or a positive number"
        ),
    )
    """Free a layer's gathered weights after forward, and gather them again in backward. False keeps them (as ZeRO-2
    does); a number, at most `fsdp_size`, keeps them sharded over that many ranks."""

    fsdp_size: int = field(default=-1, validator=positive_or_minus_one("all ranks"))
    """Ranks that share one copy of the weights; beyond it, copies are replicated (hybrid sharding). -1: all ranks."""

    mixed_precision: MixedPrecisionConfig | None = None
    """Types in which FSDP computes. None: `trainer.compute_dtype` for the weights, float32 for sums and buffers."""

    wrap_policy: Mapping[str, Any] = FrozenDict()
    """Modules sharded as a unit: `transformer_layer_cls_to_wrap` lists classes. Empty: the model's own list."""


class ModelDefaults:
    """Settings of a policy that other models do not have, with their values in those."""

    use_torch_compile: bool = False
    moe_enable_routing_replay: bool = False
    router_aux_loss_coef: float = 0.0
    router_z_loss_coef: float = 0.0


@frozen
class ShardedModelConfig(ModelDefaults, LocatedConfig):
    """A model and how it is spread over ranks."""

    model: ModelConfig = ModelConfig()
    """Weights to start from."""

    fsdp_config: FSDPConfig = FSDPConfig()
    """Sharding under FSDP."""

    deepspeed_config: DeepSpeedConfig = DeepSpeedConfig()
    """Sharding under DeepSpeed."""

    megatron_config: MegatronConfig = MegatronConfig()
    """Sharding under Megatron; the last pipeline stage holds the head of a critic or reward model."""

    model_config_kwargs: Mapping[str, Any] = FrozenDict()
    """Values by name that replace those of the model's Hugging Face configuration, such as `max_position_embeddings`,
    in learner and exports, and in the engines of a policy. A reference loaded from the policy's path must have the
    policy's values. Under Megatron: `megatron_config.model_config_kwargs`."""

    sequence_parallel_size: int = field(default=1, validator=positive)
    """Consecutive ranks that share sequences (Ulysses, arXiv:2309.14509): each computes a stretch of every packed row,
    and in attention some of the heads. Divides the number of ranks and of attention heads. 1: every rank computes whole
    rows of its own. Under Megatron: `context_parallel_size` instead."""

    context_parallel_size: int = field(default=1, validator=positive)
    """Ranks that share sequences, each of which attends from its own tokens to gathered keys and values: for sequences
    longer than a GPU holds, and models with fewer heads than `sequence_parallel_size` needs. Divides the number of
    ranks. 1: none. Under Megatron: `megatron_config.context_parallel_size` instead."""

    tensor_parallel_size: int = field(default=1, validator=positive)
    """Consecutive ranks that each hold a part of every large matrix and compute on the same rows (arXiv:1909.08053).
    Divides the number of ranks, of attention heads, and of key and value heads; needs a plan of transformers for the
    model. Under DeepSpeed: by AutoTP's layers. 1: matrices are whole. Under Megatron: `tensor_model_parallel_size`
    instead."""

    expert_parallel_size: int = field(default=1, validator=positive)
    """Consecutive ranks that hold different experts of a mixture of experts (GShard, arXiv:2006.16668): tokens travel
    to them and back, and no layer is gathered whole. Divides the number of ranks and of experts; under FSDP, with
    `fsdp_size = -1` and `tensor_parallel_size = 1`. 1: every rank computes all experts for its tokens. Under Megatron:
    `megatron_config.expert_model_parallel_size` instead."""


def sets_dropout(name: str, value: object) -> bool:
    """Whether a field of a model's Hugging Face configuration sets dropout, such as `attention_dropout = 0.1`."""
    return "drop" in name and not isinstance(value, bool) and isinstance(value, int | float) and value > 0


@frozen
class LearnerConfig(ShardedModelConfig):
    """A model that learns."""

    optimizer_config: OptimizerConfig = OptimizerConfig()
    """How the weights are updated."""

    use_dropout: bool = False
    """Train with the dropout that the model's configuration names, such as `attention_dropout`; off while scoring and
    in evaluation. What is dropped follows from `seed`, the optimizer step, the rank and the cut into micro-batches.
    Refused for a model without any, and if the loss compares with numbers that were computed without dropout:
    log-probabilities, or values under `trainer.algorithm.value_clip`."""


@frozen
class PolicyConfig(LearnerConfig):
    """The model that is trained and that the inference engines serve."""

    table_path: ClassVar[str] = "trainer.policy"

    model: ModelConfig = ModelConfig(path="Qwen/Qwen2.5-1.5B-Instruct")
    """Weights to start from."""

    router_aux_loss_coef: float = field(default=0.0, validator=non_negative)
    """Weight of the load-balancing loss in the policy's loss, for a mixture of experts: E sum_i f_i P_i over its E
    experts (arXiv:2101.03961, eq. 4), the mean over layers and over the rows of a mini-batch (arXiv:2412.19437, eq.
    17), so that packing, micro-batches and ranks change nothing. f_i is the mean number of choices of expert i for a
    token of the row, prompt included, and P_i its mean probability: with even loads the sum is K, the number of experts
    per token. The coefficient in the model's own configuration is not read. 0: none."""

    router_z_loss_coef: float = field(default=0.0, validator=non_negative)
    """Weight of the z-loss in the policy's loss, for a mixture of experts: the mean square of the log sum exp of a
    router's logits (ST-MoE, arXiv:2202.08906, eq. 5). 0: none."""

    moe_enable_routing_replay: bool = False
    """Route each token to the experts that the engine chose for it, in scoring and in updates, so that rounding changes
    no choice (rollout routing replay, arXiv:2510.11370). The weights of the experts come from the learner's own router
    logits, and gradients flow through them. Needs
    `generator.inference_engine.enable_return_routed_experts`."""

    use_torch_compile: bool = False
    """Compile parts of an update by `torch.compile`: on CUDA the decoder layers, each kind of layer once for all
    lengths, in place of `trainer.use_liger_kernel`; on a CPU log-probabilities and entropy from logits, which takes g++
    or another C++ compiler. The first updates wait for the compiler, which keeps its results between runs. Equal up to
    rounding."""

    record_memory: bool = field(default=False, metadata=FREE)
    """With `trainer.profile_steps`: write what each optimizer step allocates beside its trace, as a table of operators
    by memory and, on CUDA, a snapshot of every allocation for pytorch.org/memory_viz."""


@frozen
class CriticConfig(LearnerConfig):
    """The model that predicts returns, for `advantage_estimator = "gae"`; there is one if its `model.path` is given."""

    table_path: ClassVar[str] = "trainer.critic"

    model: ModelConfig = ModelConfig()
    """Weights to start from; the value head is new."""

    optimizer_config: OptimizerConfig = OptimizerConfig(lr=5e-6)
    """How the weights are updated; the default learning rate is five times the policy's."""


@frozen
class RefConfig(ShardedModelConfig):
    """The frozen model that the policy is held near to; loaded only if `use_kl_loss` or `use_kl_in_reward` is on."""

    table_path: ClassVar[str] = "trainer.ref"

    model: ModelConfig = ModelConfig()
    """Model of the reference; without a path, the weights that the policy starts from."""

    moe_enable_routing_replay: bool = False
    """Route each token to the experts that the engine chose for it, as in the policy; needs a reference with the same
    number of experts in each layer."""

    deepspeed_config: DeepSpeedConfig = DeepSpeedConfig(
        zero_optimization=ZeroOptimizationConfig(offload_param=OffloadConfig(device="cpu"))
    )
    """Sharding under DeepSpeed; its weights rest in CPU memory, since they are read once a step."""


_without_empty_texts = rule_of_one_field(lambda value: all(value) and all(value.values()), "a table free of empty text")


@frozen
class TeacherEndpointConfig(TeacherServerConfig):
    """Teachers behind servers, which score tokens over HTTP. The variable SKYRL_TEACHER_TOKEN holds the token that they
    require, if any.
    """

    sources: Mapping[str, str] = field(default=FrozenDict(), validator=_without_empty_texts)
    """Data source -> address of the server of its own teacher. Rows of other sources are taught as
    `trainer.teacher.sources` says."""


@frozen
class TeacherConfig(ShardedModelConfig):
    """The frozen models that the policy is distilled from; there are some if `model.path`, `sources` or the address of
    a server is given. See `trainer.algorithm.distillation`.
    """

    table_path: ClassVar[str] = "trainer.teacher"

    model: ModelConfig = ModelConfig()
    """Model of the teacher, of any size and architecture; its tokenizer must have the policy's tokens."""

    sources: Mapping[str, str] = field(default=FrozenDict(), validator=_without_empty_texts)
    """Data source -> folder or hub name of its own teacher, of any size and architecture, on the same ranks as the
    teacher of `model.path` and sharded as this table says. Rows of other sources are taught by `endpoint.sources`, and
    the rest by `model.path` or `endpoint.url`; without either, every source needs a teacher of its own."""

    endpoint: TeacherEndpointConfig = TeacherEndpointConfig()
    """Teachers behind servers."""

    deepspeed_config: DeepSpeedConfig = DeepSpeedConfig(
        zero_optimization=ZeroOptimizationConfig(offload_param=OffloadConfig(device="cpu"))
    )
    """Sharding under DeepSpeed; its weights rest in CPU memory, since they are read once a step."""

    @property
    def local_paths(self) -> tuple[str, ...]:
        """Paths of the teachers that the run itself holds, each once, that of `model.path` first."""
        return tuple(dict.fromkeys(path for path in (self.model.path, *self.sources.values()) if path))

    @property
    def named_sources(self) -> frozenset[str]:
        """The data sources with a teacher of their own."""
        return frozenset((*self.sources, *self.endpoint.sources))

    def of(self, path: str) -> Self:
        """The table of one of the teachers of `local_paths`."""
        if path == self.model.path:
            return self
        return attrs.evolve(self, model=ModelConfig(path=path), model_config_kwargs=FrozenDict())
