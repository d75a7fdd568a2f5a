"""What one rank gets, and which sizes near by would divide."""

from __future__ import annotations

import pytest

from skyrl.planning.batches import (
    Uneven,
    Work,
    data_parallel,
    divisors,
    nearest,
    uneven_batch,
    uneven_micro_batch,
    uneven_mini_batch,
    uneven_ranks,
    uneven_scoring,
    work,
)


def test_a_rank_of_eight_has_an_eighth_of_the_default_batch() -> None:
    # 256 prompts x 5 samples = 1,280 rows in a step, 160 on each rank; 1,024 x 5 / 8 = 640 are scored
    assert work(prompts=1024, samples=5, ranks=8, forward=3, mini=256, micro=4, passes=2) == Work(
        optimizer_steps=8, rows_per_mini_batch=160, micro_batches=40, rows_scored=640, scoring_micro_batches=214
    )


def test_a_model_that_only_scores_takes_no_optimizer_step() -> None:
    assert work(prompts=6, samples=2, ranks=3, forward=4, passes=2) == Work(
        optimizer_steps=0, rows_per_mini_batch=0, micro_batches=0, rows_scored=4, scoring_micro_batches=1
    )


@pytest.mark.parametrize(
    ("ranks", "together", "groups"), [(8, 1, 8), (8, 4, 2), (8, 8, 1), (8, 3, None), (8, 16, None)]
)
def test_ranks_that_compute_on_the_same_rows_form_groups(ranks: int, together: int, groups: int | None) -> None:
    assert data_parallel(ranks, together) == groups


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (uneven_ranks(12, 8), Uneven(total=12, divisor=8, nearest=(8, 16))),
        (uneven_ranks(4, 8), Uneven(total=4, divisor=8, nearest=(8,))),
        (uneven_ranks(16, 8), None),
        (uneven_batch(1024, 300), Uneven(total=1024, divisor=300, nearest=(256, 512))),
        # of the divisors of 60, only multiples of 4 can be dealt to 4 ranks
        (uneven_batch(60, 16, 1, 4), Uneven(total=60, divisor=16, nearest=(12, 20))),
        (uneven_batch(7, 3, 1, 4), Uneven(total=7, divisor=3, nearest=(1, 7))),
        (uneven_batch(1024, 256), None),
        (uneven_mini_batch(120, 30, 5, 8), Uneven(total=150, divisor=8, nearest=(24, 40))),
        (uneven_mini_batch(10, 5, 1, 4), Uneven(total=5, divisor=4, nearest=())),
        (uneven_mini_batch(120, 24, 5, 8), None),
        (uneven_micro_batch(160, 64), Uneven(total=160, divisor=64, nearest=(40, 80))),
        (uneven_micro_batch(160, 64, also=(160, 60)), Uneven(total=160, divisor=64, nearest=(20,))),
        (uneven_micro_batch(160, 32), None),
        # 6 samples go to 4 ranks in multiples of 2 prompts, and 3 prompts make a mini-batch
        (uneven_scoring(9, 6, 4, mini=3), Uneven(total=54, divisor=4, nearest=(6, 12))),
        (uneven_scoring(6, 6, 4, mini=3), None),
    ],
)
def test_what_does_not_divide_is_told_with_sizes_that_do(verdict: Uneven | None, expected: Uneven | None) -> None:
    assert verdict == expected


def test_divisors_ascend() -> None:
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)


def test_divisors_of_a_huge_number_are_empty() -> None:
    assert divisors(10**12 + 1) == ()


def test_the_nearest_sizes_leave_out_the_size_itself() -> None:
    assert nearest(4, (2, 4, 8)) == (2, 8)
    assert nearest(1, (1,)) == ()
