from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from skyrl.errors import NonFiniteError, RunError, UserError
from skyrl.inference.engine import Completion
from skyrl.inference.torch.engine import TorchEngine
from tests.inference.nano import EOS, nano_model, nano_tokenizer, prompts, request

TOKENIZER = nano_tokenizer()


def engine_for(model: Any = None, **options: Any) -> TorchEngine:
    return TorchEngine(model or nano_model(), TOKENIZER, **{"max_num_seqs": 16, **options})


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text)["input_ids"])


def reciting(text: str, *, prompt_length: int) -> Any:
    """A model whose next token is always that of `text` at this position, and the end-of-sequence token after it."""
    model, script = nano_model("qwen2, eager"), [*ids(text), EOS]  # transformers computes it, and calls the hook

    def recite(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        prefill = torch.full((len(output.logits), 1), prompt_length - 1)
        positions = kwargs.get("position_ids", prefill)[:, 0] + 1 - prompt_length
        output.logits.fill_(-50.0)
        output.logits[torch.arange(len(positions)), -1, torch.tensor(script)[positions]] = 50.0
        return output

    model.register_forward_hook(recite, with_kwargs=True)
    return model


async def say(text: str, *stop: str, **sampling: Any) -> Completion:
    engine = engine_for(reciting(text, prompt_length=3))
    (completion,) = await engine.generate(request((1, 2, 3), stop=stop or None, max_generate_length=50, **sampling))
    return completion


def always(scores: dict[int, float]) -> Any:
    """A model whose logits are these at every position, and -50 at the other tokens."""
    model = nano_model("qwen2, eager")

    def set_logits(module: Any, args: Any, output: Any) -> Any:
        output.logits.fill_(-50.0)
        for token, score in scores.items():
            output.logits[..., token] = score
        return output

    model.register_forward_hook(set_logits)
    return model


A, B = ids("ab")


@pytest.mark.parametrize("least", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("ends", ["end token", "stop text", "stop token"])
async def test_the_token_after_the_minimum_is_the_first_that_may_end(ends: str, least: int) -> None:
    """The model wants to end at once. Rows with another minimum are in the same batch."""
    final_token = {"end token": EOS, "stop text": B, "stop token": B}[ends]
    model = always({final_token: 9.0, A: 5.0})
    stops: dict[str, dict[str, Any]] = {"stop text": {"stop": ("b",)}, "stop token": {"stop_token_ids": (B,)}}
    engine = engine_for(model)
    answers = await asyncio.gather(
        *(
            engine.generate(request((1, 2, 3), name=str(n), min_new_tokens=n, temperature=0.0, **stops.get(ends, {})))
            for n in (0, least, 3)
        )
    )
    for (completion,), n in zip(answers, (0, least, 3), strict=True):
        before = B if ends == "stop text" else A  # letters may be drawn, but complete no stop text
        assert completion.token_ids == (before,) * n + (final_token,)
        assert completion.stop_reason == "stop"


def by_hand(prompt: tuple[int, ...], count: int, *, frequency: float, repetition: float) -> tuple[int, ...]:
    """The likeliest of A at 2 and B at 1: the repetition penalty counts prompt and answer, the frequency penalty the
    answer alone, once for each time.
    """
    drawn: list[int] = []
    for _ in range(count):
        scores = {}
        for token, score in {A: 2.0, B: 1.0}.items():
            repeated = score / repetition if token in (*prompt, *drawn) else score
            scores[token] = repeated - frequency * drawn.count(token)
        drawn.append(max(scores, key=lambda token: scores[token]))
    return tuple(drawn)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("prompt", [(A,) * 6, (B,) * 6, (A, B, A), (1, 2, 3)])
@pytest.mark.parametrize(
    ("frequency", "repetition"), [(0.3, 1.0), (0.7, 1.0), (-0.3, 1.0), (0.0, 2.5), (0.3, 2.5), (1.3, 1.5)]
)
async def test_penalties_count_what_they_are_defined_by(
    frequency: float, repetition: float, prompt: tuple[int, ...]
) -> None:
    settings: dict[str, Any] = {"frequency_penalty": frequency, "repetition_penalty": repetition, "temperature": 0.0}
    generation_request = request(prompt, max_generate_length=10, **settings)
    (completion,) = await engine_for(always({A: 2.0, B: 1.0})).generate(generation_request)
    assert completion.token_ids == by_hand(prompt, 10, frequency=frequency, repetition=repetition)


async def test_the_end_of_sequence_token_is_kept_with_its_logprob_and_left_out_of_the_text() -> None:
    completion = await say("done")
    assert completion.token_ids == (*ids("done"), EOS)
    assert completion.text == "done"
    assert completion.stop_reason == "stop"
    assert completion.logprobs == pytest.approx([0.0] * 5, abs=1e-4)
    assert completion.weight_versions == (0,) * 5


async def test_every_configured_end_of_sequence_id_ends_a_completion() -> None:
    model = reciting("a;b", prompt_length=3)
    model.generation_config.eos_token_id = [*ids(";"), 250]
    (completion,) = await engine_for(model).generate(request((1, 2, 3)))
    assert (completion.text, completion.stop_reason) == ("a;", "stop")


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("</a>",), "x<b>é</a>"),
        (("</z>", "<b>"), "x<b>"),
        (("é",), "x<b>é"),  # two tokens: it is complete with the second
        (("nowhere",), "x<b>é</a> and on"),
    ],
)
async def test_a_stop_string_ends_the_completion_and_its_text(stop: tuple[str, ...], expected: str) -> None:
    completion = await say("x<b>é</a> and on", *stop)
    assert completion.text == expected
    assert completion.token_ids == ids(expected) + ((EOS,) if "on" in expected else ())
    assert completion.stop_reason == "stop"


async def test_text_behind_the_stop_string_is_cut_but_its_token_kept() -> None:
    tokenizer = nano_tokenizer()
    tokenizer.add_tokens(["</a> and"])
    model = reciting("1", prompt_length=3)
    model.resize_token_embeddings(len(tokenizer))

    def recite(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        output.logits.fill_(-50.0)
        output.logits[..., len(tokenizer) - 1] = 50.0
        return output

    model.register_forward_hook(recite, with_kwargs=True)
    engine = TorchEngine(model, tokenizer, max_num_seqs=4)
    (completion,) = await engine.generate(request((1, 2, 3), stop=("</a>",)))
    assert (completion.text, completion.token_ids) == ("</a>", (len(tokenizer) - 1,))


async def test_a_special_token_can_be_a_stop_string() -> None:
    model = reciting("ab", prompt_length=3)
    model.generation_config.eos_token_id = None
    tokenizer = nano_tokenizer()
    tokenizer.eos_token = None
    engine = TorchEngine(model, tokenizer, max_num_seqs=4)
    (completion,) = await engine.generate(request((1, 2, 3), stop=("b<eos>",)))
    assert (completion.text, completion.token_ids, completion.stop_reason) == ("ab<eos>", (*ids("ab"), EOS), "stop")


async def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    engine = engine_for(reciting("b!", prompt_length=2))
    (completion,) = await engine.generate(request(ids("xa"), stop=("ab",)))
    assert completion.text == "b!"


async def test_generation_is_cut_where_the_model_ends() -> None:
    engine = engine_for(max_model_len=20)
    (completion,) = await engine.generate(request(prompts(15)[0], temperature=0.0))
    assert (len(completion.token_ids), completion.stop_reason) == (5, "length")
    (silent,) = await engine.generate(request(prompts(20)[0]))
    assert (silent.token_ids, silent.text, silent.stop_reason) == ((), "", "length")


async def test_requests_that_cannot_be_answered_are_refused_by_name() -> None:
    engine = engine_for(max_model_len=20)
    with pytest.raises(RunError, match="prompt 'of 21 tokens' has 21 tokens, more than max_model_len = 20"):
        await engine.generate(request(prompts(21)[0]))
    with pytest.raises(RunError, match="prompt 'nothing' is empty"):
        await engine.generate(request((), name="nothing"))
    with pytest.raises(UserError, match="no setting called beams, logit_bias"):
        await engine.generate(request((1,), additional_kwargs={"logit_bias": {}, "beams": 2}))


async def test_the_model_is_read_where_no_length_is_given() -> None:
    with pytest.raises(RunError, match="max_model_len = 256"):
        await engine_for().generate(request(prompts(257)[0]))


async def test_logits_that_are_not_finite_stop_the_batch_and_name_the_prompt() -> None:
    model = nano_model()
    engine = engine_for(model)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    answers = [engine.generate(request(p)) for p in prompts(3, 4)]
    first, second = await asyncio.gather(*answers, return_exceptions=True)
    assert isinstance(first, NonFiniteError) and isinstance(second, NonFiniteError)
    assert "prompt 'of 3 tokens', sample 0: the model's logits after 0 sampled tokens are not finite" in str(first)
    with torch.no_grad():
        model.model.norm.weight[0] = 1.0
    assert len(await engine.generate(request(prompts(3)[0]))) == 1
