"""Seconds of the phases of a training step by the roofline model (Williams et al. 2009, doi:10.1145/1498765.1498785):
the time to compute, read or send the required amount at the respective speed, whichever is longest.

The fractions of a GPU's peak that are reached are assumptions, the same for every layout. Estimates are therefore
better at ranking layouts of one run than at predicting its seconds.

Under Megatron-core, the slowest pipeline stage sets the pace. A pass of m micro-batches through p stages takes as long
as m + p - 1 micro-batches on one stage: the share (p - 1) / (m + p - 1) of it is a bubble in which a stage waits, under
1F1B as under any schedule without interleaving (arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

from math import log2

from attrs import evolve, frozen

from skyrl.planning.gpus import NODE_LINK, GpuKind
from skyrl.planning.megatron_memory import stage_trained
from skyrl.planning.memory import LearnerRank, Serving
from skyrl.planning.model_shape import ModelShape
from skyrl.planning.topology import Degrees

PRODUCTS, MEMORY, LINKS = 0.5, 0.75, 0.7
"""Fractions of the peak of matrix products, memory bandwidth and links that a phase reaches."""

HALVED = 0.93
"""Fraction of the rates that remains each time the tensor-parallel degree doubles, since products get smaller."""

LATENCY = 2e-5
"""Latency of a GPU collective in seconds, besides the time for its bytes."""

LAUNCHES = 1.5e-4
"""Seconds that Python and the driver take to launch the kernels of one layer without a CUDA graph."""

SIXTEEN_BITS, FLOAT = 2, 4


@frozen(kw_only=True)
class Rates:
    """Speeds that one GPU reaches."""

    flops: float
    """Operations per second in matrix products."""

    bandwidth: float
    """Bytes per second from and to GPU memory."""

    link: float
    """Bytes per second to the other GPUs of the machine."""

    node_link: float
    """Bytes per second to another machine."""

    host_link: float = 25e9
    """Bytes per second to and from host memory: about half the rate of PCI Express 5.0 x16, or that of 4.0."""

    latency: float = LATENCY
    """Seconds of latency per collective, besides the time for its bytes."""

    launches: float = LAUNCHES
    """Seconds to launch the kernels of one layer without a CUDA graph."""

    gpus_per_node: int = 8

    overlaps: bool = True
    """Whether kernel launches and communication overlap with products. False if the same cores do all three."""

    def combined(self, one: float, other: float) -> float:
        """Seconds of two activities, which run concurrently if `overlaps`."""
        return max(one, other) if self.overlaps else one + other

    def cut(self, gpus: int) -> Rates:
        """The rates of each GPU if matrices are split over `gpus` GPUs."""
        left = HALVED ** log2(gpus)
        return evolve(self, flops=self.flops * left, bandwidth=self.bandwidth * left)

    def link_among(self, gpus: int) -> float:
        """Bytes per second and GPU among `gpus` neighbours: the slower link if they need more than one machine."""
        return self.link if gpus <= self.gpus_per_node else self.node_link


def rates_of(kind: GpuKind) -> Rates:
    """The rates that GPUs of a kind are assumed to reach."""
    return Rates(
        flops=kind.flops * PRODUCTS,
        bandwidth=kind.bandwidth * MEMORY,
        link=kind.link * LINKS,
        node_link=min(kind.link, NODE_LINK) * LINKS,
    )


@frozen(kw_only=True)
class Sharding(Degrees):
    """How the ranks of a model divide its work, and the weights besides."""

    shards: int
    """Number of ranks over which one copy of the weights is sharded, including tensor-parallel ones."""

    on_host: bool = False
    """Whether shards are kept in host memory, from which each gathering fetches them."""


@frozen(kw_only=True)
class PassRows:
    """Tokens that all ranks of a model compute together in one phase of a training step."""

    tokens: int
    """Number of tokens that are computed; shared prompts count once."""

    length: int
    """Number of tokens of a sequence, which determines the cost of attention."""

    micro_batches: int
    """Number of passes into which each data-parallel rank divides its share."""


def forward_flops(shape: ModelShape, rows: PassRows) -> float:
    """Operations of a forward pass: two per token and active weight, and causal attention over half a sequence on
    average.
    """
    attention = 2 * rows.length * shape.query_width * shape.layers
    return float(rows.tokens) * (2 * shape.active_parameters + attention)


def scoring_seconds(shape: ModelShape, rows: PassRows, degrees: Sharding, rates: Rates) -> float:
    """Seconds of a forward pass, during which the weights of the next layer are gathered."""
    computing = _computing(shape, rows, degrees, rates, passes=1, flops=1)
    gathering = rows.micro_batches * _gathering(shape, degrees, rates, SIXTEEN_BITS)
    return rates.combined(computing, gathering) + exchanging(shape, rows, degrees, rates, passes=1)


def update_seconds(
    shape: ModelShape,
    rows: PassRows,
    degrees: Sharding,
    rates: Rates,
    *,
    steps: int = 1,
    recomputes: bool = False,
    adapter: int = 0,
    gathers_once: bool = False,
    states_on_host: bool = False,
) -> float:
    """Seconds of forward and backward passes of all rows, and of `steps` optimizer steps.

    `adapter` is the number of the adapter's weights if only it is trained: backward then computes no gradients of other
    weights. `gathers_once`: weights are whole on each rank, and gradients are reduced once per optimizer step (ZeRO 1
    and 2).
    """
    backward = (1 if adapter else 2) + recomputes
    computing = _computing(shape, rows, degrees, rates, passes=2 + recomputes, flops=1 + backward)
    learned = adapter or shape.parameters
    times = steps if gathers_once else rows.micro_batches
    weights = SIXTEEN_BITS if gathers_once else 2 * SIXTEEN_BITS
    gradients = (SIXTEEN_BITS if gathers_once else FLOAT) * learned / shape.parameters
    copies = degrees.ranks // degrees.shards  # of the weights; each rank all-reduces the gradients of its shard
    summing = 2 * ring(copies) * FLOAT * learned / degrees.shards / rates.link_among(degrees.ranks)
    gathering = times * (_gathering(shape, degrees, rates, weights + gradients) + summing)
    waiting = exchanging(shape, rows, degrees, rates, passes=2 + recomputes)
    shard = FLOAT * learned / max(1, degrees.shards)
    stepping = 2 * 4 * shard / rates.host_link if states_on_host else 7 * shard / rates.bandwidth
    return rates.combined(computing, gathering) + waiting + steps * stepping


def _computing(shape: ModelShape, rows: PassRows, degrees: Sharding, rates: Rates, *, passes: int, flops: int) -> float:
    """Seconds of matrix products and of launching the kernels of every micro-batch."""
    products = flops * forward_flops(shape, rows) / degrees.ranks / rates.cut(degrees.tensor).flops
    return rates.combined(products, passes * rows.micro_batches * shape.layers * rates.launches)


def _gathering(shape: ModelShape, degrees: Sharding, rates: Rates, size: float) -> float:
    """Seconds to gather or scatter `size` bytes of every weight on each rank; with tensor parallelism, of its part."""
    if degrees.shards <= degrees.tensor:
        return 0.0
    moved = size * shape.parameters / degrees.tensor * ring(degrees.shards // degrees.tensor)
    fetched = size * shape.parameters / degrees.shards / rates.host_link if degrees.on_host else 0.0
    return moved / rates.link_among(degrees.shards) + fetched + shape.layers * rates.latency


def exchanging(shape: ModelShape, rows: PassRows, degrees: Sharding, rates: Rates, *, passes: int) -> float:
    """Seconds of the collectives for which products have to wait, in `passes` passes over all layers."""
    replica_tokens = rows.tokens / degrees.data
    local = replica_tokens / (degrees.sequence * degrees.context)
    tensor = 2 * 2 * ring(degrees.tensor) * local * shape.hidden  # two all-reduces a layer, each there and back
    heads = ring(degrees.sequence) * local * 2 * (shape.query_width + shape.key_width) / degrees.tensor
    keys = (degrees.context - 1) * local * 2 * shape.key_width / degrees.tensor
    group = degrees.tensor * degrees.sequence * degrees.context
    moved = SIXTEEN_BITS * (tensor + heads + keys) / rates.link_among(group)
    times = 2 * (degrees.tensor > 1) + 2 * (degrees.sequence > 1) + (degrees.context > 1)
    return passes * shape.layers * (moved + times * rows.micro_batches * rates.latency)


def ring(ranks: int) -> float:
    """Fraction of a tensor that each rank of a ring sends."""
    return (ranks - 1) / ranks


@frozen(kw_only=True)
class AnswerWork:
    """Answers that one engine generates in a training step."""

    number: int
    prompts: int
    """Number of distinct prompts; the answers of a group share the keys and values of their prompt."""

    prompt: int
    mean: float
    """Average number of tokens of an answer."""

    longest: int


def generation_seconds(
    answers: AnswerWork, serving: Serving, at_once: int, rates: Rates, *, eager: bool = False
) -> float:
    """Seconds that an engine takes to generate its answers, with `at_once` of them running concurrently.

    The engine is full until fewer answers are left than fit; then a quarter of `at_once` runs until the longest answer
    has ended. `eager`: kernels are launched one by one, without a CUDA graph.
    """
    if answers.number == 0:
        return 0.0
    at_once = max(1, min(at_once, answers.number))
    rows = PassRows(tokens=answers.prompts * answers.prompt, length=answers.prompt, micro_batches=1)
    prefill = forward_flops(serving.shape, rows) / serving.gpus / rates.cut(serving.gpus).flops
    token = _token_seconds(serving, at_once, answers.prompt + answers.mean / 2, rates, eager=eager)
    late = _token_seconds(serving, -(-at_once // 4), answers.prompt + answers.longest, rates, eager=eager)
    return prefill + answers.number / at_once * answers.mean * token + (answers.longest - answers.mean) * late


def _token_seconds(serving: Serving, sequences: int, context: float, rates: Rates, *, eager: bool) -> float:
    """Seconds of one decoding step: reading weights and keys or computing products, then summing partial results."""
    shape, gpus, rates = serving.shape, serving.gpus, rates.cut(serving.gpus)
    read = serving.size * _weights_met(shape, sequences) / gpus + sequences * context * serving.token_bytes
    step = max(read / rates.bandwidth, sequences * 2 * shape.active_parameters / gpus / rates.flops)
    if gpus > 1:
        sent = 2 * 2 * ring(gpus) * sequences * shape.hidden * serving.size
        step += shape.layers * (2 * rates.latency + sent / rates.link_among(gpus))
    return max(step, shape.layers * rates.launches) if eager else step


def _weights_met(shape: ModelShape, sequences: int) -> float:
    """Expected number of weights that a decoding step reads; with experts, those routed to by at least one sequence."""
    if not shape.experts:
        return float(shape.active_parameters)
    expert = 3 * shape.hidden * shape.intermediate * shape.layers
    met = shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** sequences)
    return shape.active_parameters + expert * (met - shape.experts_per_token)


def transfer_seconds(shape: ModelShape, degrees: Sharding, rates: Rates, *, across: bool) -> float:
    """Seconds to gather whole 16-bit weights and send them to an engine; `across`: over the link between machines."""
    moved = SIXTEEN_BITS * shape.parameters
    return moved / (rates.node_link if across else rates.link) + _gathering(shape, degrees, rates, SIXTEEN_BITS)


def turns_seconds(state: int, rates: Rates) -> float:
    """Seconds to move `state` bytes of a GPU to host memory and back, when models and engines take turns."""
    return 2 * state / rates.host_link


@frozen(kw_only=True)
class Stages:
    """How the ranks of a model under Megatron-core divide its work; all pipeline stages have equally many ranks."""

    sharding: Sharding
    """The ranks of one stage."""

    number: int = 1
    experts: int = 1
    """Number of ranks of a stage over which the experts of a layer are distributed."""


def bubble(stages: int, micro_batches: int) -> float:
    """Share of a pass in which a stage waits for the others, for `micro_batches` going through `stages` stages."""
    return (stages - 1) / (micro_batches + stages - 1)


def stage_scoring_seconds(shape: ModelShape, rows: PassRows, stages: Stages, rates: Rates) -> float:
    """Seconds of a forward pass of all rows."""
    working = _working(shape, rows, stages, rates, passes=1, flops=1)
    return working / (1 - bubble(stages.number, rows.micro_batches))


def stage_update_seconds(
    learner: LearnerRank, rows: PassRows, stages: Stages, rates: Rates, *, steps: int = 1
) -> float:
    """Seconds of forward and backward passes of all rows, and of `steps` optimizer steps, each of which reduces
    gradients once and gathers the updated weights.
    """
    backward = (1 if learner.adapter_rank else 2) + learner.recomputes
    working = _working(learner.shape, rows, stages, rates, passes=2 + learner.recomputes, flops=1 + backward)
    filled = working / (1 - bubble(stages.number, max(1, rows.micro_batches // steps)))
    dense, experts = stage_trained(learner)
    spread = learner.megatron
    assert spread is not None, "another strategy"
    sent = (spread.gradient_size + SIXTEEN_BITS) * (
        ring(spread.sharing_states) * dense + ring(spread.sharing_expert_states) * experts
    )
    stepped = FLOAT * (dense / spread.sharing_states + experts / spread.sharing_expert_states)
    return filled + steps * (sent / rates.link_among(stages.sharding.ranks) + 7 * stepped / rates.bandwidth)


def _working(shape: ModelShape, rows: PassRows, stages: Stages, rates: Rates, *, passes: int, flops: int) -> float:
    """Seconds of the slowest stage without the bubble: the one with the most layers and the output matrix."""
    layers = -(-shape.layers // stages.number)
    head = 2.0 * rows.tokens * shape.vocabulary * shape.hidden
    inner = (forward_flops(shape, rows) - head) * layers / shape.layers
    sharding = stages.sharding
    products = flops * (inner + head) / sharding.ranks / rates.cut(sharding.tensor).flops
    launching = passes * rows.micro_batches * layers * rates.launches
    waiting = exchanging(evolve(shape, layers=layers), rows, sharding, rates, passes=passes)
    states = rows.tokens / sharding.ranks * shape.hidden * SIXTEEN_BITS
    dispatching = handing_on = 0.0
    if shape.experts and stages.experts > 1:  # the tokens of one layer go to the ranks of their experts and back
        moved = 2 * ring(stages.experts) * states * shape.experts_per_token / rates.link_among(stages.experts)
        dispatching = moved + 2 * rows.micro_batches * rates.latency
    if stages.number > 1:  # hidden states go to the next stage
        handing_on = states / rates.link_among(2 * sharding.ranks) + rows.micro_batches * rates.latency
    return rates.combined(products, launching) + waiting + passes * (dispatching * layers + handing_on)
