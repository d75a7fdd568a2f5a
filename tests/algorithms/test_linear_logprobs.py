"""Log-probabilities without the logits: the same numbers and gradients as with them, and no large tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl.algorithms import linear_logprobs as module
from skyrl.algorithms.linear_logprobs import VocabularyPart, linear_logprobs, logprobs_of_logits
from skyrl.algorithms.logprobs import compiled
from tests.algorithms.operations import largest_tensor, operations

TOKENS, WIDTH, VOCABULARY = 23, 16, 101


@pytest.fixture(autouse=True)
def always_in_chunks_of_five_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PLAIN_UP_TO", 0)
    monkeypatch.setattr(module, "LOGITS_AT_A_TIME", 5 * VOCABULARY)
    monkeypatch.setattr(module, "LOGITS_OF_A_CORE", VOCABULARY)


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logs = torch.log_softmax((hidden @ weight.T).float() / temperature, dim=-1)
    return logs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_are_those_of_the_whole_table(temperature: float, with_entropy: bool) -> None:
    shares = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(1))
    results = []
    for function in (naive, linear_logprobs):
        hidden, weight, targets = problem()
        if function is linear_logprobs:
            logprobs, entropy = linear_logprobs(
                hidden, weight, targets, temperature=temperature, entropy_gradient=with_entropy
            )
        else:
            logprobs, entropy = naive(hidden, weight, targets, temperature)
        assert entropy is not None
        loss = (logprobs * shares[0]).sum() + (entropy * shares[1]).sum() * with_entropy
        loss.backward()
        results.append((logprobs, entropy, hidden.grad, weight.grad))
    for ours, expected in zip(results[1], results[0], strict=True):
        assert ours is not None and expected is not None
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("learns", [False, True])
def test_blocks_of_a_chunk_give_the_bits_of_the_whole_chunk(
    entropy_gradient: bool, learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for of_a_core in (VOCABULARY, TOKENS * VOCABULARY):
        monkeypatch.setattr(module, "LOGITS_OF_A_CORE", of_a_core)
        hidden, weight, targets = problem()
        weight.requires_grad_(learns)
        logprobs, entropy = linear_logprobs(hidden, weight, targets, temperature=2.0, entropy_gradient=entropy_gradient)
        assert entropy is not None
        (logprobs + entropy if entropy_gradient else logprobs).sum().backward()
        results.append([logprobs, entropy, hidden.grad, *([weight.grad] if learns else [])])
    for few, full in zip(*results, strict=True):
        assert few is not None and full is not None and few.equal(full)


@pytest.mark.parametrize("plain_up_to", [0, TOKENS * VOCABULARY])
def test_the_entropy_has_a_gradient_only_if_that_is_asked_for(
    plain_up_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PLAIN_UP_TO", plain_up_to)
    hidden, weight, targets = problem()
    for options, expected in (({}, False), ({"entropy_gradient": False}, False), ({"entropy_gradient": True}, True)):
        entropy = linear_logprobs(hidden, weight, targets, temperature=1.0, **options)[1]
        assert entropy is not None and entropy.requires_grad == expected
        with torch.no_grad():
            entropy = linear_logprobs(hidden, weight, targets, temperature=1.0, **options)[1]
        assert entropy is not None and not entropy.requires_grad


@pytest.mark.parametrize("plain_up_to", [0, TOKENS * VOCABULARY])
def test_without_the_entropy_the_rest_is_the_same(plain_up_to: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PLAIN_UP_TO", plain_up_to)
    gradients = []
    for with_entropy in (False, True):
        hidden, weight, targets = problem()
        logprobs, entropy = linear_logprobs(hidden, weight, targets, temperature=0.7, with_entropy=with_entropy)
        assert (entropy is None) != with_entropy
        gradients.append((logprobs, *torch.autograd.grad(logprobs.sum(), (hidden, weight))))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_half_precision_is_as_near_to_the_truth_as_the_table_in_half_precision() -> None:
    hidden, weight, targets = problem(torch.bfloat16)
    logprobs, _ = linear_logprobs(hidden, weight, targets, temperature=1.0)
    logprobs.sum().backward()
    exact_hidden, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    exact = torch.log_softmax(exact_hidden @ exact_weight.T, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    exact.sum().backward()
    assert hidden.grad is not None and weight.grad is not None and logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), exact, rtol=2e-2, atol=5e-2)
    for ours, expected in ((hidden.grad, exact_hidden.grad), (weight.grad, exact_weight.grad)):
        assert expected is not None
        assert (ours.double() - expected).norm() < 1e-2 * expected.norm()


def test_no_tensor_of_tokens_times_vocabulary_is_ever_made() -> None:
    hidden, weight, targets = problem()
    largest = largest_tensor(lambda: linear_logprobs(hidden, weight, targets, temperature=1.0)[0].sum().backward())
    assert largest == VOCABULARY * WIDTH  # the matrix's gradient; a chunk has 5 x 101


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("compile_it", [False, True])
def test_a_frozen_matrix_gets_no_gradient_and_its_table_is_computed_once(
    with_entropy: bool, entropy_gradient: bool, compile_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "compiled", lambda function: function)
    shares = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(1))
    uses_entropy = with_entropy and entropy_gradient
    hidden, weight, targets = problem()
    weight.requires_grad_(False)
    logprobs, entropy = linear_logprobs(
        hidden,
        weight,
        targets,
        temperature=0.7,
        with_entropy=with_entropy,
        entropy_gradient=entropy_gradient,
        compile_it=compile_it,
    )
    loss = (logprobs * shares[0]).sum()
    if uses_entropy:
        assert entropy is not None
        loss = loss + (entropy * shares[1]).sum()
    matmuls = [operation for operation, _ in operations(loss.backward) if operation is torch.ops.aten.mm.default]
    assert len(matmuls) == (10 if uses_entropy else 0)  # of five chunks: the table, and its gradient times the matrix
    reference_hidden, _, _ = problem()
    expected = naive(reference_hidden, weight, targets, 0.7)
    ((expected[0] * shares[0]).sum() + (expected[1] * shares[1]).sum() * uses_entropy).backward()
    assert weight.grad is None
    torch.testing.assert_close(logprobs, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad, reference_hidden.grad, rtol=1e-5, atol=1e-5)


def test_the_entropy_over_a_large_vocabulary_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3, 9, generator=generator), torch.randn(152_064, 9, generator=generator)
    _, entropy = linear_logprobs(hidden, weight, torch.zeros(3, dtype=torch.long), temperature=1.0)
    logs = torch.log_softmax(hidden.double() @ weight.double().T, dim=-1)
    torch.testing.assert_close(entropy, -(logs.exp() * logs).sum(-1), rtol=0, atol=1e-5, check_dtype=False)


def test_small_tables_take_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PLAIN_UP_TO", TOKENS * VOCABULARY)
    monkeypatch.setattr(module, "_LinearLogprobs", None)
    hidden, weight, targets = problem()
    logprobs = linear_logprobs(hidden, weight, targets, temperature=1.0)
    torch.testing.assert_close(logprobs, naive(hidden, weight, targets, 1.0))
    monkeypatch.setattr(module, "PLAIN_UP_TO", TOKENS * VOCABULARY - 1)
    with pytest.raises(AttributeError, match="apply"):  # the other path, which is gone
        linear_logprobs(hidden, weight, targets, temperature=1.0)


def test_targets_of_another_number_are_refused_by_name() -> None:
    hidden, weight, targets = problem()
    with pytest.raises(ValueError, match=r"targets has shape \(22,\), hidden \(23,\)"):
        linear_logprobs(hidden, weight, targets[1:], temperature=1.0)


@pytest.mark.parametrize(("gigabytes", "logits"), [(80, 2**28), (40, 2**27), (24, 2**26), (4, 2**25)])
def test_a_chunk_takes_a_share_of_the_memory_of_a_gpu(
    gigabytes: int, logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOGITS_AT_A_TIME", 2**25)
    properties = SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert module.logits_at_a_time(torch.device("cuda")) == logits
    assert module.logits_at_a_time(torch.device("cpu")) == 2**25


@pytest.mark.parametrize(("device", "plain"), [("cuda", [True, True, False]), ("cpu", [True, False, False])])
def test_a_gpu_keeps_the_logits_of_a_chunk_and_a_cpu_only_small_tables(
    device: str, plain: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PLAIN_UP_TO", 10)
    monkeypatch.setattr(module, "logits_at_a_time", lambda device: 20)
    assert [module._fits_plainly(logits, torch.device(device)) for logits in (10, 20, 21)] == plain


@pytest.mark.gpu
def test_a_gpu_computes_the_same_in_chunks_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 64, generator=generator) for rows in (300, 1000))
    targets = torch.randint(0, 1000, (300,), generator=generator)
    results = []
    for chunk in (2**40, 7000):
        monkeypatch.setattr(module, "logits_at_a_time", lambda device, chunk=chunk: chunk)
        monkeypatch.setattr(module, "_fits_plainly", lambda logits, device, chunk=chunk: logits <= chunk)
        leaves = [tensor.cuda().requires_grad_() for tensor in (hidden, weight)]
        logprobs, spread = module.linear_logprobs(leaves[0], leaves[1], targets.cuda(), temperature=0.8)
        assert spread is not None
        results.append([logprobs, spread, *torch.autograd.grad(logprobs.sum(), leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2)  # TF32 where the GPU has it


@pytest.mark.parametrize("by_the_compiler", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("plain_up_to", [0, TOKENS * VOCABULARY])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_what_is_compiled_computes_the_same(
    by_the_compiler: bool, plain_up_to: int, entropy_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default its functions are called as they are: a compiler takes long."""
    if not by_the_compiler:
        monkeypatch.setattr(module, "compiled", lambda function: function)
    monkeypatch.setattr(module, "PLAIN_UP_TO", plain_up_to)
    shares = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(1))
    results = []
    for compile_it in (False, True):
        hidden, weight, targets = problem()
        logprobs, entropy = linear_logprobs(
            hidden, weight, targets, temperature=0.7, entropy_gradient=entropy_gradient, compile_it=compile_it
        )
        assert entropy is not None
        ((logprobs * shares[0]).sum() + (entropy * shares[1]).sum() * entropy_gradient).backward()
        results.append((logprobs, entropy, hidden.grad, weight.grad))
    for ours, plain in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by_the_compiler", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("plain_up_to", [0, TOKENS * VOCABULARY])
def test_log_probabilities_without_entropies_are_compiled_where_they_have_gradients(
    by_the_compiler: bool, plain_up_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_names: list[str] = []
    compiler: Callable[..., Any] = compiled if by_the_compiler else lambda function: function

    def noted(function: Any) -> Any:
        compiled_names.append(function.__name__)
        return compiler(function)

    monkeypatch.setattr(module, "compiled", noted)
    monkeypatch.setattr(module, "PLAIN_UP_TO", plain_up_to)
    results = []
    for compile_it in (False, True):
        hidden, weight, targets = problem()
        logprobs, entropy = linear_logprobs(
            hidden, weight, targets, temperature=0.7, with_entropy=False, compile_it=compile_it
        )
        assert entropy is None and bool(compiled_names) == compile_it
        logprobs.sum().backward()
        results.append((logprobs, hidden.grad, weight.grad))
    for ours, plain in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_two_parts_of_the_vocabulary_give_the_numbers_and_gradients_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
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
    hidden, weight, targets = problem()
    expected = naive(hidden, weight, targets, 2.0)
    slopes = torch.linspace(-1, 1, TOKENS), torch.linspace(2, 3, TOKENS)
    gradients = torch.autograd.grad(expected, (hidden, weight), slopes, retain_graph=True)
    [of_logprobs] = torch.autograd.grad(expected[0], hidden, slopes[0])

    def rank(first: int, last: int) -> list[Tensor]:
        own, part = hidden.detach().clone().requires_grad_(), weight.detach()[first:last].clone().requires_grad_()
        apply: Any = module._LinearLogprobs.apply
        where = VocabularyPart(first=first, largest=51)
        logprobs = apply(own, part, targets, 2.0, True, where, False, False)
        frozen, _ = apply(own, part.detach(), targets, 2.0, True, where, False, True)
        return [
            *logprobs,
            *torch.autograd.grad(logprobs, (own, part), slopes),
            *torch.autograd.grad(frozen, own, slopes[0]),
        ]

    with ThreadPoolExecutor(2) as ranks:
        ends = list(ranks.map(rank, (0, 51), (51, VOCABULARY)))
    for logprobs, spread, of_hidden, of_weight, beside_a_frozen_matrix in ends:
        torch.testing.assert_close(beside_a_frozen_matrix, of_logprobs)
        torch.testing.assert_close(logprobs, expected[0])
        torch.testing.assert_close(spread, expected[1])
        torch.testing.assert_close(of_hidden, gradients[0])
        torch.testing.assert_close(of_weight, gradients[1][:51] if len(of_weight) == 51 else gradients[1][51:])


def test_a_rank_has_the_tokens_that_chunks_of_equal_size_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 101 tokens two ranks have 51 and 50; what they reduce goes to their group, unless there is nothing in it."""
    group: Any = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    matrix: Any = SimpleNamespace(device_mesh=SimpleNamespace(get_group=lambda: group), shape=(VOCABULARY, WIDTH))
    part = VocabularyPart.of(matrix)
    assert (part.first, part.group, part.largest) == (51, group, 51)
    reduced = list[tuple[Any, Any]]()
    monkeypatch.setattr(dist, "all_reduce", lambda value, by, group: reduced.append((by, group)))
    part.reduce(torch.ones(1), dist.ReduceOp.MAX)
    part.reduce(torch.ones(0))
    VocabularyPart().reduce(torch.ones(1))
    assert reduced == [(dist.ReduceOp.MAX, group)]


def test_a_part_of_the_vocabulary_finds_its_own_tokens_from_the_first_to_the_last() -> None:
    part, scores = VocabularyPart(first=2), torch.tensor([[1.0, 2.0, 3.0]] * 5)
    targets = torch.tensor([1, 2, 3, 4, 5])
    assert part.chosen(scores, targets).tolist() == [0.0, 1.0, 2.0, 3.0, 0.0]
    part.add_at(scores, targets, torch.full((5,), 10.0))
    assert (scores - torch.tensor([1.0, 2.0, 3.0])).tolist() == [
        [0.0, 0.0, 0.0],
        [10.0, 0.0, 0.0],
        [0.0, 10.0, 0.0],
        [0.0, 0.0, 10.0],
        [0.0, 0.0, 0.0],
    ]


def test_the_entropy_of_logits_has_a_gradient_only_if_that_is_asked_for() -> None:
    logits = torch.zeros(1, 2, requires_grad=True)
    for options in ({}, {"entropy_gradient": True}):
        _, spread = logprobs_of_logits(logits, torch.tensor([0]), temperature=1.0, with_entropy=True, **options)
        assert spread is not None
        assert spread.requires_grad is bool(options)
