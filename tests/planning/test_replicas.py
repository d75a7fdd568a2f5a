"""Which ranks compute on the same rows."""

from __future__ import annotations

import pytest

from skyrl.planning.replicas import Replicas, replicas


@pytest.mark.parametrize(
    ("ranks", "inner", "stages", "of_rank", "reporting"),
    [
        (4, 1, 1, (0, 1, 2, 3), (0, 1, 2, 3)),
        (4, 2, 1, (0, 0, 1, 1), (1, 3)),
        (4, 1, 2, (0, 1, 0, 1), (2, 3)),
        (8, 2, 2, (0, 0, 1, 1, 0, 0, 1, 1), (5, 7)),
        (4, 2, 2, (0, 0, 0, 0), (3,)),
    ],
)
def test_tensor_ranks_are_neighbours_and_the_last_stage_reports(
    ranks: int, inner: int, stages: int, of_rank: tuple[int, ...], reporting: tuple[int, ...]
) -> None:
    result = replicas(ranks, inner=inner, stages=stages)
    assert (result.of_rank, result.reporting, result.count) == (of_rank, reporting, len(reporting))


def test_ranks_that_form_no_whole_replicas_are_refused() -> None:
    with pytest.raises(ValueError, match="6 ranks do not make whole replicas of 2 x 2"):
        replicas(6, inner=2, stages=2)


@pytest.mark.parametrize("of_rank", [(), (1,), (0, 2)])
def test_indices_with_gaps_are_refused(of_rank: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="count from 0 without gaps"):
        Replicas(of_rank)
