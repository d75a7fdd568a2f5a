"""Distribution of samples over ranks, and whether it is even.

Each prompt of a batch gives `samples` rows. A mini-batch of prompts makes one optimizer step; its rows are distributed
over the data-parallel ranks, and each rank processes its rows in micro-batches. Every rank must get equal work: a rank
with less waits for the others, or, in a collective, the others wait for it forever.

Results are data: `Uneven` says what does not divide and which nearby sizes do; None means that it divides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd, isqrt, lcm

from attrs import frozen

LARGEST_TO_DIVIDE = 10**12
"""Largest batch whose divisors are searched: real batches are smaller, and for larger ones the search takes seconds."""


@frozen(kw_only=True)
class Uneven:
    """`total` does not divide into equal parts by `divisor`; `nearest` are the closest sizes that do."""

    total: int
    divisor: int
    nearest: tuple[int, ...]


def nearest_divisors(sizes: tuple[int, ...]) -> str:
    """The sizes in a hint such as `nearest divisors: 4 and 6`; empty where there are none."""
    if not sizes:
        return ""
    return f"nearest {'divisor' if len(sizes) == 1 else 'divisors'}: {' and '.join(map(str, sizes))}"


@frozen(kw_only=True)
class Work:
    """The share of one rank of a model in one training batch."""

    optimizer_steps: int
    """Number of optimizer steps over all passes; 0 for a model that only scores."""

    rows_per_mini_batch: int
    """Number of samples of one rank in one optimizer step."""

    micro_batches: int
    """Number of forward and backward passes whose gradients are accumulated for one optimizer step."""

    rows_scored: int
    """Largest number of samples of one rank when the batch is scored once."""

    scoring_micro_batches: int
    """Number of forward passes to score them; the last one may be smaller, on every rank alike."""


def data_parallel(ranks: int, model_parallel: int) -> int | None:
    """Number of data-parallel groups, where each group of `model_parallel` ranks computes on the same rows.

    None if the ranks do not form whole groups.
    """
    return None if ranks % model_parallel else ranks // model_parallel


def uneven_ranks(ranks: int, model_parallel: int) -> Uneven | None:
    """Check that ranks form whole groups; `nearest` are numbers of ranks."""
    if ranks % model_parallel == 0:
        return None
    return Uneven(total=ranks, divisor=model_parallel, nearest=_multiples(ranks, model_parallel))


def uneven_heads(heads: int, sharing: int, ranks: int) -> Uneven | None:
    """Check that `sharing` ranks, which share a sequence, have equally many attention heads; `nearest` are numbers of
    ranks that divide all `ranks`, too.
    """
    if heads % sharing == 0:
        return None
    return Uneven(total=heads, divisor=sharing, nearest=nearest(sharing, divisors(gcd(heads, ranks))))


def uneven_parts(sizes: Mapping[str, int], parts: int, ranks: int) -> tuple[str, Uneven] | None:
    """The name of the first size that is not divisible into `parts`, and the problem; `nearest` are numbers of parts
    that divide all sizes, and all `ranks`.
    """
    uneven = next((name for name, size in sizes.items() if size % parts), None)
    if uneven is None:
        return None
    fitting = divisors(gcd(ranks, *sizes.values()))
    return uneven, Uneven(total=sizes[uneven], divisor=parts, nearest=nearest(parts, fitting))


def uneven_batch(prompts: int, mini: int, samples: int = 1, ranks: int = 1) -> Uneven | None:
    """Check that all optimizer steps have equally many prompts; `nearest` mini-batches also divide over ranks."""
    if prompts % mini == 0:
        return None
    fitting = mini_batches_that_deal_out(prompts, samples, ranks) or divisors(prompts)
    return Uneven(total=prompts, divisor=mini, nearest=nearest(mini, fitting))


def uneven_mini_batch(prompts: int, mini: int, samples: int, ranks: int) -> Uneven | None:
    """Check that data-parallel ranks get equally many samples of a mini-batch; `nearest` are mini-batches, in prompts,
    that also divide the batch, if there are any.
    """
    if mini * samples % ranks == 0:
        return None
    fitting = mini_batches_that_deal_out(prompts, samples, ranks)
    return Uneven(total=mini * samples, divisor=ranks, nearest=nearest(mini, fitting))


def uneven_micro_batch(rows: int, micro: int, also: Iterable[int] = ()) -> Uneven | None:
    """Check that a rank's rows divide into equal micro-batches; `nearest` are micro-batches that also divide `also`."""
    if rows % micro == 0:
        return None
    return Uneven(total=rows, divisor=micro, nearest=nearest(micro, divisors(gcd(rows, *also))))


def uneven_scoring(prompts: int, samples: int, ranks: int, mini: int = 1) -> Uneven | None:
    """Check that data-parallel ranks score equally many samples of the batch; `nearest` are batches, in prompts, that
    `mini` divides.
    """
    if prompts * samples % ranks == 0:
        return None
    step = lcm(mini, ranks // gcd(ranks, samples))
    return Uneven(total=prompts * samples, divisor=ranks, nearest=_multiples(prompts, step))


def work(
    *,
    prompts: int,
    samples: int,
    ranks: int,
    forward: int,
    scored: int | None = None,
    mini: int = 0,
    micro: int = 1,
    passes: int = 1,
) -> Work:
    """The share of each of `ranks` data-parallel ranks in a batch of `prompts` with `samples` each, of which `scored`
    are scored, by default all.

    `mini` prompts make an optimizer step (0: the model only scores); `micro` and `forward` are rows per pass on one
    rank with and without gradients; the batch is trained on `passes` times. All sizes must divide evenly, which the
    functions above check.
    """
    rows, of_a_step = -(-prompts * (scored or samples) // ranks), mini * samples // ranks
    return Work(
        optimizer_steps=passes * (prompts // mini) if mini else 0,
        rows_per_mini_batch=of_a_step,
        micro_batches=of_a_step // micro,
        rows_scored=rows,
        scoring_micro_batches=-(-rows // forward),
    )


def mini_batches_that_deal_out(prompts: int, samples: int, ranks: int) -> tuple[int, ...]:
    """Divisors of the batch, in prompts, whose samples `ranks` ranks share evenly; ascending."""
    return tuple(mini for mini in divisors(prompts) if mini * samples % ranks == 0)


def divisors(dividend: int) -> tuple[int, ...]:
    """Divisors of `dividend`, ascending; empty above `LARGEST_TO_DIVIDE`."""
    if dividend > LARGEST_TO_DIVIDE:
        return ()
    small = [number for number in range(1, isqrt(dividend) + 1) if dividend % number == 0]
    return tuple(sorted({*small, *(dividend // number for number in small)}))


def nearest(size: int, fitting: Iterable[int]) -> tuple[int, ...]:
    """The largest fitting size below `size` and the smallest above, as far as they exist."""
    sizes = tuple(fitting)
    below = max((other for other in sizes if other < size), default=None)
    above = min((other for other in sizes if other > size), default=None)
    return tuple(other for other in (below, above) if other is not None)


def _multiples(size: int, step: int) -> tuple[int, ...]:
    below = size - size % step
    return tuple(multiple for multiple in (below, below + step) if multiple > 0)
