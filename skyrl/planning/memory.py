"""Bytes on one GPU, part by part, in each phase of a training step.

`learner_memory` counts a policy, critic or reference; `serving_memory` (in `serving.py`) an engine. A phase is its
fullest moment: an update has three that can be it (the loss, backward, the optimizer step), and the largest counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

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
PARTS: tuple[Part, ...] = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "cache",
    "transfer",
    "overhead",
)
Bytes = Mapping[Part, int]
"""Part -> bytes; parts without any may be left out."""

IN_FLIGHT = 256 * 2**20
"""Whole weights that are on their way at once when they are gathered for engines."""

BUCKET = 500_000_000
"""DeepSpeed's default `reduce_bucket_size`, in numbers."""

LIVE = 1_000_000_000
"""DeepSpeed's default of gathered weights that may be alive at once in stage 3, in numbers."""

PREFETCHED = 50_000_000
"""DeepSpeed's default of weights that are gathered before they are needed in stage 3, in numbers."""

PERSISTENT = 100_000
"""DeepSpeed's default size below which a tensor is not sharded in stage 3, in numbers."""


@frozen(kw_only=True)
class Zero:
    """Settings of DeepSpeed's Zero Redundancy Optimizer (arXiv:1910.02054) that memory depends on."""

    stage: int
    bucket: int = BUCKET
    live: int = LIVE
    persistent: int = PERSISTENT
    prefetch: int = PREFETCHED
    overlaps: bool = True
    offloads_optimizer: bool = False
    offloads_parameters: bool = False


@frozen(kw_only=True)
class Megatron:
    """How Megatron-core spreads a model, as far as memory depends on it; see `skyrl.planning.megatron_memory`."""

    stages: int = 1
    """Pipeline stages."""

    sharing_states: int = 1
    """Ranks that have a part each of the optimizer's state: those of data and context parallelism."""

    sharing_expert_states: int = 1
    """The same of experts: ranks that have the same ones."""

    gradient_size: int = FLOAT
    """Bytes of a gradient."""

    cuts_tokens: bool = False
    """Between matrices that ranks cut among them, each has some of the tokens."""


@frozen(kw_only=True)
class Learner:
    """One rank of a model that is trained or that scores."""

    shape: ModelShape
    how: Computing
    scoring: Pass
    update: Pass | None = None
    """Micro-batch of the update. None: the model only scores."""

    shards: int = 1
    """Ranks that share one copy of the weights."""

    expert_parallel: int = 1
    """Ranks that hold different experts of a layer."""

    micro_batches: int = 2
    """Micro-batches of an optimizer step: from the second on, gradients are there during forward."""

    states: int = 2
    """Numbers that the optimizer keeps for each weight: 2 for AdamW, 0 for plain SGD."""

    layer_states: int | None = None
    """The same for the weights of layers, where they have another rule: 1 for Muon. None: as `states`."""

    adapter_rank: int = 0
    recomputes: bool = False
    offloads_activations: bool = False
    rests_on_host: bool = False
    """Whether FSDP keeps shards on the host (`cpu_offload`)."""

    keeps_gathered: bool = False
    """Whether gathered weights stay until backward (`reshard_after_forward = false`)."""

    keeps_gradients: bool = True
    """Whether the last gradients stay until the next update; not where models take turns on the GPU."""

    zero: Zero | None = None
    megatron: Megatron | None = None
    """None, like `zero`: FSDP2."""

    @property
    def gathered_layer(self) -> int:
        """Weights of one layer that FSDP gathers on a rank: all but the experts of other ranks."""
        return (
            self.shape.layer_parameters - self.shape.layer_experts * (self.expert_parallel - 1) // self.expert_parallel
        )

    @property
    def trained(self) -> int:
        """Weights that learn."""
        if self.update is None:
            return 0
        return self.shape.adapter_parameters(self.adapter_rank) if self.adapter_rank else self.shape.parameters

    @property
    def state_numbers(self) -> int:
        """Numbers that the optimizer keeps for all weights that learn."""
        if self.layer_states is None or not self.trained:
            return self.states * self.trained
        layers = self.trained if self.adapter_rank else self.shape.layers * self.shape.layer_parameters
        return self.layer_states * layers + self.states * (self.trained - layers)

    @property
    def weights(self) -> int:
        """All weights, with those of the adapter."""
        return self.shape.parameters + (self.trained if self.adapter_rank else 0)


def resting(learner: Learner) -> Bytes:
    """Bytes that are left between two phases, on the GPU and on the host: weights, optimizer state, gradients."""
    kept = _gradients(learner) if learner.keeps_gradients and learner.zero is None else 0
    return added(_state(learner), {"gradients": kept})


def _gathers_in_stage_3(learner: Learner) -> bool:
    """Whether shards of DeepSpeed's stage 3 lie elsewhere; a rank alone computes with its own as they are."""
    return learner.zero is not None and learner.zero.stage == 3 and learner.shards > learner.how.tensor


def _state(learner: Learner) -> Bytes:
    """Weights and optimizer state, and the buffers that DeepSpeed's stage 3 never gives up."""
    trained, zero = learner.trained, learner.zero
    if zero is None or zero.stage == 0:
        optimizer = FLOAT * learner.state_numbers // (learner.shards if zero is None else learner.how.tensor)
        return {"parameters": _weight_bytes(learner), "optimizer": optimizer}
    master = FLOAT * (trained + learner.state_numbers) // learner.shards
    found: dict[Part, int] = {"parameters": _weight_bytes(learner), "optimizer": master}
    if zero.stage == 3 and learner.update is not None:
        found["gradients"] = learner.how.size * trained // learner.shards
        found["overhead"] = zero.bucket * learner.how.size
    return found


def on_host(learner: Learner) -> int:
    """Bytes of the resting state that the configuration keeps in host memory in every phase."""
    rest, zero = resting(learner), learner.zero
    if zero is None:
        return sum(rest.values()) if learner.rests_on_host else 0
    return (rest.get("optimizer", 0) if zero.offloads_optimizer else 0) + (
        rest["parameters"] if zero.offloads_parameters and zero.stage == 3 else 0
    )


def learner_memory(learner: Learner) -> dict[str, Bytes]:
    """Phase -> parts, for `scoring`, `update` (of a model that learns) and `transfer` (of its weights to engines).

    What rests on the host is counted with the rest; `on_host` says how much of it that is.
    """
    phases = {"scoring": _scoring(learner)}
    if learner.update is not None:
        phases["update"] = _largest(_at_the_loss(learner), _in_backward(learner), _in_the_step(learner))
        phases["transfer"] = _transfer(learner)
    return phases


def total(parts: Bytes) -> int:
    """Bytes of all parts."""
    return sum(parts.values())


def added(*bags: Bytes) -> Bytes:
    """Part by part."""
    names = [name for name in PARTS if any(name in bag for bag in bags)]
    return {name: sum(bag.get(name, 0) for bag in bags) for name in names}


def _weight_bytes(learner: Learner) -> int:
    """Weights at rest: float32 shards under FSDP2; below stage 3 a rank's part of every matrix, in the type that is
    computed in.
    """
    zero, weights = learner.zero, learner.weights
    if zero is None or zero.stage == 0:
        return FLOAT * weights // (learner.shards if zero is None else learner.how.tensor)
    if zero.stage < 3:
        return learner.how.size * weights // learner.how.tensor
    copies = 2 if zero.offloads_parameters else 1  # the host keeps one that is computed with, too
    whole = (weights - _sharded(learner)) // learner.how.tensor if _gathers_in_stage_3(learner) else 0
    return learner.how.size * (copies * weights // learner.shards + whole)


def _sharded(learner: Learner) -> int:
    """Weights of the tensors that stage 3 shards: small ones stay whole, and parts of cut ones are smaller."""
    least = 0 if learner.zero is None else learner.zero.persistent * learner.how.tensor
    return learner.weights - sum(count for count in learner.shape.tensors if count <= least)


def _outer(learner: Learner) -> int:
    return sum(learner.shape.outer_tensors)


def _gathered(learner: Learner, *, layers: int) -> int:
    """Bytes of whole weights beside the shards: the unit outside the layers, and so many layers."""
    zero, size, shape = learner.zero, learner.how.size, learner.shape
    if zero is not None and _gathers_in_stage_3(learner):
        return size * min(_sharded(learner) // learner.how.tensor, zero.live)
    if zero is not None or learner.shards == 1:
        return _casts(learner)
    if learner.keeps_gathered:
        return size * (_outer(learner) + shape.layers * learner.gathered_layer) // learner.how.tensor
    return size * (_outer(learner) + min(layers, shape.layers) * learner.gathered_layer) // learner.how.tensor


def _casts(learner: Learner) -> int:
    """Bytes of 16-bit copies that autocast makes of the weights of products, and keeps for backward."""
    if learner.how.precision != "autocast":
        return 0
    shape = learner.shape
    layers = 1 if learner.recomputes else shape.layers
    return 2 * (layers * shape.layer_parameters + shape.vocabulary * shape.hidden) // learner.how.tensor


def _kept(learner: Learner, work: Pass) -> int:
    """Activations of all layers that backward needs, without those of the layer that is recomputed."""
    shape, how = learner.shape, learner.how
    outside = work.tokens * shape.hidden * (FLOAT + how.residual_size)  # the last norm, and what the head reads
    if not learner.recomputes:
        return outside + shape.layers * layer_bytes(shape, work, how)
    if learner.offloads_activations and how.on_gpu:
        return outside + 2 * stream_bytes(shape, work, how)
    return outside + shape.layers * stream_bytes(shape, work, how)


def _at_the_loss(learner: Learner) -> Bytes:
    """All activations are there, and tables of logits."""
    assert learner.update is not None
    work, how = learner.update, learner.how
    gradients = _gradients(learner) if learner.micro_batches > 1 else 0
    return added(
        _state(learner),
        {
            "parameters": _gathered(learner, layers=1),
            "gradients": gradients,
            "activations": _kept(learner, work),
            "logits": logits_bytes(learner.shape, work.read, how, learns=True),
        },
    )


def _in_backward(learner: Learner) -> Bytes:
    """All activations but one layer's are there, the gradients of one layer, and those of the output matrix."""
    assert learner.update is not None
    work, how, shape = learner.update, learner.how, learner.shape
    moment = layer_bytes(shape, work, how) if learner.recomputes else 0
    overhead, gradients = _buffers(learner), _gradients(learner) if learner.micro_batches > 1 else 0
    if how.trains_all:
        gradients += _whole_gradients(learner)
    return added(
        _state(learner),
        {
            "parameters": _gathered(learner, layers=2),
            "gradients": gradients,
            "activations": _kept(learner, work) + moment + backward_bytes(shape, work, how),
            "overhead": overhead,
        },
    )


def _in_the_step(learner: Learner) -> Bytes:
    """All gradients are there, the last whole ones among them; on a GPU the step has a copy of each shard."""
    zero, how = learner.zero, learner.how
    shard = FLOAT * learner.trained // (learner.shards if zero is None or zero.stage else how.tensor)
    temporary = shard if how.on_gpu or (zero is not None and zero.stage > 0) else 0
    found: dict[Part, int] = {"gradients": _gradients(learner), "optimizer": temporary}
    if zero is None and learner.shards > 1 and how.trains_all:  # the outer unit is reduced last
        outer = _outer(learner) // how.tensor
        kept = _gradients(learner) + (how.size + FLOAT) * outer
        end: dict[Part, int] = {"parameters": how.size * outer, "gradients": kept}
        return _largest(added(_state(learner), found), added(_state(learner), end))
    return added(_state(learner), found)


def _gradients(learner: Learner) -> int:
    """Bytes of the gradients that are kept from one micro-batch to the next."""
    zero, trained = learner.zero, learner.trained
    if zero is None or zero.stage == 0:
        return FLOAT * trained // (learner.shards if zero is None else learner.how.tensor)
    match zero.stage:
        case 1:
            return learner.how.size * trained // learner.how.tensor
        case 2:
            return learner.how.size * trained // learner.shards
        case _:
            return 0  # they have a buffer of their own, which rests on the GPU


def _whole_gradients(learner: Learner) -> int:
    """Bytes of gradients of whole weights in the middle of backward: a layer's, and the output matrix's."""
    shape, size = learner.shape, learner.how.size
    head = shape.vocabulary * shape.hidden
    if learner.zero is None and learner.shards == 1:
        return FLOAT * (head if learner.micro_batches == 1 else max(max(shape.layer_tensors), head))
    layer = shape.layer_parameters
    if learner.zero is not None:
        return size * (layer + (head if shape.tied else 0)) // learner.how.tensor
    layer = learner.gathered_layer
    return (size * (head + layer) + FLOAT * layer) // learner.how.tensor


def _buffers(learner: Learner) -> int:
    """DeepSpeed's buckets of gradients below stage 3, where they exist during backward only."""
    zero = learner.zero
    if zero is None or zero.stage != 2 or learner.trained == 0:
        return 0
    return zero.bucket * learner.how.size * (2 if zero.overlaps else 1)


def _scoring(learner: Learner) -> Bytes:
    """One layer is computed. DeepSpeed holds what it prefetches twice: as it came, and put together."""
    work, how, zero = learner.scoring, learner.how, learner.zero
    sharded = _sharded(learner) // how.tensor
    prefetched = min(sharded, zero.prefetch) if zero is not None and _gathers_in_stage_3(learner) else 0
    return added(
        resting(learner),
        {
            "parameters": _gathered(learner, layers=2) + how.size * prefetched,
            "activations": transient_bytes(learner.shape, work, how),
            "logits": logits_bytes(learner.shape, work.read, how, learns=False),
        },
    )


def _transfer(learner: Learner) -> Bytes:
    """Weights are gathered one after the other, some ahead, and rounded to 16 bits; those with an adapter in float32,
    with the product that is merged into them.
    """
    zero, largest = learner.zero, max(learner.shape.tensors)
    if learner.adapter_rank:
        merged = 3 * FLOAT * max(learner.shape.layer_tensors)
        ahead = _in_flight(learner, FLOAT) if learner.shards > 1 and zero is None else 0
        return added(resting(learner), {"transfer": merged + ahead})
    if zero is not None:
        return added(resting(learner), {"transfer": largest * (FLOAT + 2)})
    return added(resting(learner), {"transfer": _ahead(learner, 2)})


def _ahead(learner: Learner, size: int) -> int:
    """Bytes of weights that were rounded, with the shards that they are gathered from and one that is put together."""
    whole = _in_flight(learner, size)
    if learner.shards == 1:
        return whole
    return whole + whole // learner.shards + size * max(learner.shape.tensors)


def _in_flight(learner: Learner, size: int) -> int:
    """Bytes of whole weights, of `size` bytes a number, that are gathered before they are needed."""
    return min(IN_FLIGHT + 2 * size * max(learner.shape.tensors), size * learner.shape.parameters)


def _largest(*moments: Bytes) -> Bytes:
    return max(moments, key=total)
