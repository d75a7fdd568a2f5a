from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from skyrl.config import SamplingParams
from skyrl.errors import NonFiniteError, RunError, UserError
from skyrl.inference.draws import sample_seed
from skyrl.inference.engine import PromptScores
from skyrl.inference.vllm.sampling_arguments import (
    check_sampling,
    completion,
    prompt_scores,
    sampling_arguments,
    versions_of_tokens,
)
from skyrl.inference.vllm.worker import gather_without_ranks, report_tempered_logprobs
from skyrl.models.routers import restored_choices
from skyrl.tree import evolve_at
from tests.inference.nano import EOS, keys, nano_tokenizer

KEY = keys("p", 1)[0]


def translated(**fields: Any) -> dict[str, Any]:
    return sampling_arguments(SamplingParams(**fields), KEY, limit=9, eos_ids={3, 2})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({"top_k": 5}, {"top_k": 5}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"min_p": 0.1}, {"min_p": 0.1}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"stop": ("a", "b")}, {"stop": ["a", "b"], "detokenize": True}),
        ({"stop": None}, {"stop": [], "detokenize": False}),
        ({"max_generate_length": 100}, {"max_tokens": 9}),
        ({"min_new_tokens": 4}, {"min_tokens": 4}),
        ({"min_new_tokens": 100}, {"min_tokens": 9}),
        ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
        ({"greedy": True}, {"temperature": 0.0}),
        ({"stop_token_ids": (7, 2)}, {"stop_token_ids": [2, 3, 7]}),
        ({}, {"ignore_eos": True, "stop_token_ids": [2, 3], "logprobs": 0}),
        ({"additional_kwargs": {"stop_token_ids": [7]}}, {"stop_token_ids": [2, 3, 7]}),
        ({"additional_kwargs": {"ignore_eos": True, "min_tokens": 4}}, {"stop_token_ids": [], "min_tokens": 4}),
        ({"additional_kwargs": {"logit_bias": {"5": 1.0}}}, {"logit_bias": {"5": 1.0}}),
    ],
)
def test_each_setting_is_translated(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    sampling_params = translated(**fields)
    assert {name: sampling_params[name] for name in expected} == expected


def test_a_sample_has_the_seed_of_its_key() -> None:
    seeds = [sampling_arguments(SamplingParams(), key, limit=1, eos_ids=())["seed"] for key in keys("p", 3)]
    assert seeds == [sample_seed(key) % 2**63 for key in keys("p", 3)]
    assert len(set(seeds)) == 3


@pytest.mark.parametrize("temperature", [2.1, 0.009])
def test_temperatures_that_vllm_would_change_or_refuse_are_refused(temperature: float) -> None:
    with pytest.raises(UserError, match=f"sampling_params.temperature.* not at {temperature}"):
        check_sampling(SamplingParams(temperature=temperature))
    check_sampling(SamplingParams(temperature=0.0))
    check_sampling(SamplingParams(temperature=2.0))


@pytest.mark.parametrize(
    ("name", "message"), [("min_token", "did you mean min_tokens?"), ("n", "it takes allowed_token")]
)
def test_settings_that_are_not_for_the_user_are_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"no setting called {name}; {message.replace('?', '[?]')}"):
        check_sampling(SamplingParams(additional_kwargs={name: 1}))


@pytest.mark.parametrize(("field", "name"), [("min_new_tokens", "min_tokens"), ("frequency_penalty",) * 2])
def test_one_setting_under_two_names_is_refused(field: str, name: str) -> None:
    with pytest.raises(UserError, match=f"sampling_params.{field} and additional_kwargs.{name} are the same"):
        check_sampling(evolve_at(SamplingParams(additional_kwargs={name: 2}), field, 1))


def answer(ids: list[int], **fields: Any) -> Any:
    spans = [SimpleNamespace(version="4", start=0, end=1), SimpleNamespace(version="5", start=1, end=len(ids))]
    usual: dict[str, Any] = {"finish_reason": "stop", "stop_reason": EOS, "weight_versions": spans}
    usual["routed_experts"] = None
    logprobs = SimpleNamespace(logprobs=[-0.5] * len(ids))
    return SimpleNamespace(**{"token_ids": ids, "logprobs": logprobs, **usual, **fields})


def test_an_answer_keeps_its_ids_and_each_token_the_version_of_its_weights() -> None:
    ids = nano_tokenizer()("ab")["input_ids"]
    result = completion(answer([*ids, EOS]), KEY, SamplingParams(), nano_tokenizer(), prompt_tokens=3)
    assert (result.token_ids, result.text, result.stop_reason) == ((*ids, EOS), "ab", "stop")
    assert result.weight_versions == (4, 5, 5)
    assert result.logprobs == (-0.5,) * 3


def test_the_experts_of_all_tokens_but_the_last_come_with_an_answer() -> None:
    chosen = np.arange(6 * 2 * 2, dtype=np.int16).reshape(6, 2, 2)  # 3 of the prompt, 3 drawn, of which 1 is too much
    result = completion(
        answer([1, 2, EOS], routed_experts=chosen), KEY, SamplingParams(), nano_tokenizer(), prompt_tokens=3
    )
    assert result.routed_experts is not None
    assert (result.routed_experts.layers, result.routed_experts.choices, len(result.routed_experts)) == (2, 2, 5)
    assert restored_choices(result.routed_experts).tolist() == chosen[:5].tolist()


def test_text_behind_a_stop_string_is_cut() -> None:
    ids = nano_tokenizer()("a;b")["input_ids"]
    result = completion(
        answer(ids, stop_reason=";"), KEY, SamplingParams(stop=(";",)), nano_tokenizer(), prompt_tokens=3
    )
    assert result.text == "a;"


def test_log_probabilities_that_are_no_numbers_name_the_sample() -> None:
    broken = answer([1, 2], logprobs=SimpleNamespace(logprobs=[-1.0, math.nan]))
    with pytest.raises(NonFiniteError, match="prompt 'p', sample 0: .* after 1 sampled tokens"):
        completion(broken, KEY, SamplingParams(), nano_tokenizer(), prompt_tokens=3)


def test_a_sample_that_vllm_gave_up_is_no_completion() -> None:
    with pytest.raises(RunError, match="vLLM ended an incomplete sample with 'abort'"):
        completion(answer([1], finish_reason="abort"), KEY, SamplingParams(), nano_tokenizer(), prompt_tokens=3)


def test_a_token_without_a_version_is_an_error() -> None:
    with pytest.raises(RunError, match="weight versions for 2 tokens, but sampled 3"):
        versions_of_tokens([SimpleNamespace(version="1", start=0, end=2)], 3)


class Sampler:
    """Cuts everything but the likeliest token, in place, as vLLM's does."""

    def sample(self, logits: Any, metadata: Any, logprobs_mode_override: Any = None) -> tuple[Any, Any]:
        logits.fill_(-torch.inf)
        return torch.zeros(len(logits)), logits


def test_a_sampler_reports_the_tempered_distribution_before_the_cut() -> None:
    sampler: Any = Sampler()
    report_tempered_logprobs(sampler)
    logits = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    metadata = SimpleNamespace(max_num_logprobs=0, temperature=torch.tensor([0.0, 0.5]))
    _, scores = sampler.sample(logits.clone(), metadata)
    expected = torch.stack([logits[0].log_softmax(-1), (2 * logits[1]).log_softmax(-1)])  # greedy rows: at 1
    torch.testing.assert_close(scores, expected)
    _, greedy = sampler.sample(logits.clone(), SimpleNamespace(max_num_logprobs=0, temperature=None))
    torch.testing.assert_close(greedy, logits.log_softmax(-1))


def test_log_probabilities_of_drawn_tokens_come_without_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.outputs", SimpleNamespace(LogprobsTensors=lambda *parts: parts))
    sampler: Any = SimpleNamespace(gather_logprobs=lambda *args: args)
    gather_without_ranks(sampler)
    scores, drawn = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]]), torch.tensor([2, 0])
    tokens, logprobs, ranks = sampler.gather_logprobs(scores, 0, drawn)
    assert (tokens.tolist(), logprobs.tolist(), ranks.tolist()) == ([[2], [0]], [[-3.0], [-4.0]], [0, 0])


@pytest.mark.parametrize("logits", [[[1.0, 2.0, 3.0]], [[-4.0, 9.0, 0.0]]])
def test_what_vllm_gathers_of_a_prompt_is_normalized_once(
    logits: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.outputs", SimpleNamespace(LogprobsTensors=None))
    sampler: Any = SimpleNamespace(gather_logprobs=lambda scores, *_: scores)
    gather_without_ranks(sampler)
    expected = torch.tensor(logits).log_softmax(-1)
    for inputs in (torch.tensor(logits), expected):  # a prompt's logits, and the log-probabilities of drawn tokens
        torch.testing.assert_close(sampler.gather_logprobs(inputs, 1, torch.tensor([0])), expected)


def entry(**logprobs: float) -> dict[int, Any]:
    """What vLLM reports for one place of a prompt; the names are `t` and the token's id."""
    return {int(name[1:]): SimpleNamespace(logprob=value) for name, value in logprobs.items()}


def test_scores_of_a_prompt_are_those_of_its_tokens_and_of_the_likeliest() -> None:
    reported = [None, entry(t5=-3.0, t9=-0.5), entry(t7=-0.25)]
    assert prompt_scores((4, 5, 7), reported) == PromptScores(
        logprobs=(-3.0, -0.25), likeliest=(9, 7), likeliest_logprobs=(-0.5, -0.25)
    )
    assert prompt_scores((4,), [None]) == PromptScores(logprobs=(), likeliest=(), likeliest_logprobs=())


@pytest.mark.parametrize(
    ("reported", "error", "message"),
    [
        ([], RunError, "scored 0 tokens of a prompt of 2"),
        ([None], RunError, "scored 1 tokens of a prompt of 2"),
        ([None, entry(t5=math.nan)], NonFiniteError, "not finite"),
        ([None, entry(t5=-math.inf, t6=0.0)], NonFiniteError, "not finite"),
    ],
)
def test_scores_that_cannot_be_a_prompts_are_refused(reported: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prompt_scores((4, 5), reported)
