"""Bytes of one rank of a model under Megatron-core, phase by phase, at its fullest pipeline stage.

Weights have the compute dtype, and gradients are in a flat buffer with one entry per trained weight. Master weights and
optimizer state are sharded over the ranks of data and context parallelism (the distributed optimizer). Under 1F1B the
first stage holds the activations of one micro-batch per stage (arXiv:2104.04473, section 2.2). All of this is derived
from Megatron-core's buffers; it was not measured on a GPU.
"""

from __future__ import annotations

import attrs

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
from skyrl.planning.memory import Bytes, LearnerRank, MegatronSharding, added, total


def stage_resting(learner: LearnerRank) -> Bytes:
    """Bytes that remain between two phases: weights, optimizer state, and gradients if their buffer is kept."""
    return {**_state(learner), "gradients": _gradients(learner) if learner.keeps_gradients else 0}


def stage_memory(learner: LearnerRank) -> dict[str, Bytes]:
    """Phase -> parts, for `scoring`, `update` (of a model that learns) and `transfer` (of its weights to engines)."""
    phases = {"scoring": _scoring(learner)}
    if learner.update is not None:
        # The optimizer step makes a temporary copy of its shard of the weights.
        step: Bytes = {"gradients": _gradients(learner), "optimizer": _stepped(learner, FLOAT)}
        phases["update"] = max((*_updates(learner, learner.update), added(_state(learner), step)), key=total)
        # One weight at a time is assembled for engines from the parts of tensor-parallel ranks; with an adapter in
        # float32, with the product that is merged into it.
        largest = max(learner.shape.layer_tensors) if learner.adapter_rank else max(learner.shape.tensors)
        copies = FLOAT * 4 if learner.adapter_rank else 2 * 3
        phases["transfer"] = added(stage_resting(learner), {"transfer": copies * largest})
    return phases


def _spread(learner: LearnerRank) -> MegatronSharding:
    assert learner.megatron is not None, "another strategy"
    return learner.megatron


def _layers(learner: LearnerRank) -> int:
    """Number of layers of the fullest stage."""
    return -(-learner.shape.layers // _spread(learner).stages)


def _weights(learner: LearnerRank) -> tuple[int, int]:
    """Numbers of weights on a rank, without experts and of experts. The former counts the layers and one vocabulary
    matrix, or all outer tensors if there is one stage.
    """
    shape, tensor, layers = learner.shape, learner.computing.tensor, _layers(learner)
    dense = (shape.layer_parameters - shape.layer_experts) // tensor
    outer = sum(shape.outer_tensors) if _spread(learner).stages == 1 else shape.vocabulary * shape.hidden
    return layers * dense + outer // tensor, layers * (shape.layer_experts // learner.expert_parallel)


def stage_trained(learner: LearnerRank) -> tuple[int, int]:
    """Numbers of trained weights on a rank: (without experts, experts); an adapter's factors are counted unsharded."""
    if learner.update is None:
        return 0, 0
    if not learner.adapter_rank:
        return _weights(learner)
    return learner.shape.adapter_parameters(learner.adapter_rank) * _layers(learner) // learner.shape.layers, 0


def _stepped(learner: LearnerRank, size: int) -> int:
    """Bytes at `size` per weight whose optimizer state is on this rank."""
    spread, (dense, experts) = _spread(learner), stage_trained(learner)
    return size * dense // spread.sharing_states + size * experts // spread.sharing_expert_states


def _state(learner: LearnerRank) -> Bytes:
    size = learner.computing.size
    numbers = learner.states + (1 if size < FLOAT else 0)
    adapter = sum(stage_trained(learner)) if learner.adapter_rank else 0
    return {
        "parameters": size * (sum(_weights(learner)) + adapter),
        "optimizer": _stepped(learner, FLOAT * numbers),
    }


def _gradients(learner: LearnerRank) -> int:
    return _spread(learner).gradient_size * sum(stage_trained(learner))


def _layer_share(learner: LearnerRank, work: Pass) -> tuple[Pass, Computing]:
    """The pass and computing of a rank's share of a layer; sequence parallelism also splits its tokens."""
    computing = learner.computing
    if not _spread(learner).cuts_tokens:
        return work, computing
    return attrs.evolve(work, sharing=work.sharing * computing.tensor), attrs.evolve(computing, tensor=1)


def _scoring(learner: LearnerRank) -> Bytes:
    work, computing = _layer_share(learner, learner.scoring)
    moment: Bytes = {
        "activations": transient_bytes(learner.shape, work, computing),
        "logits": logits_bytes(learner.shape, learner.scoring.read, learner.computing, learns=False),
    }
    return added(stage_resting(learner), moment)


def _updates(learner: LearnerRank, update: Pass) -> tuple[Bytes, ...]:
    """Peak candidates of an update: the first stage, which holds most micro-batches, in backward; the last stage at the
    loss; the last stage in backward.
    """
    shape, stages = learner.shape, _spread(learner).stages
    work, computing = _layer_share(learner, update)
    kept = _layers(learner) * (
        stream_bytes(shape, work, computing) if learner.recomputes else layer_bytes(shape, work, computing)
    )
    outside = work.tokens * shape.hidden * (FLOAT + computing.size)  # the last norm, and the head's input
    moment = (layer_bytes(shape, work, computing) if learner.recomputes else 0) + backward_bytes(shape, work, computing)
    logits = logits_bytes(shape, update.read, learner.computing, learns=True)
    state = added(_state(learner), {"gradients": _gradients(learner)})
    waiting = min(stages, learner.micro_batches) * kept
    return (
        added(state, {"activations": waiting + moment}),
        added(state, {"activations": kept + outside, "logits": logits}),
        added(state, {"activations": kept + outside + moment}),
    )
