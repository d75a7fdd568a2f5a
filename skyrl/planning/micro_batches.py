"""Packs rows into micro-batches that are bounded by their tokens rather than their rows.

Items are rows, or groups of rows that have to stay together (the answers to one prompt), each with a number of tokens.
There are two algorithms: `first_fit_decreasing`, whose rule is AReaL's (arXiv:2505.24298, algorithm 1), and
`karmarkar_karp`, which balances better and falls back to the first if a bin would overflow.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Plan = tuple[tuple[int, ...], ...]
"""Bins of item numbers; each bin is ascending, and bins are ordered by their first item."""


def first_fit_decreasing(tokens: Sequence[int], capacity: int, *, at_least: int = 1) -> Plan:
    """Pack the longest items first. A new bin is opened while there are fewer than `at_least`, or if even the emptiest
    bin cannot hold the item; otherwise the item goes to the bin with the fewest items among those that can hold it, and
    among equals to the one with the fewest tokens.

    Raises ValueError for an item above the capacity, and for fewer items than `at_least`.
    """
    _expect(tokens, capacity, at_least)
    bins: list[list[int]] = []
    loads: list[int] = []
    for item in sorted(range(len(tokens)), key=lambda item: (-tokens[item], item)):
        fitting = [number for number, load in enumerate(loads) if load + tokens[item] <= capacity]
        if len(bins) < at_least or not fitting:
            bins.append([item])
            loads.append(tokens[item])
            continue
        chosen = min(fitting, key=lambda number: (len(bins[number]), loads[number]))
        bins[chosen].append(item)
        loads[chosen] += tokens[item]
    return _sorted_bins(bins)


def karmarkar_karp(tokens: Sequence[int], capacity: int, *, at_least: int = 1) -> Plan:
    """Pack items into the fewest bins that the sum of tokens allows, balanced by largest differencing (Karmarkar and
    Karp, 1982).

    If a bin overflows, falls back to `first_fit_decreasing`. Raises the same errors.
    """
    _expect(tokens, capacity, at_least)
    count = max(at_least, -(-sum(tokens) // capacity))
    if count > len(tokens):
        return first_fit_decreasing(tokens, capacity, at_least=at_least)
    bins = _balanced(tokens, count)
    if any(not items for items in bins) or any(sum(tokens[item] for item in items) > capacity for items in bins):
        return first_fit_decreasing(tokens, capacity, at_least=at_least)
    return _sorted_bins(bins)


def equal_plans(tokens: Sequence[Sequence[int]], capacity: int, *, at_least: int = 1) -> tuple[Plan, ...]:
    """One plan for each rank, all with the same number of bins: the most that any rank needs, and at least `at_least`.

    An item above the capacity gets a separate bin, and a rank with fewer items than bins gets empty bins `()` at the
    end. `tokens[rank]` are the rank's items. Every rank must have at least one item.
    """
    target = at_least
    while True:
        plans = [_plan(items, capacity, target) for items in tokens]
        most = max(map(len, plans))
        if all(len(plan) == most for plan in plans):
            return tuple(plans)
        target = most


def dealt_plans(tokens: Sequence[int], capacity: int, ranks: int, *, at_least: int = 1) -> tuple[Plan, ...]:
    """Pack items over all ranks at once, and deal the bins: each rank gets equally many, at least `at_least`, and those
    at the same place, which ranks compute at the same time, are of similar size.

    An item above the capacity gets a separate bin. Bins are empty, `()`, only if there are fewer items than bins.
    """
    target = at_least * ranks
    while len(plan := _plan(tokens, capacity, target)) % ranks:
        target = -(-len(plan) // ranks) * ranks
    bins = sorted(plan, key=lambda items: -sum(tokens[item] for item in items))
    return tuple(tuple(bins[rank::ranks]) for rank in range(ranks))


def _plan(tokens: Sequence[int], capacity: int, at_least: int) -> Plan:
    """Bins for the items that fit, a separate bin for each oversized item, and empty bins up to `at_least`."""
    oversized = [(item,) for item, size in enumerate(tokens) if size > capacity]
    rest = [item for item, size in enumerate(tokens) if size <= capacity]
    sizes = [tokens[item] for item in rest]
    target = min(max(at_least - len(oversized), 1), len(rest))
    packed = karmarkar_karp(sizes, capacity, at_least=target) if rest else ()
    bins = [*oversized, *(tuple(rest[item] for item in items) for items in packed)]
    return (*_sorted_bins(bins), *((),) * (at_least - len(bins)))


def _balanced(tokens: Sequence[int], count: int) -> list[list[int]]:
    """Partition by largest differencing: the two most uneven partitions are merged, heaviest bins with lightest, until
    one is left.
    """
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for item, size in enumerate(tokens):
        parts = [(0, list[int]())] * (count - 1) + [(size, [item])]
        heapq.heappush(heap, (-size, item, parts))
    while len(heap) > 1:
        _, first, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = [(a + b, left + right) for (a, left), (b, right) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: part[0])
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], first, merged))
    return [items for _, items in heap[0][2]]


def _expect(tokens: Sequence[int], capacity: int, at_least: int) -> None:
    if tokens and max(tokens) > capacity:
        raise ValueError(f"tokens: an item of {max(tokens)} does not fit into {capacity}")
    if len(tokens) < at_least:
        raise ValueError(f"at_least: {len(tokens)} items cannot fill {at_least} bins")


def _sorted_bins(bins: Sequence[Sequence[int]]) -> Plan:
    return tuple(sorted((tuple(sorted(items)) for items in bins), key=lambda items: items[0]))
