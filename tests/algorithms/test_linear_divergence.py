"""A student's divergence from its teacher without either's logits: the numbers and gradients of the whole tables."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl.algorithms import linear_divergence as divergences
from skyrl.algorithms import linear_logprobs as module
from skyrl.algorithms.linear_divergence import linear_divergence
from skyrl.algorithms.linear_logprobs import VocabularyPart
from tests.algorithms.operations import largest_tensor

TOKENS, WIDTH, TEACHERS_WIDTH, VOCABULARY = 23, 16, 12, 101
BETAS = pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])


@pytest.fixture(autouse=True)
def always_in_chunks_of_five_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOGITS_AT_A_TIME", 5 * VOCABULARY)


def problem(padding: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((TOKENS, WIDTH), (VOCABULARY + padding, WIDTH), (TOKENS, TEACHERS_WIDTH), (VOCABULARY, TEACHERS_WIDTH))
    hidden, weight, *teacher = (0.5 * torch.randn(*size, generator=generator) for size in sizes)
    return hidden.requires_grad_(), weight.requires_grad_(), teacher[0], teacher[1]


def dense(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The divergence as its definition has it, from logits (N, V) in float64."""
    p, q = torch.softmax(student.double(), -1), torch.softmax(teacher.double(), -1)

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (one * (one.log() - other.log())).sum(-1)

    if beta == 0:
        return kl(q, p)
    m = (1 - beta) * p + beta * q
    return kl(p, q) if beta == 1 else beta * kl(q, m) + (1 - beta) * kl(p, m)


def expected_of(beta: float, temperature: float, slopes: Tensor, padding: int = 0) -> list[Tensor]:
    hidden, weight, states, matrix = problem(padding)
    divergence = dense(hidden @ weight[:VOCABULARY].T / temperature, states @ matrix.T / temperature, beta)
    return [divergence.float(), *torch.autograd.grad(divergence, (hidden, weight), slopes.double())]


@BETAS
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("padding", [0, 3])
def test_values_and_gradients_are_those_of_the_whole_tables(beta: float, temperature: float, padding: int) -> None:
    """Rows with which the student's matrix is padded have no part in it."""
    slopes = torch.linspace(-1, 1, TOKENS)
    hidden, weight, states, matrix = problem(padding)
    divergence = linear_divergence(hidden, weight, states, matrix, beta=beta, temperature=temperature)
    ours = [divergence, *torch.autograd.grad(divergence, (hidden, weight), slopes)]
    for actual, expected in zip(ours, expected_of(beta, temperature, slopes, padding), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)
    assert divergence.dtype == torch.float32 and (divergence > 0.01).all()


@BETAS
def test_a_teacher_that_is_the_student_gives_zero_and_no_gradient(beta: float) -> None:
    hidden, weight, _, _ = problem()
    divergence = linear_divergence(hidden, weight, hidden.detach(), weight.detach(), beta=beta, temperature=1.0)
    gradients = torch.autograd.grad(divergence.sum(), (hidden, weight))
    for tensor in (divergence, *gradients):
        torch.testing.assert_close(tensor, torch.zeros_like(tensor), atol=1e-6, rtol=0)


@BETAS
def test_half_precision_gives_the_numbers_of_its_own_logits(beta: float) -> None:
    exact = [tensor.detach().bfloat16() for tensor in problem()]
    hidden, weight = (tensor.requires_grad_() for tensor in exact[:2])
    divergence = linear_divergence(hidden, weight, exact[2], exact[3], beta=beta, temperature=1.0)
    divergence.sum().backward()
    expected = dense(hidden @ weight.T, exact[2] @ exact[3].T, beta)
    torch.testing.assert_close(divergence, expected.float(), atol=1e-5, rtol=1e-4)
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16


@pytest.mark.sampled(3)
@BETAS
def test_a_large_vocabulary_is_added_up_exactly(beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOGITS_AT_A_TIME", 2**25)
    generator = torch.Generator().manual_seed(0)
    hidden, weight, states, matrix = (0.5 * torch.randn(rows, 64, generator=generator) for rows in (2, 150_000) * 2)
    divergence = linear_divergence(hidden, weight, states, matrix, beta=beta, temperature=1.0)
    expected = dense(hidden.double() @ weight.double().T, states.double() @ matrix.double().T, beta)
    torch.testing.assert_close(divergence, expected.float(), atol=2e-5, rtol=0)


def test_no_tensor_of_tokens_times_vocabulary_is_ever_made() -> None:
    hidden, weight, states, matrix = problem()

    def both_ways() -> None:
        linear_divergence(hidden, weight, states, matrix, beta=0.5, temperature=1.0).sum().backward()

    assert largest_tensor(both_ways) == VOCABULARY * WIDTH  # the gradient of the matrix; a chunk has 5 x 101


def test_a_frozen_matrix_gets_no_gradient() -> None:
    hidden, weight, states, matrix = problem()
    weight.requires_grad_(False)
    linear_divergence(hidden, weight, states, matrix, beta=1.0, temperature=1.0).sum().backward()
    assert weight.grad is None and hidden.grad is not None


def test_teachers_states_of_another_number_are_refused_by_name() -> None:
    hidden, weight, states, matrix = problem()
    with pytest.raises(ValueError, match=r"teacher_hidden has shape \(22,\), hidden \(23,\)"):
        linear_divergence(hidden, weight, states[1:], matrix, beta=1.0, temperature=1.0)


@BETAS
def test_two_parts_of_the_vocabulary_give_the_numbers_and_gradients_of_the_whole(
    beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads stand for the ranks: what each of them reduces is added up, or the larger is taken."""
    meeting, brought = threading.Barrier(2), dict[int, Tensor]()

    def reduce(part: VocabularyPart, value: Tensor, by: Any = dist.ReduceOp.SUM) -> Tensor:
        brought[part.first] = value.clone()
        meeting.wait(60)
        one, other = brought.values()
        value.copy_(one + other if by == dist.ReduceOp.SUM else torch.maximum(one, other))
        meeting.wait(60)
        return value

    monkeypatch.setattr(VocabularyPart, "reduce", reduce)
    slopes = torch.linspace(-1, 1, TOKENS)
    hidden, weight, states, matrix = problem()

    def rank(first: int, last: int) -> list[Tensor]:
        own, part = hidden.detach().clone().requires_grad_(), weight.detach()[first:last].clone().requires_grad_()
        apply: Any = divergences._LinearDivergence.apply
        divergence = apply(own, part, states, matrix[first:last], beta, 2.0, VocabularyPart(first=first, largest=51))
        return [divergence, *torch.autograd.grad(divergence, (own, part), slopes)]

    with ThreadPoolExecutor(2) as ranks:
        ends = list(ranks.map(rank, (0, 51), (51, VOCABULARY)))
    expected = expected_of(beta, 2.0, slopes)
    torch.testing.assert_close(torch.cat([ends[0][2], ends[1][2]]), expected[2], atol=1e-6, rtol=1e-5)
    for of_rows, of_hidden, _ in ends:
        torch.testing.assert_close(of_rows, expected[0], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(of_hidden, expected[1], atol=1e-6, rtol=1e-5)
