"""How the rows of a batch are dealt to ranks."""

from __future__ import annotations

import torch

from skyrl.algorithms.reductions import token_mean
from skyrl.learners.group import deal
from tests.learners.rows import LENGTHS, batch


def test_rows_are_dealt_in_order_and_equal_numbers() -> None:
    shares = deal(batch(6), 3)
    assert [share.lengths.tolist() for share in shares] == [[5, 12], [8, 12], [6, 9]]


def test_where_rows_do_not_divide_the_last_is_repeated_without_weight() -> None:
    rows = batch(5)
    shares = deal(rows.given(loss_weights=token_mean(rows.loss_mask)), 2)
    assert [share.lengths.tolist() for share in shares] == [list(LENGTHS[:3]), [12, 6, 6]]
    weights = [share.loss_weights for share in shares]
    assert weights[1] is not None and not weights[1][2].any() and not shares[1].loss_mask[2].any()
    torch.testing.assert_close(sum(each.sum() for each in weights if each is not None), torch.tensor(1.0))
    assert rows.loss_mask[4].any(), "the batch itself is as it was"
