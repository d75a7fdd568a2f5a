from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from skyrl.config import SamplingParams
from skyrl.inference.draws import uniforms
from skyrl.inference.sampling import RowSettings, choose, cut, draw, likeliest, penalised, tempered

ROWS = [
    SamplingParams(),
    SamplingParams(temperature=0.6, top_k=5),
    SamplingParams(temperature=1.7, top_p=0.8),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.3),
    SamplingParams(temperature=0.0),
    SamplingParams(top_k=1_000, top_p=1.0, repetition_penalty=0.8),
    SamplingParams(top_p=1e-6),
]
"""Training and evaluation in one batch."""


def random_logits(rows: int, vocabulary: int = 100, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def of_transformers(row: SamplingParams, seen: Any, logits: Any) -> Tensor:
    """One row, through the processors in the order in which `generate` applies them."""
    steps: list[Any] = [RepetitionPenaltyLogitsProcessor(row.repetition_penalty)]
    if row.temperature > 0:
        steps.append(TemperatureLogitsWarper(row.temperature))
    if row.top_k > 0:
        steps.append(TopKLogitsWarper(row.top_k))
    if row.top_p < 1:
        steps.append(TopPLogitsWarper(row.top_p))
    if row.min_p > 0:
        steps.append(MinPLogitsWarper(row.min_p))
    processed: Tensor = LogitsProcessorList(steps)(seen[None], logits[None])
    return processed[0]


def test_filters_and_penalty_equal_those_of_transformers_for_rows_with_different_settings() -> None:
    settings = RowSettings.of(ROWS, "cpu")
    for seed in range(20):
        logits = random_logits(len(ROWS), seed=seed)
        seen = torch.randint(0, 100, (len(ROWS), 30), generator=torch.Generator().manual_seed(seed))
        actual = cut(tempered(penalised(logits, seen, settings.repetition_penalty), settings), settings)
        expected = torch.stack([of_transformers(row, seen[i], logits[i]) for i, row in enumerate(ROWS)])
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_top_k_keeps_every_token_as_likely_as_the_kth() -> None:
    settings = RowSettings.of([SamplingParams(top_k=2)], "cpu")
    kept = cut(torch.tensor([[3.0, 2.0, 2.0, 1.0]]), settings)
    assert kept.tolist() == [[3.0, 2.0, 2.0, -torch.inf]]


def test_the_logprob_is_that_of_the_tempered_softmax_before_anything_is_cut() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    settings = RowSettings.of([SamplingParams(temperature=0.5, top_k=1)], "cpu")
    token, logprob = choose(logits, settings, torch.tensor([0.999], dtype=torch.float64))
    assert token.tolist() == [0]  # all that top-k left
    torch.testing.assert_close(logprob, torch.log_softmax(logits / 0.5, -1)[:, 0])


def test_temperature_zero_takes_the_likeliest_token_and_reports_temperature_one() -> None:
    logits = random_logits(2)
    settings = RowSettings.of([SamplingParams(temperature=0.0), SamplingParams(temperature=2.0)], "cpu")
    tokens, logprobs = choose(logits, settings, torch.tensor([0.9, 0.9], dtype=torch.float64))
    assert tokens[0] == logits[0].argmax()
    torch.testing.assert_close(logprobs[0], logits[0].log_softmax(-1).max())


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    logits, draws = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -torch.inf, -3.0]), 40_000
    settings = RowSettings.of([SamplingParams(temperature=1.5)] * draws, "cpu")
    numbers = uniforms(torch.full((draws,), 11), torch.arange(draws))
    tokens, _ = choose(logits.expand(draws, -1), settings, numbers)
    counts, expected = torch.bincount(tokens, minlength=7), (logits / 1.5).softmax(-1) * draws
    assert counts[5] == 0
    possible = expected > 0
    chi_square = ((counts[possible] - expected[possible]) ** 2 / expected[possible]).sum()
    assert chi_square < 20.5  # 99.9 % of 5 degrees of freedom


def test_a_token_that_was_cut_is_never_drawn_however_extreme_the_number() -> None:
    scores = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    extremes = torch.tensor([0.0, 0.5, 1.0 - 2.0**-52], dtype=torch.float64)
    assert draw(scores.expand(3, -1), extremes).tolist() == [1, 3, 3]


@pytest.mark.parametrize("vocabulary", [8193, 9216, 20_000])
def test_a_large_vocabulary_draws_what_one_running_sum_draws(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    scores = torch.randn(400, vocabulary, generator=generator) * 3
    scores[:100, 700:] = -torch.inf  # a few blocks
    scores[100:200, :-1] = -torch.inf  # the last token alone, in a block of its own or not
    uniform = torch.rand(400, generator=generator, dtype=torch.float64)
    uniform[::4], uniform[1::4] = 0.0, 1.0 - 2.0**-52
    cumulative = scores.softmax(-1).cumsum(-1, dtype=torch.float64)
    expected = torch.searchsorted(cumulative, uniform.unsqueeze(1) * cumulative[:, -1:], right=True).squeeze(1)
    tokens = draw(scores, uniform)
    inner = torch.arange(400) % 4 > 1  # at the ends the order of a sum decides between neighbours
    assert torch.equal(tokens[inner], expected[inner])
    assert bool((scores.gather(1, tokens.unsqueeze(1)) > -torch.inf).all())
    assert draw(torch.full((2, vocabulary), torch.nan), uniform[:2]).max() < vocabulary


@pytest.mark.parametrize("companions", [1, 3, 61])
def test_what_a_row_draws_does_not_depend_on_the_rows_beside_it(companions: int) -> None:
    logits, numbers = random_logits(len(ROWS), 5_000), torch.linspace(0.03, 0.97, len(ROWS), dtype=torch.float64)
    for i, row in enumerate(ROWS):
        unbatched = choose(logits[i : i + 1], RowSettings.of([row], "cpu"), numbers[i : i + 1])
        others = [ROWS[(i + j + 1) % len(ROWS)] for j in range(companions)]
        crowd = torch.cat([random_logits(companions, 5_000, seed=i + 1), logits[i : i + 1]])
        drawn = torch.cat([torch.rand(companions).double(), numbers[i : i + 1]])
        together = choose(crowd, RowSettings.of([*others, row], "cpu"), drawn)
        assert together[0][-1] == unbatched[0][0]
        assert together[1][-1] == unbatched[1][0]  # bit for bit


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_show_in_the_logprob(bad: float) -> None:
    logits = random_logits(2)
    logits[1, 3] = bad
    _, logprobs = choose(logits, RowSettings.of([SamplingParams()] * 2, "cpu"), torch.tensor([0.5, 0.5]).double())
    assert logprobs.isfinite().tolist() == [True, False]


def test_large_scores_cost_the_likeliest_no_precision() -> None:
    scores = 3e4 + torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = likeliest(scores, 4)
    expected = torch.log_softmax(scores.double(), -1).gather(-1, tokens)
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-5)
    assert tokens.tolist() == scores.topk(4).indices.tolist()
