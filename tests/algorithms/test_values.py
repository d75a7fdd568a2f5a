"""The critic's loss, by hand."""

from __future__ import annotations

import torch

from skyrl.algorithms.values import value_loss


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
