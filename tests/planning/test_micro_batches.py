"""Packing by tokens: the reference's rule, and what every plan keeps to."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl.planning.micro_batches import Plan, dealt_plans, equal_plans, first_fit_decreasing, karmarkar_karp

sizes = st.lists(st.integers(1, 50), min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("tokens", "capacity", "at_least", "plan"),
    [
        ([100, 200, 300, 150, 250], 500, 2, ((0,), (1, 4), (2, 3))),
        ([900, 800, 700, 300, 200, 100], 1000, 1, ((0, 5), (1, 4), (2, 3))),
        ([10] * 8, 10**12, 4, ((0, 4), (1, 5), (2, 6), (3, 7))),
    ],
)
def test_first_fit_decreasing_packs_as_the_reference_does(
    tokens: list[int], capacity: int, at_least: int, plan: Plan
) -> None:
    assert first_fit_decreasing(tokens, capacity, at_least=at_least) == plan


def test_karmarkar_karp_finds_the_even_halves_that_first_fit_misses() -> None:
    plan = karmarkar_karp([100, 200, 300, 150, 250], 500)
    assert [sum([100, 200, 300, 150, 250][item] for item in micro_batch) for micro_batch in plan] == [500, 500]


@pytest.mark.parametrize("pack", [first_fit_decreasing, karmarkar_karp])
def test_what_cannot_be_packed_is_refused_by_name(pack: Callable[..., Plan]) -> None:
    with pytest.raises(ValueError, match="tokens: an item of 11 does not fit into 10"):
        pack([3, 11], 10)
    with pytest.raises(ValueError, match="at_least: 2 items cannot fill 3 bins"):
        pack([3, 1], 10, at_least=3)


@given(sizes, st.integers(50, 120), st.integers(1, 4))
def test_every_item_is_packed_once_and_no_bin_overflows(tokens: list[int], capacity: int, at_least: int) -> None:
    for pack in (first_fit_decreasing, karmarkar_karp):
        plan = pack(tokens, capacity, at_least=min(at_least, len(tokens)))
        assert sorted(chain(*plan)) == list(range(len(tokens)))
        assert all(sum(tokens[item] for item in micro_batch) <= capacity for micro_batch in plan)
        assert len(plan) >= min(at_least, len(tokens))


@given(st.lists(sizes, min_size=1, max_size=4), st.integers(5, 120), st.integers(1, 6))
def test_all_ranks_end_with_the_same_number_of_micro_batches(
    ranks: list[list[int]], capacity: int, at_least: int
) -> None:
    plans = equal_plans(ranks, capacity, at_least=at_least)
    [count] = {len(plan) for plan in plans}
    assert count >= at_least
    for tokens, plan in zip(ranks, plans, strict=True):
        assert sorted(chain(*plan)) == list(range(len(tokens)))
        assert all(
            len(micro_batch) <= 1 or sum(tokens[item] for item in micro_batch) <= capacity for micro_batch in plan
        )


def test_a_row_that_is_too_long_goes_alone_and_a_rank_with_less_to_do_idles() -> None:
    assert equal_plans([[90, 5, 5], [40]], 50) == (((0,), (1, 2)), ((0,), ()))


@given(sizes, st.integers(5, 120), st.integers(1, 4), st.integers(1, 3))
def test_bins_over_all_ranks_are_dealt_evenly(tokens: list[int], capacity: int, ranks: int, at_least: int) -> None:
    plans = dealt_plans(tokens, capacity, ranks, at_least=at_least)
    [count] = {len(plan) for plan in plans}
    assert len(plans) == ranks and count >= at_least
    assert sorted(chain(*chain(*plans))) == list(range(len(tokens)))
    assert all(
        len(micro_batch) <= 1 or sum(tokens[item] for item in micro_batch) <= capacity for micro_batch in chain(*plans)
    )


def test_packing_over_all_ranks_takes_fewer_passes_than_packing_on_each() -> None:
    tokens = [9, 9, 9, 1, 1, 1]
    assert [len(plan) for plan in equal_plans([tokens[:3], tokens[3:]], 10)] == [3, 3]
    assert dealt_plans(tokens, 10, 2) == (((0,), (2,)), ((1,), (3, 4, 5)))
