"""How samples are dealt to ranks, and whether they can be dealt evenly.

A batch of prompts gives `samples` rows each. A mini-batch of them makes one optimizer step; its rows are dealt to the
data-parallel ranks, and each rank works through its rows in micro-batches. Every rank must get equal work: one that has
less waits for the others, or, in a collective, they wait for it for ever.

Verdicts are data: `Uneven` says what does not divide and which sizes near by do, None that it divides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd, isqrt, lcm

from attrs import frozen

LARGEST_TO_DIVIDE = 10**12
"""Largest batch whose divisors are searched for: real batches are smaller, and the search would take seconds."""


@frozen(kw_only=True)
class Uneven:
    """`whole` does not fall into equal parts by `by`; `nearest` are the sizes below and above that do."""

    whole: int
    by: int
    nearest: tuple[int, ...]


@frozen(kw_only=True)
class Work:
    """The share of one rank of a model in one training batch."""

    optimizer_steps: int
    """Over all passes; 0 for a model that only scores."""

    rows_per_mini_batch: int
    """Samples of one rank in one optimizer step."""

    micro_batches: int
    """Forward and backward passes whose gradients add up to one optimizer step."""

    rows_scored: int
    """Samples of one rank in one pass of scoring."""

    scoring_micro_batches: int
    """Forward passes of it; the last one may be smaller, and is so on every rank."""


def data_parallel(ranks: int, model_parallel: int) -> int | None:
    """Groups of ranks that get rows of their own, where `model_parallel` ranks together compute on the same rows.

    None where the ranks do not form whole groups.
    """
    return None if ranks % model_parallel else ranks // model_parallel


def uneven_ranks(ranks: int, model_parallel: int) -> Uneven | None:
    """Ranks form whole groups; nearest: numbers of ranks."""
    if ranks % model_parallel == 0:
        return None
    return Uneven(whole=ranks, by=model_parallel, nearest=_multiples(ranks, model_parallel))


def uneven_heads(heads: int, sharing: int, ranks: int) -> Uneven | None:
    """Each of `sharing` ranks that share a sequence has as many of the attention heads; nearest: numbers of ranks that
    divide all `ranks`, too.
    """
    if heads % sharing == 0:
        return None
    return Uneven(whole=heads, by=sharing, nearest=nearest(sharing, divisors(gcd(heads, ranks))))


def uneven_parts(sizes: Mapping[str, int], parts: int, ranks: int) -> tuple[str, Uneven] | None:
    """The first of several sizes, by name, that does not fall into equal parts; nearest: numbers of parts that divide
    all of them, and all `ranks`.
    """
    uneven = next((name for name, size in sizes.items() if size % parts), None)
    if uneven is None:
        return None
    fitting = divisors(gcd(ranks, *sizes.values()))
    return uneven, Uneven(whole=sizes[uneven], by=parts, nearest=nearest(parts, fitting))


def uneven_batch(prompts: int, mini: int, samples: int = 1, ranks: int = 1) -> Uneven | None:
    """Every optimizer step sees the same number of prompts; nearest: mini-batches that can be dealt out, too."""
    if prompts % mini == 0:
        return None
    fitting = mini_batches_that_deal_out(prompts, samples, ranks) or divisors(prompts)
    return Uneven(whole=prompts, by=mini, nearest=nearest(mini, fitting))


def uneven_mini_batch(prompts: int, mini: int, samples: int, ranks: int) -> Uneven | None:
    """Every data-parallel rank gets as many of the mini-batch's samples; nearest: mini-batches, in prompts, that divide
    the batch as well, and none where there are no such.
    """
    if mini * samples % ranks == 0:
        return None
    fitting = mini_batches_that_deal_out(prompts, samples, ranks)
    return Uneven(whole=mini * samples, by=ranks, nearest=nearest(mini, fitting))


def uneven_micro_batch(rows: int, micro: int, also: Iterable[int] = ()) -> Uneven | None:
    """Every micro-batch has the same number of a rank's rows; nearest: micro-batches, which divide `also`, too."""
    if rows % micro == 0:
        return None
    return Uneven(whole=rows, by=micro, nearest=nearest(micro, divisors(gcd(rows, *also))))


def uneven_scoring(prompts: int, samples: int, ranks: int, mini: int = 1) -> Uneven | None:
    """Every data-parallel rank scores as many of the batch's samples; nearest: batches, in prompts, which `mini`
    divides.
    """
    if prompts * samples % ranks == 0:
        return None
    step = lcm(mini, ranks // gcd(ranks, samples))
    return Uneven(whole=prompts * samples, by=ranks, nearest=_multiples(prompts, step))


def work(
    *, prompts: int, samples: int, ranks: int, forward: int, mini: int = 0, micro: int = 1, passes: int = 1
) -> Work:
    """The share of each of `ranks` data-parallel ranks in a batch of `prompts` with `samples` each.

    `mini` prompts make an optimizer step (0: the model only scores); `micro` and `forward` are rows per pass on one
    rank with and without gradients; the batch is passed over `passes` times. All sizes must have been found to divide
    first.
    """
    rows, of_a_step = prompts * samples // ranks, mini * samples // ranks
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


def divisors(whole: int) -> tuple[int, ...]:
    """Ascending; empty above `LARGEST_TO_DIVIDE`."""
    if whole > LARGEST_TO_DIVIDE:
        return ()
    small = [number for number in range(1, isqrt(whole) + 1) if whole % number == 0]
    return tuple(sorted({*small, *(whole // number for number in small)}))


def nearest(size: int, fitting: Iterable[int]) -> tuple[int, ...]:
    """The largest fitting size below and the smallest above, where there are such."""
    sizes = tuple(fitting)
    below = max((other for other in sizes if other < size), default=None)
    above = min((other for other in sizes if other > size), default=None)
    return tuple(other for other in (below, above) if other is not None)


def _multiples(size: int, step: int) -> tuple[int, ...]:
    below = size - size % step
    return tuple(multiple for multiple in (below, below + step) if multiple > 0)
