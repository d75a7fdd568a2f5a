"""Seconds of the phases of a training step by the roofline model (Williams et al. 2009, doi:10.1145/1498765.1498785):
what is computed, read or sent, over the speed of what computes, reads or sends it, whichever takes longer.

The shares of a GPU's peak that are reached are assumptions, the same for every layout, so that estimates rank layouts
of one run better than they tell its seconds.
"""

from __future__ import annotations

from math import log2

from attrs import evolve, frozen

from skyrl.planning.gpus import NODE_LINK, GpuKind
from skyrl.planning.model_shape import ModelShape
from skyrl.planning.serving import Serving

PRODUCTS, MEMORY, LINKS = 0.5, 0.75, 0.7
"""Shares of the peak of products, of memory bandwidth and of links that a phase reaches."""

HALVED = 0.93
"""Share of the rates that remains each time that twice as many GPUs cut the same matrices: products get smaller."""

LATENCY = 2e-5
"""Seconds that a collective of GPUs takes beside its bytes."""

LAUNCHES = 1.5e-4
"""Seconds that Python and the driver take to start the kernels of one layer, where no CUDA graph does."""

HOST_LINK = 25e9
"""Bytes per second between a GPU and host memory: about half of what PCI Express 5.0 x16 has, or all of 4.0."""

SIXTEEN_BITS, FLOAT = 2, 4


@frozen(kw_only=True)
class Rates:
    """Speeds that one GPU reaches."""

    flops: float
    """Operations per second in products of matrices."""

    bandwidth: float
    """Bytes per second from and to its memory."""

    link: float
    """Bytes per second to the GPUs of its machine."""

    node_link: float
    """Bytes per second to another machine."""

    host_link: float = HOST_LINK
    """Bytes per second to and from host memory."""

    latency: float = LATENCY
    """Seconds that a collective takes beside its bytes."""

    launches: float = LAUNCHES
    """Seconds in which the kernels of one layer are started, where no CUDA graph does."""

    gpus_per_node: int = 8

    overlaps: bool = True
    """Whether kernels are started, and links send, while products are computed. Not where the same cores do all three.
    """

    def beside(self, one: float, other: float) -> float:
        """Seconds of two that do not wait for each other."""
        return max(one, other) if self.overlaps else one + other

    def cut(self, gpus: int) -> Rates:
        """The rates of each of so many GPUs that cut matrices among them."""
        left = HALVED ** log2(gpus)
        return evolve(self, flops=self.flops * left, bandwidth=self.bandwidth * left)

    def link_among(self, gpus: int) -> float:
        """Bytes per second and GPU among so many neighbours: the slower link where they fill more than a machine."""
        return self.link if gpus <= self.gpus_per_node else self.node_link


def rates_of(kind: GpuKind, gpus_per_node: int = 8) -> Rates:
    """The rates that a kind of GPU is assumed to reach."""
    return Rates(
        flops=kind.flops * PRODUCTS,
        bandwidth=kind.bandwidth * MEMORY,
        link=kind.link * LINKS,
        node_link=min(kind.link, NODE_LINK) * LINKS,
        gpus_per_node=gpus_per_node,
    )


@frozen(kw_only=True)
class Degrees:
    """How the ranks of a model divide its work; the product of all degrees is their number."""

    data: int
    tensor: int = 1
    """Ranks that cut matrices among them."""

    sequence: int = 1
    """Ranks that exchange heads for stretches of a sequence (Ulysses, arXiv:2309.14509)."""

    context: int = 1
    """Ranks that gather the keys and values of a sequence."""

    shards: int
    """Ranks over which one copy of the weights is spread, those that cut matrices among them."""

    on_host: bool = False
    """Whether shards wait in host memory, from where each gathering takes them."""

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.data * self.tensor * self.sequence * self.context


@frozen(kw_only=True)
class Rows:
    """Tokens that all ranks of a model compute together in one phase of a training step."""

    tokens: int
    """Tokens that are computed, prompts that are shared once."""

    length: int
    """Tokens of a sequence, by which attention grows."""

    micro_batches: int
    """Passes that each data-parallel rank divides its share into."""


def forward_flops(shape: ModelShape, rows: Rows) -> float:
    """Operations of a forward pass: two for each weight that a token meets, and causal attention over half a sequence
    on average.
    """
    attention = 2 * rows.length * shape.query_width * shape.layers
    return float(rows.tokens) * (2 * shape.active_parameters + attention)


def scoring_seconds(shape: ModelShape, rows: Rows, degrees: Degrees, rates: Rates) -> float:
    """A forward pass, while the weights of the next layer are gathered."""
    computing = _computing(shape, rows, degrees, rates, passes=1, flops=1)
    gathering = rows.micro_batches * _gathering(shape, degrees, rates, SIXTEEN_BITS)
    return rates.beside(computing, gathering) + exchanging(shape, rows, degrees, rates, passes=1)


def update_seconds(
    shape: ModelShape,
    rows: Rows,
    degrees: Degrees,
    rates: Rates,
    *,
    steps: int = 1,
    recomputes: bool = False,
    adapter: int = 0,
    gathers_once: bool = False,
    states_on_host: bool = False,
) -> float:
    """Forward and backward passes of all rows, and `steps` optimizer steps.

    `adapter` is the number of its weights where it alone learns: backward then has no products for other weights.
    `gathers_once`: weights are whole on each rank, and gradients are summed once per optimizer step (ZeRO 1 and 2).
    """
    backward = (1 if adapter else 2) + recomputes
    computing = _computing(shape, rows, degrees, rates, passes=2 + recomputes, flops=1 + backward)
    learned = adapter or shape.parameters
    times = steps if gathers_once else rows.micro_batches
    weights = SIXTEEN_BITS if gathers_once else 2 * SIXTEEN_BITS
    gradients = (SIXTEEN_BITS if gathers_once else FLOAT) * learned / shape.parameters
    gathering = times * (
        _gathering(shape, degrees, rates, weights + gradients) + _summing(degrees, rates, FLOAT * learned)
    )
    waiting = exchanging(shape, rows, degrees, rates, passes=2 + recomputes)
    shard = FLOAT * learned / max(1, degrees.shards)
    stepping = 2 * 4 * shard / rates.host_link if states_on_host else 7 * shard / rates.bandwidth
    return rates.beside(computing, gathering) + waiting + steps * stepping


def _computing(shape: ModelShape, rows: Rows, degrees: Degrees, rates: Rates, *, passes: int, flops: int) -> float:
    """Products, beside which the kernels of every micro-batch are started."""
    products = flops * forward_flops(shape, rows) / degrees.ranks / rates.cut(degrees.tensor).flops
    return rates.beside(products, passes * rows.micro_batches * shape.layers * rates.launches)


def _gathering(shape: ModelShape, degrees: Degrees, rates: Rates, size: float) -> float:
    """Seconds in which `size` bytes of every weight reach or leave each rank; ranks that cut matrices gather theirs."""
    if degrees.shards <= degrees.tensor:
        return 0.0
    moved = size * shape.parameters / degrees.tensor * ring(degrees.shards // degrees.tensor)
    fetched = size * shape.parameters / degrees.shards / rates.host_link if degrees.on_host else 0.0
    return moved / rates.link_among(degrees.shards) + fetched + shape.layers * rates.latency


def _summing(degrees: Degrees, rates: Rates, gradients: int) -> float:
    """Seconds in which copies of the weights add up so many bytes of gradients, each rank those of its shard."""
    copies = degrees.ranks // degrees.shards
    return 2 * ring(copies) * gradients / degrees.shards / rates.link_among(degrees.ranks)


def exchanging(shape: ModelShape, rows: Rows, degrees: Degrees, rates: Rates, *, passes: int) -> float:
    """Seconds of the collectives that a product waits for, in so many passes over all layers."""
    here = rows.tokens / degrees.data
    local = here / (degrees.sequence * degrees.context)
    tensor = 2 * 2 * ring(degrees.tensor) * local * shape.hidden  # two all-reduces a layer, each there and back
    heads = ring(degrees.sequence) * local * 2 * (shape.query_width + shape.key_width) / degrees.tensor
    keys = (degrees.context - 1) * local * 2 * shape.key_width / degrees.tensor
    group = degrees.tensor * degrees.sequence * degrees.context
    moved = SIXTEEN_BITS * (tensor + heads + keys) / rates.link_among(group)
    times = 2 * (degrees.tensor > 1) + 2 * (degrees.sequence > 1) + (degrees.context > 1)
    return passes * shape.layers * (moved + times * rows.micro_batches * rates.latency)


def ring(ranks: int) -> float:
    """The part of a tensor that each rank of a ring sends."""
    return (ranks - 1) / ranks


@frozen(kw_only=True)
class Answers:
    """Answers that one engine draws in a training step."""

    number: int
    prompts: int
    """Different prompts: the answers of a group share the keys and values of theirs."""

    prompt: int
    mean: float
    """Tokens of an answer on average."""

    longest: int


def generation_seconds(answers: Answers, serving: Serving, at_once: int, rates: Rates, *, eager: bool = False) -> float:
    """Seconds in which an engine draws its answers, `at_once` of them at a time.

    Waves follow each other without a gap until fewer are left than fit; the last wave thins out to a quarter until its
    longest answer has ended. `eager`: kernels are started one by one.
    """
    if answers.number == 0:
        return 0.0
    at_once = max(1, min(at_once, answers.number))
    rows = Rows(tokens=answers.prompts * answers.prompt, length=answers.prompt, micro_batches=1)
    prefill = forward_flops(serving.shape, rows) / serving.gpus / rates.cut(serving.gpus).flops
    token = _token_seconds(serving, at_once, answers.prompt + answers.mean / 2, rates, eager=eager)
    late = _token_seconds(serving, -(-at_once // 4), answers.prompt + answers.longest, rates, eager=eager)
    return prefill + answers.number / at_once * answers.mean * token + (answers.longest - answers.mean) * late


def _token_seconds(serving: Serving, sequences: int, context: float, rates: Rates, *, eager: bool) -> float:
    """Seconds of one step of decoding: weights and keys are read, or products computed, and parts are added up."""
    shape, gpus, rates = serving.shape, serving.gpus, rates.cut(serving.gpus)
    read = serving.size * _weights_met(shape, sequences) / gpus + sequences * context * serving.token_bytes
    step = max(read / rates.bandwidth, sequences * 2 * shape.active_parameters / gpus / rates.flops)
    if gpus > 1:
        sent = 2 * 2 * ring(gpus) * sequences * shape.hidden * serving.size
        step += shape.layers * (2 * rates.latency + sent / rates.link_among(gpus))
    return max(step, shape.layers * rates.launches) if eager else step


def _weights_met(shape: ModelShape, sequences: int) -> float:
    """Weights that a step of decoding reads: of a mixture, the experts that at least one sequence is sent to."""
    if not shape.experts:
        return float(shape.active_parameters)
    expert = 3 * shape.hidden * shape.intermediate * shape.layers
    met = shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** sequences)
    return shape.active_parameters + expert * (met - shape.experts_per_token)


def transfer_seconds(shape: ModelShape, degrees: Degrees, rates: Rates, *, across: bool) -> float:
    """Whole weights in 16 bits are gathered and handed to an engine; `across`: over the link between machines."""
    moved = SIXTEEN_BITS * shape.parameters
    return moved / (rates.node_link if across else rates.link) + _gathering(shape, degrees, rates, SIXTEEN_BITS)


def turns_seconds(state: int, rates: Rates) -> float:
    """`state` bytes of a GPU go to host memory and come back, as where models and engines take turns."""
    return 2 * state / rates.host_link
