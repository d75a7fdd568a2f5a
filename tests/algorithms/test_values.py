"""The critic's loss, by hand."""

from __future__ import annotations

import torch

from skyrl.algorithms.critic import value_is_clipped, value_loss


def test_without_clipping_it_is_half_the_squared_error() -> None:
    losses = value_loss(torch.tensor([[1.0, 3.0]]), None, torch.tensor([[2.0, 0.0]]), clip=None)
    torch.testing.assert_close(losses, torch.tensor([[0.5, 4.5]]))


def test_a_value_that_moved_further_than_the_clip_learns_nothing_more_that_way() -> None:
    values = torch.tensor([[0.5]], requires_grad=True)  # 0.0 before; held to 0.2
    loss = value_loss(values, torch.tensor([[0.0]]), torch.tensor([[1.0]]), clip=0.2)
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.tensor([[0.32]]))  # (0.2 - 1)^2 / 2, above (0.5 - 1)^2 / 2
    assert values.grad is not None and values.grad.item() == 0.0


def test_a_value_that_moved_the_wrong_way_is_not_protected() -> None:
    values = torch.tensor([[-0.5]], requires_grad=True)
    loss = value_loss(values, torch.tensor([[0.0]]), torch.tensor([[1.0]]), clip=0.2)
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.tensor([[1.125]]))  # (-0.5 - 1)^2 / 2, above (-0.2 - 1)^2 / 2
    assert values.grad is not None and values.grad.item() == -1.5


def test_the_clip_is_around_the_value_before_the_update() -> None:
    values, old, returns = (torch.tensor([[value]]) for value in (1.5, 1.0, 2.0))  # held to 1.2
    torch.testing.assert_close(value_loss(values, old, returns, clip=0.2), torch.tensor([[0.32]]))  # (1.2 - 2)^2 / 2
    torch.testing.assert_close(value_loss(2 - values, 2 - old, 2 - returns, clip=0.2), torch.tensor([[0.32]]))


def test_a_value_is_clipped_where_the_held_one_is_further_from_the_return() -> None:
    values, old, returns = torch.tensor([[0.5, -0.5, 0.1, 0.2]]), torch.zeros(1, 4), torch.ones(1, 4)
    assert value_is_clipped(values, old, returns, clip=0.2).tolist() == [[True, False, False, False]]
    assert value_is_clipped(values, None, returns, clip=None).tolist() == [[False] * 4]
