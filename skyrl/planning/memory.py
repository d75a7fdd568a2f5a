"""Bytes on one GPU, part by part, in each phase of a training step.

`learner_memory` counts a policy, critic, reference or teacher; `serving_memory` an engine. Each phase counts at its
peak; in an update this is the largest of three moments: the loss, backward, and the optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, get_args

from attrs import frozen

from skyrl.planning.activations import (
    FLOAT,
    Computing,
    Pass,
    backward_bytes,
    layer_bytes,
    logits_bytes,
    stream_bytes,
    transient_bytes,
)
from skyrl.planning.model_shape import ModelShape

Part = Literal["parameters", "gradients", "optimizer", "activations", "logits", "cache", "transfer", "overhead"]
PARTS: tuple[Part, ...] = get_args(Part)
Bytes = Mapping[Part, int]
"""Part -> bytes; parts with 0 bytes may be omitted."""

IN_FLIGHT = 256 * 2**20
"""Bytes of whole weights in flight at once when they are gathered for engines."""


@frozen(kw_only=True)
class ZeroSettings:
    """Settings of DeepSpeed's Zero Redundancy Optimizer (arXiv:1910.02054) that memory depends on."""

    stage: int
    bucket: int = 500_000_000
    """Numbers in a bucket of gradients: `reduce_bucket_size`."""

    live: int = 1_000_000_000
    """Limit on gathered weights that are alive at once in stage 3, in numbers."""

    persistent: int = 100_000
    """Size below which a tensor is not sharded in stage 3, in numbers."""

    prefetch: int = 50_000_000
    """Limit on weights that are prefetched in stage 3, in numbers."""

    overlaps: bool = True
    offloads_optimizer: bool = False
    offloads_parameters: bool = False


@frozen(kw_only=True)
class MegatronSharding:
    """How Megatron-core distributes a model, as far as it affects memory; see `skyrl.planning.megatron_memory`."""

    stages: int = 1
    """Pipeline stages."""

    sharing_states: int = 1
    """Number of ranks that share the optimizer's state: those of data and context parallelism."""

    sharing_expert_states: int = 1
    """Number of ranks that share the optimizer's state of experts: those with the same experts."""

    gradient_size: int = FLOAT
    """Bytes per gradient value."""

    cuts_tokens: bool = False
    """Whether tensor-parallel ranks split the tokens between the sharded matrices (sequence parallelism)."""


@frozen(kw_only=True)
class LearnerRank:
    """One rank of a model that is trained or that scores."""

    shape: ModelShape
    computing: Computing
    scoring: Pass
    update: Pass | None = None
    """Micro-batch of the update. None: the model only scores."""

    shards: int = 1
    """Number of ranks over which one copy of the weights is sharded."""

    expert_parallel: int = 1
    """Number of ranks that hold different experts of a layer."""

    micro_batches: int = 2
    """Micro-batches of an optimizer step: from the second on, gradients are in memory during forward."""

    states: int = 2
    """Numbers that the optimizer keeps for each weight: 2 for AdamW, 0 for plain SGD."""

    layer_states: int | None = None
    """Numbers per weight of the layers, if their optimizer differs: 1 for Muon. None: the same as `states`."""

    adapter_rank: int = 0
    recomputes: bool = False
    offloads_activations: bool = False
    rests_on_host: bool = False
    """Whether FSDP keeps shards on the host (`cpu_offload`)."""

    keeps_gathered: bool = False
    """Whether gathered weights stay until backward (`reshard_after_forward = false`)."""

    keeps_gradients: bool = True
    """Whether Megatron-core's buffer of gradients stays between two updates; False if models take turns on the GPU."""

    beside: int = 0
    """Bytes of the weights of other models of the role on the same rank, such as further teachers."""

    zero: ZeroSettings | None = None
    megatron: MegatronSharding | None = None
    """Megatron-core's settings. If both this and `zero` are None, the backend is FSDP2."""

    @property
    def gathered_layer(self) -> int:
        """Number of weights of one layer that FSDP gathers on a rank: all but the experts of other ranks."""
        return (
            self.shape.layer_parameters - self.shape.layer_experts * (self.expert_parallel - 1) // self.expert_parallel
        )

    @property
    def trained(self) -> int:
        """Number of trained weights."""
        if self.update is None:
            return 0
        return self.shape.adapter_parameters(self.adapter_rank) if self.adapter_rank else self.shape.parameters

    @property
    def state_numbers(self) -> int:
        """Numbers that the optimizer keeps for all trained weights."""
        if self.layer_states is None or not self.trained:
            return self.states * self.trained
        layers = self.trained if self.adapter_rank else self.shape.inner_parameters
        return self.layer_states * layers + self.states * (self.trained - layers)

    @property
    def weights(self) -> int:
        """Number of all weights, including the adapter's."""
        return self.shape.parameters + (self.trained if self.adapter_rank else 0)


def _gathers_in_stage_3(learner: LearnerRank) -> bool:
    """Whether DeepSpeed's stage 3 gathers shards from other ranks; a single rank computes with its own directly."""
    return learner.zero is not None and learner.zero.stage == 3 and learner.shards > learner.computing.tensor


def resting(learner: LearnerRank) -> Bytes:
    """Bytes that remain between two phases, on the GPU and on the host: weights and optimizer state, and the buffers
    that DeepSpeed's stage 3 never releases.
    """
    trained, zero = learner.trained, learner.zero
    if zero is None or zero.stage == 0:
        optimizer = FLOAT * learner.state_numbers // (learner.shards if zero is None else learner.computing.tensor)
        return {"parameters": _weight_bytes(learner) + learner.beside, "optimizer": optimizer}
    master = FLOAT * (trained + learner.state_numbers) // learner.shards
    parts: dict[Part, int] = {"parameters": _weight_bytes(learner) + learner.beside, "optimizer": master}
    if zero.stage == 3 and learner.update is not None:
        parts["gradients"] = learner.computing.size * trained // learner.shards
        parts["overhead"] = zero.bucket * learner.computing.size
    return parts


def on_host(learner: LearnerRank) -> int:
    """Bytes of the resting state that the configuration keeps in host memory in every phase."""
    rest, zero = resting(learner), learner.zero
    if zero is None:
        return sum(rest.values()) if learner.rests_on_host else 0
    return (rest.get("optimizer", 0) if zero.offloads_optimizer else 0) + (
        rest["parameters"] if zero.offloads_parameters and zero.stage == 3 else 0
    )


def learner_memory(learner: LearnerRank) -> dict[str, Bytes]:
    """Phase -> parts, for `scoring`, `update` (of a model that learns) and `transfer` (of its weights to engines).

    State on the host is included; `on_host` returns its size.
    """
    rest = resting(learner)
    phases = {"scoring": added(rest, _scoring(learner))}
    if learner.update is not None:
        moments = _loss(learner, learner.update), _backward(learner, learner.update), *_optimizer_step(learner)
        phases["update"] = max((added(rest, moment) for moment in moments), key=total)
        phases["transfer"] = added(rest, {"transfer": _transferred(learner)})
    return phases


def total(parts: Bytes) -> int:
    """Sum of the bytes of all parts."""
    return sum(parts.values())


def added(*bags: Bytes) -> Bytes:
    """Sum of several `Bytes`, part by part."""
    names = [name for name in PARTS if any(name in bag for bag in bags)]
    return {name: sum(bag.get(name, 0) for bag in bags) for name in names}


def _weight_bytes(learner: LearnerRank) -> int:
    """Bytes of weights between phases: float32 shards under FSDP2; below ZeRO stage 3 a rank's part of every matrix, in
    the compute dtype.
    """
    zero, weights = learner.zero, learner.weights
    if zero is None or zero.stage == 0:
        return FLOAT * weights // (learner.shards if zero is None else learner.computing.tensor)
    if zero.stage < 3:
        return learner.computing.size * weights // learner.computing.tensor
    copies = 2 if zero.offloads_parameters else 1  # the host keeps a second one in the compute dtype
    gathered = (weights - _sharded(learner)) // learner.computing.tensor if _gathers_in_stage_3(learner) else 0
    return learner.computing.size * (copies * weights // learner.shards + gathered)


def _sharded(learner: LearnerRank) -> int:
    """Number of weights in tensors that stage 3 shards; tensors that are small after tensor parallelism stay whole."""
    least = 0 if learner.zero is None else learner.zero.persistent * learner.computing.tensor
    return learner.weights - sum(count for count in learner.shape.tensors if count <= least)


def _outer(learner: LearnerRank) -> int:
    return sum(learner.shape.outer_tensors)


def _gathered(learner: LearnerRank, *, layers: int) -> int:
    """Bytes of weights to compute with, beside those at rest: copies in 16 bits, or gathered shards, which are the unit
    outside the layers and the given number of layers.
    """
    zero, size, shape = learner.zero, learner.computing.size, learner.shape
    if zero is not None and _gathers_in_stage_3(learner):
        return size * min(_sharded(learner) // learner.computing.tensor, zero.live)
    if zero is not None or learner.shards == 1:
        copied = size < FLOAT and (zero is None or zero.stage == 0)  # float32 weights, and copies to compute with
        return size * learner.weights // learner.computing.tensor if copied else 0
    if learner.keeps_gathered:
        others = shape.layer_parameters - learner.gathered_layer
        return size * (_outer(learner) + shape.inner_parameters - shape.layers * others) // learner.computing.tensor
    return size * (_outer(learner) + min(layers, shape.layers) * learner.gathered_layer) // learner.computing.tensor


def _saved_activations(learner: LearnerRank, work: Pass) -> int:
    """Bytes of activations of all layers that are kept for backward, without those of the layer being recomputed."""
    shape, computing = learner.shape, learner.computing
    outside = work.tokens * shape.hidden * (FLOAT + computing.size)  # the last norm, and the head's input
    if not learner.recomputes:
        return outside + shape.layers * layer_bytes(shape, work, computing)
    if learner.offloads_activations and computing.on_gpu:
        return outside + 2 * stream_bytes(shape, work, computing)
    return outside + shape.layers * stream_bytes(shape, work, computing)


def _loss(learner: LearnerRank, work: Pass) -> Bytes:
    """Bytes at the loss, besides the resting ones: all activations and the tables of logits are in memory."""
    return {
        "parameters": _gathered(learner, layers=1),
        "gradients": _gradients(learner) if learner.micro_batches > 1 else 0,
        "activations": _saved_activations(learner, work),
        "logits": logits_bytes(learner.shape, work.read, learner.computing, learns=True),
    }


def _backward(learner: LearnerRank, work: Pass) -> Bytes:
    """Bytes in backward: activations, the gradients of one layer, and those of the output matrix are in memory."""
    computing, shape, zero = learner.computing, learner.shape, learner.zero
    moment = layer_bytes(shape, work, computing) if learner.recomputes else 0
    gradients = _gradients(learner) if learner.micro_batches > 1 else 0
    buckets = 0
    if zero is not None and zero.stage == 2 and learner.trained:  # DeepSpeed's, which exist only during backward
        buckets = zero.bucket * computing.size * (2 if zero.overlaps else 1)
    return {
        "parameters": _gathered(learner, layers=2),
        "gradients": gradients + (_whole_gradients(learner) if computing.trains_all else 0),
        "activations": _saved_activations(learner, work) + moment + backward_bytes(shape, work, computing),
        "overhead": buckets,
    }


def _optimizer_step(learner: LearnerRank) -> Iterator[Bytes]:
    """Bytes in the optimizer step: all gradients, the last ones unsharded, and on a GPU a copy of each shard."""
    zero, computing = learner.zero, learner.computing
    shard = FLOAT * learner.trained // (learner.shards if zero is None or zero.stage else computing.tensor)
    temporary = shard if computing.on_gpu or (zero is not None and zero.stage > 0) else 0
    yield {"gradients": _gradients(learner), "optimizer": temporary}
    if zero is None and learner.shards > 1 and computing.trains_all:  # the outer unit is reduced last
        outer = _outer(learner) // computing.tensor
        kept = _gradients(learner) + (computing.size + FLOAT) * outer
        yield {"parameters": computing.size * outer, "gradients": kept}


def _gradients(learner: LearnerRank) -> int:
    """Bytes of the gradients that are kept between micro-batches."""
    zero, trained = learner.zero, learner.trained
    if zero is None or zero.stage == 0:
        return FLOAT * trained // (learner.shards if zero is None else learner.computing.tensor)
    if zero.stage == 3:
        return 0  # they are in a permanent buffer on the GPU, counted in `resting`
    return learner.computing.size * trained // (learner.computing.tensor if zero.stage == 1 else learner.shards)


def _whole_gradients(learner: LearnerRank) -> int:
    """Bytes of unsharded gradients during backward: one layer's, and the output matrix's."""
    shape, size = learner.shape, learner.computing.size
    head = shape.vocabulary * shape.hidden
    if learner.zero is None and learner.shards == 1:
        return FLOAT * (head if learner.micro_batches == 1 else max(max(shape.layer_tensors), head))
    layer = shape.layer_parameters
    if learner.zero is not None:
        return size * (layer + (head if shape.tied else 0)) // learner.computing.tensor
    layer = learner.gathered_layer
    return (size * (head + layer) + FLOAT * layer) // learner.computing.tensor


def _scoring(learner: LearnerRank) -> Bytes:
    """Bytes while scoring computes one layer. DeepSpeed holds prefetched weights twice: as received, and assembled."""
    work, computing, zero = learner.scoring, learner.computing, learner.zero
    sharded = _sharded(learner) // computing.tensor
    prefetched = min(sharded, zero.prefetch) if zero is not None and _gathers_in_stage_3(learner) else 0
    return {
        "parameters": _gathered(learner, layers=2) + computing.size * prefetched,
        "activations": transient_bytes(learner.shape, work, computing),
        "logits": logits_bytes(learner.shape, work.read, computing, learns=False),
    }


def _transferred(learner: LearnerRank) -> int:
    """Bytes in weight transfer: weights are gathered one by one, some ahead, and rounded to 16 bits; with an adapter in
    float32, with the product that is merged into them.
    """
    zero, largest = learner.zero, max(learner.shape.tensors)
    if learner.adapter_rank:
        merged = 3 * FLOAT * max(learner.shape.layer_tensors)
        return merged + (_prefetched_bytes(learner, FLOAT) if learner.shards > 1 and zero is None else 0)
    if zero is not None:
        return largest * (FLOAT + 2)
    prefetched = _prefetched_bytes(learner, 2)
    gathered = 0 if learner.shards == 1 else prefetched // learner.shards + 2 * largest  # the shards, and one weight
    return prefetched + gathered


def _prefetched_bytes(learner: LearnerRank, size: int) -> int:
    """Bytes of whole weights, at `size` bytes per number, that are gathered ahead of time."""
    return min(IN_FLIGHT + 2 * size * max(learner.shape.tensors), size * learner.shape.parameters)


@frozen(kw_only=True)
class Serving:
    """One GPU of an engine."""

    shape: ModelShape
    gpus: int = 1
    """Number of GPUs that share the weights: tensor x pipeline."""

    copies: int = 1
    """Number of GPUs that hold the same keys and values; above 1 if there are more GPUs than key heads."""

    size: int = 2
    """Bytes per weight, and per number in the cache."""

    sequences: int
    """Largest number of sequences that the engine runs at once."""

    length: int
    """Longest sequence, in tokens."""

    step_tokens: int
    """Largest number of tokens that one step computes."""

    budget: int | None = None
    """Total bytes that the engine takes (`gpu_memory_utilization`), of which the cache gets what the other parts leave.
    None: the cache is as large as its sequences need.
    """

    @property
    def weights(self) -> int:
        """Bytes of the weights on one GPU."""
        return self.shape.parameters * self.size // self.gpus

    @property
    def computing(self) -> int:
        """Peak bytes of a step: the feed-forward network over all tokens, or the logits of all sequences."""
        shape = self.shape
        inner = shape.intermediate * max(1, shape.experts_per_token)
        tokens = self.step_tokens * (3 * shape.hidden + 3 * inner // self.gpus) * self.size
        return max(tokens, min(self.sequences, self.step_tokens) * shape.vocabulary * 4 * 2 // self.gpus)

    @property
    def token_bytes(self) -> float:
        """Bytes of keys and values of one token on one GPU."""
        return self.shape.cache_bytes_per_token(self.size) * self.copies / self.gpus

    @property
    def sequence_bytes(self) -> int:
        """Bytes of keys and values of one sequence of full length."""
        return round(self.token_bytes * self.length)

    @property
    def cache(self) -> int:
        """Bytes of keys and values; negative if the weights do not fit in the budget."""
        if self.budget is None:
            return self.sequences * self.sequence_bytes
        return self.budget - self.weights - self.computing

    @property
    def sequences_of_full_length(self) -> int:
        """Number of sequences of full length that the cache holds at once."""
        return max(0, min(self.sequences, self.cache // max(1, self.sequence_bytes)))


def serving_memory(serving: Serving) -> Bytes:
    """Bytes of an engine's parts while it generates."""
    return {"parameters": serving.weights, "activations": serving.computing, "cache": max(0, serving.cache)}
