"""A student's divergence from its teacher over a few tokens: the numbers and gradients of the whole tables."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl.algorithms import target_logprobs as module
from skyrl.algorithms.linear_logprobs import VocabularyPart
from skyrl.algorithms.target_logprobs import likeliest, target_logprobs
from skyrl.algorithms.topk_divergence import ABSENT, tokens_of_both, topk_divergence, union_of_tokens
from tests.algorithms.operations import largest_tensor

TOKENS, WIDTH, VOCABULARY, K = 23, 16, 101, 4
BETAS = pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])


@pytest.fixture(autouse=True)
def always_in_chunks_of_five_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "kept_bytes", lambda device: 0)
    monkeypatch.setattr("skyrl.algorithms.linear_logprobs.logits_at_a_time", lambda device: 5 * VOCABULARY)


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and output matrix of the student, and the logits of the teacher."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (0.5 * torch.randn(size, WIDTH, generator=generator) for size in (TOKENS, VOCABULARY))
    return hidden.requires_grad_(), weight.requires_grad_(), 2 * torch.randn(TOKENS, VOCABULARY, generator=generator)


def ids_of(teacher: Tensor) -> Tensor:
    """The teacher's likeliest tokens, of which some places have fewer."""
    ids = teacher.topk(K).indices
    ids[::3, -1] = ABSENT
    ids[5] = ABSENT
    return ids


def dense(student: Tensor, teacher: Tensor, ids: Tensor, *, beta: float, tail: bool, floor: float | None) -> Tensor:
    """The divergence as its definition has it, from logits (N, V) in float64, one position after the other."""
    divergences = []
    for one, other, chosen in zip(student.double(), teacher.double(), ids, strict=True):
        chosen = chosen[chosen != ABSENT]
        p, q = one.softmax(-1)[chosen], other.softmax(-1)[chosen]
        if tail:
            p, q = (torch.cat([probabilities, 1 - probabilities.sum(-1, keepdim=True)]) for probabilities in (p, q))
        if floor is not None:
            p, q = (probabilities.log().clamp(min=floor).exp() for probabilities in (p, q))
        m = (1 - beta) * p + beta * q
        if beta == 0:
            divergences.append((q * (q.log() - p.log())).sum())
        elif beta == 1:
            divergences.append((p * (p.log() - q.log())).sum())
        else:
            divergences.append(beta * (q * (q / m).log()).sum() + (1 - beta) * (p * (p / m).log()).sum())
    return torch.stack(divergences)


@BETAS
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("floor", [None, -5.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_values_and_gradients_are_those_of_the_whole_tables(
    beta: float, tail: bool, floor: float | None, temperature: float
) -> None:
    slopes = torch.linspace(-1, 1, TOKENS)
    hidden, weight, teacher = problem()
    ids = ids_of(teacher)
    settings: dict[str, Any] = {"beta": beta, "tail": tail}
    expected = dense(hidden @ weight.T / temperature, teacher / temperature, ids, floor=floor, **settings)
    gradients = torch.autograd.grad(expected, (hidden, weight), slopes.double())

    teacher_logprobs = (teacher / temperature).log_softmax(-1).gather(-1, ids.clamp(min=0))
    logs = target_logprobs(hidden, weight, ids.clamp(min=0), temperature=temperature)
    divergence, clamped = topk_divergence(logs, teacher_logprobs, ids, min_logprob=floor, **settings)
    ours = torch.autograd.grad(divergence, (hidden, weight), slopes)
    for actual, exact in zip((divergence, *ours), (expected.float(), *gradients), strict=True):
        torch.testing.assert_close(actual, exact, atol=1e-6, rtol=1e-5)
    low = ((logs < (-1e9 if floor is None else floor)) & (ids != ABSENT)).sum(-1)
    torch.testing.assert_close(clamped, low / (ids != ABSENT).sum(-1).clamp(min=1))
    assert bool(clamped.any()) == (floor is not None)


@BETAS
def test_a_teacher_that_is_the_student_gives_zero_and_no_gradient(beta: float) -> None:
    hidden, weight, _ = problem()
    ids, logs, _ = likeliest(hidden, weight, K, torch.zeros(TOKENS, 0, dtype=torch.int64), temperature=1.0)
    own = target_logprobs(hidden, weight, ids)
    divergence, _ = topk_divergence(own, logs, ids, beta=beta, tail=True, min_logprob=None)
    for tensor in (divergence, *torch.autograd.grad(divergence.sum(), (hidden, weight))):
        torch.testing.assert_close(tensor, torch.zeros_like(tensor), atol=1e-6, rtol=0)


def test_without_a_tail_the_forward_divergence_is_verls() -> None:
    """verl/trainer/distillation/fsdp/losses.py: clamped log-probabilities of both, then F.kl_div's sum."""
    hidden, weight, teacher = problem()
    ids = teacher.topk(K).indices
    teacher_logprobs = teacher.log_softmax(-1).gather(-1, ids)
    ours = (hidden @ weight.T).log_softmax(-1).gather(-1, ids)
    expected = torch.nn.functional.kl_div(
        ours.clamp_min(-5), teacher_logprobs.clamp_min(-5), reduction="none", log_target=True
    )
    divergence, _ = topk_divergence(ours, teacher_logprobs, ids, beta=0.0, tail=False, min_logprob=-5.0)
    torch.testing.assert_close(divergence, expected.sum(-1))


def test_no_tensor_of_tokens_times_vocabulary_is_ever_made() -> None:
    hidden, weight, teacher = problem()
    ids = ids_of(teacher)

    def both_ways() -> None:
        likeliest(hidden, weight, K, ids.clamp(min=0), temperature=1.0)
        logs = target_logprobs(hidden, weight, ids.clamp(min=0))
        topk_divergence(logs, logs.detach() - 1, ids, beta=0.5, tail=True, min_logprob=-10.0)[0].sum().backward()

    assert largest_tensor(both_ways) == VOCABULARY * WIDTH  # the gradient of the matrix; a chunk has 5 x 101


def test_the_likeliest_tokens_and_others_have_the_log_probabilities_of_the_whole_table() -> None:
    hidden, weight, teacher = problem()
    logs, others = (hidden @ weight.T / 2).log_softmax(-1), teacher.topk(K).indices
    ids, best, of_others = likeliest(hidden, weight, K, others, temperature=2.0)
    torch.testing.assert_close(best, logs.topk(K).values)
    assert torch.equal(ids, logs.topk(K).indices)
    torch.testing.assert_close(of_others, logs.gather(-1, others))
    with pytest.raises(ValueError, match="the 102 likeliest of 101 tokens"):
        likeliest(hidden, weight, VOCABULARY + 1, others, temperature=1.0)


def test_tokens_of_both_models_or_of_either_are_compared_once() -> None:
    teachers, students = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[2, 9], [5, 6]])
    best, others = torch.tensor([[-0.1, -0.2], [-0.3, -0.4]]), torch.tensor([[-0.2, -7.0], [-8.0, -9.0]])
    ids, logs = union_of_tokens((teachers, best), (students, others))
    assert ids.tolist() == [[1, 2, ABSENT, 9], [3, 4, 5, 6]]
    assert torch.equal(logs, torch.cat([best, others], -1))
    assert tokens_of_both(teachers, students).tolist() == [[ABSENT, 2], [ABSENT, ABSENT]]


def test_two_parts_of_the_vocabulary_give_the_numbers_and_gradients_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads stand for the ranks: what each of them reduces is added up, or the larger is taken."""
    meeting, brought = threading.Barrier(2), dict[int, Tensor]()

    def exchange(part: VocabularyPart, value: Tensor) -> list[Tensor]:
        brought[part.first] = value.clone()
        meeting.wait(60)
        both = [brought[0], brought[51]]
        meeting.wait(60)
        return both

    def reduce(part: VocabularyPart, value: Tensor, by: Any = dist.ReduceOp.SUM) -> Tensor:
        one, other = exchange(part, value)
        return value.copy_(one + other if by == dist.ReduceOp.SUM else torch.maximum(one, other))

    monkeypatch.setattr(VocabularyPart, "reduce", reduce)
    monkeypatch.setattr(VocabularyPart, "gather", lambda part, value: torch.cat(exchange(part, value), -1))
    monkeypatch.setattr(
        VocabularyPart,
        "split",
        lambda weight: (weight, VocabularyPart(first=0 if len(weight) == 51 else 51, group=GROUP, largest=51)),
    )
    slopes = torch.linspace(-1, 1, TOKENS * K).view(TOKENS, K)
    hidden, weight, teacher = problem()
    targets = teacher.topk(K).indices
    logs = (hidden @ weight.T / 2).log_softmax(-1)
    expected = torch.autograd.grad(logs.gather(-1, targets), (hidden, weight), slopes)

    def rank(first: int, last: int) -> list[Tensor]:
        own, part = hidden.detach().clone().requires_grad_(), weight.detach()[first:last].clone().requires_grad_()
        best = likeliest(own, part, K, targets, temperature=2.0)
        logprobs = target_logprobs(own, part, targets, temperature=2.0)
        return [*best, logprobs.detach(), *torch.autograd.grad(logprobs, (own, part), slopes)]

    with ThreadPoolExecutor(2) as ranks:
        ends = list(ranks.map(rank, (0, 51), (51, VOCABULARY)))
    torch.testing.assert_close(torch.cat([ends[0][-1], ends[1][-1]]), expected[1], atol=1e-6, rtol=1e-5)
    for ids, best, others, of_targets, of_hidden, _ in ends:
        assert torch.equal(ids, logs.topk(K).indices)
        torch.testing.assert_close(best, logs.topk(K).values)
        for values in (others, of_targets):
            torch.testing.assert_close(values, logs.gather(-1, targets))
        torch.testing.assert_close(of_hidden, expected[0], atol=1e-6, rtol=1e-5)


GROUP: Any = object()
"""Stands for a group of ranks."""
