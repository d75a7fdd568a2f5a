"""Rows of a padded vocabulary are never drawn, and the log-probabilities remain those that the learner computes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl.config import SamplingParams
from skyrl.inference.sampling import Drawable, RowSettings, choose
from skyrl.inference.torch.engine import TorchEngine
from skyrl.inference.vllm.worker import drawable_of, report_tempered_logprobs
from tests.inference.nano import full_forward_logprobs, nano_model, nano_tokenizer, prompts, request

TOKENS = len(nano_tokenizer())


def favoured(model: Any) -> Any:
    """The model, in which the rows behind the tokens are the likeliest at half of the places, and tokens at none."""
    with torch.no_grad():
        model.lm_head.weight[TOKENS:] = 4 * model.lm_head.weight[: len(model.lm_head.weight) - TOKENS]
    return model


class Vocabulary:
    def __init__(self, *ids: int) -> None:
        self.ids = ids

    def get_vocab(self) -> dict[str, int]:
        return {str(token_id): token_id for token_id in self.ids}


@pytest.mark.parametrize(
    ("ids", "columns"), [((0, 1, 2), [0, 1, 2]), ((2, 0), [0, 2]), ((5, 0, 1), [0, 1, 5]), ((0, 9), [0]), ((), [])]
)
def test_what_stands_for_no_token_is_left_out(ids: tuple[int, ...], columns: list[int]) -> None:
    drawable, scores = Drawable.of(Vocabulary(*ids)), torch.zeros(2, 8)
    kept = drawable(scores)
    assert (kept[0] == 0).nonzero().flatten().tolist() == columns
    assert (scores == 0).all(), "the log-probability is computed from all rows"
    drawable.leave(scores)
    assert (scores[1] == 0).nonzero().flatten().tolist() == columns


def test_a_vocabulary_without_padding_costs_nothing() -> None:
    scores = torch.randn(2, TOKENS)
    assert Drawable.of(nano_tokenizer())(scores).data_ptr() == scores.data_ptr()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=2.0),
        SamplingParams(top_k=1),
        SamplingParams(top_p=0.2),
        SamplingParams(min_p=0.5),
        SamplingParams(repetition_penalty=1.5),
    ],
)
@pytest.mark.parametrize("ids", [range(3), (0, 2)])
def test_no_setting_draws_them(sampling: SamplingParams, ids: Any) -> None:
    logits = torch.tensor([[0.0, 5.0 if 1 not in ids else 1.0, 2.0, 9.0, 8.0]])
    settings = RowSettings.of([sampling], "cpu")
    drawable = Drawable.of(Vocabulary(*ids))
    scores = logits / (sampling.temperature or 1.0)
    for number in (0.0, 0.3, 0.7, 0.999):
        token, logprob = choose(logits, settings, torch.tensor([number], dtype=torch.float64), drawable)
        assert int(token) in ids
        torch.testing.assert_close(logprob, scores.log_softmax(-1)[:, int(token)])


@pytest.mark.parametrize("deterministic", [False, True])
async def test_the_torch_engine_draws_tokens_alone_and_agrees_with_the_learner(deterministic: bool) -> None:
    torch.manual_seed(0)
    model = nano_model(vocab_size=TOKENS + 20)
    favoured(model)
    engine = TorchEngine(model, nano_tokenizer(), max_num_seqs=16, deterministic=deterministic)
    requests = [request(prompt, count=4, temperature=t) for prompt in prompts(3, 20) for t in (0.0, 1.0)]
    groups = await asyncio.gather(*map(engine.generate, requests))
    await engine.close()
    phantom_mass = []
    for generation_request, group in zip(requests, groups, strict=True):
        for completion in group:
            assert max(completion.token_ids) < TOKENS
            learner = full_forward_logprobs(
                model, generation_request.prompt_ids, completion, generation_request.sampling.temperature or 1.0
            )
            torch.testing.assert_close(torch.tensor(completion.logprobs), learner, atol=1e-4, rtol=0)
            ids = torch.tensor([[*generation_request.prompt_ids, *completion.token_ids]])
            phantom_mass.append(model(ids).logits.softmax(-1)[..., TOKENS:].sum(-1).mean().item())
    assert max(phantom_mass) > 0.3, "they would have been drawn"


class Sampler:
    """Takes the likeliest, as vLLM's does for greedy rows."""

    def sample(self, logits: Any, metadata: Any, logprobs_mode_override: Any = None) -> tuple[Any, Any]:
        return logits.argmax(-1), logits.fill_(0.0)


def test_a_sampler_of_vllm_leaves_them_out_after_the_log_probabilities_are_known() -> None:
    sampler: Any = Sampler()
    report_tempered_logprobs(sampler, Drawable.of(Vocabulary(0, 2)))
    logits = torch.tensor([[1.0, 5.0, 2.0, 7.0]])
    for max_num_logprobs in (0, None):
        metadata = SimpleNamespace(max_num_logprobs=max_num_logprobs, temperature=None)
        tokens, scores = sampler.sample(logits.clone(), metadata)
        assert tokens.tolist() == [2]
        if max_num_logprobs is not None:
            torch.testing.assert_close(scores, logits.log_softmax(-1))


def test_a_worker_reads_the_tokenizer_of_its_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nano_tokenizer().save_pretrained(tmp_path)
    assert drawable_of(str(tmp_path), revision=None, trusted=False) == Drawable(TOKENS)
    assert drawable_of(str(tmp_path / "gone"), revision=None, trusted=False) is None
    assert "rows of the vocabulary without a token may be drawn" in caplog.text
