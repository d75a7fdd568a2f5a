"""Adapters that come and go while an engine samples, in the torch engine and vLLM alike."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor
from transformers import AutoModelForCausalLM

from skyrl.config import InferenceEngineConfig, SkyRLLoraConfig
from skyrl.errors import RequestError, UserError, WeightSyncError
from skyrl.inference.adapters import shared, write_adapter
from skyrl.inference.engine import Completion, GenerationRequest, InferenceEngine, TopLogprobs
from skyrl.inference.torch.engine import TorchEngine
from skyrl.inference.vllm.engine import VLLMEngine
from skyrl.models.lora import adapter_alone, with_adapter
from skyrl.training_service.backend import SampleRequest
from skyrl.training_service.samplers import Samplers
from skyrl.weight_receiver.incoming_weights import Adapter, SharedWeights
from tests.inference.nano import EOS, VOCABULARY, full_forward_logprobs, nano_tokenizer, prompts, request
from tests.inference.steps import Steps, gate_of_model, gate_of_vllm
from tests.inference.vllm_host import Host
from tests.inference.vllm_models import changed, saved, small_model

pytestmark = pytest.mark.xdist_group("vllm")

LENGTH, RESIDENT = 96, 8
RANKS = (4, 8, 16, 32)

ENGINES: dict[str, tuple[InferenceEngine, Steps]] = {}
"""The engine of each kind and the gate in front of its steps: vLLM's in the other process, torch's in one test."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("published") / "model", small_model())


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Host() as started:
        yield started


both = pytest.mark.parametrize("kind", ["torch", pytest.param("vllm", marks=pytest.mark.long)])


def run(kind: str, host: Host, scenario: Any, *args: Any) -> None:
    """The torch engine in this process, vLLM in another."""
    if kind == "torch":
        asyncio.run(closing(scenario, kind, *args))
    else:
        host.run(scenario, kind, *args)


async def closing(scenario: Any, kind: str, folder: Path) -> None:
    ENGINES[kind] = engine, _ = made(folder)
    try:
        await scenario(kind, folder)
    finally:
        await engine.close()
        del ENGINES[kind]


def made(folder: Path, **options: Any) -> tuple[InferenceEngine, Steps]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"max_num_seqs": 32, "max_model_len": LENGTH, "max_adapters": RESIDENT} | options
    return TorchEngine(model, nano_tokenizer(), **options), gate_of_model(model)


def engine_of(kind: str, folder: Path) -> tuple[InferenceEngine, Steps]:
    if kind not in ENGINES:
        config = InferenceEngineConfig(backend="vllm", model_dtype="float32", async_engine=False, max_num_seqs=32)
        engine = VLLMEngine(
            config,
            model_path=str(folder),
            device="cpu",
            tokenizer=nano_tokenizer(),
            max_model_len=LENGTH,
            max_adapters=RESIDENT,
            max_adapter_rank=max(RANKS),
        )
        ENGINES[kind] = engine, gate_of_vllm()
    return ENGINES[kind]


def learner(seed: int) -> tuple[Any, Adapter]:
    """A model with an adapter, and the adapter alone; its rank depends on the seed."""
    rank = RANKS[seed % len(RANKS)]
    model = with_adapter(small_model(), SkyRLLoraConfig(rank=rank, alpha=8), seed=seed, field="lora")
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                weight.add_(0.1 * torch.randn(weight.shape, generator=noise))
    return model.eval(), shared(tuple(adapter_alone(iter(model.state_dict().items()))), rank=rank, alpha=8.0)


ASKED = [request(prompt, count=2, max_generate_length=12) for prompt in prompts(5, 9)]


def by(name: str | None, request: GenerationRequest = ASKED[0]) -> GenerationRequest:
    return evolve(request, adapter=name)


def far(model: Any, request: GenerationRequest, drawn: tuple[Completion, ...]) -> float:
    """Largest difference from the log-probabilities of a forward pass of the model, in nats."""
    return max(
        (torch.tensor(completion.logprobs) - full_forward_logprobs(model, request.prompt_ids, completion, 1.0))
        .abs()
        .max()
        .item()
        for completion in drawn
    )


async def eight_in_one_batch(kind: str, folder: Path) -> None:
    engine, steps = engine_of(kind, folder)
    learners = {f"of {seed}": learner(seed) for seed in range(8)}
    for name, (_, adapter) in learners.items():
        await engine.add_adapter(name, adapter)
    unbatched = [await engine.generate(by(name)) for name in (*learners, None)]
    before = steps.taken
    together = await asyncio.gather(*(engine.generate(by(name)) for name in (*learners, None)))
    models = [*(model for model, _ in learners.values()), small_model()]
    for model, one, other in zip(models, unbatched, together, strict=True):
        assert [completion.token_ids for completion in one] == [completion.token_ids for completion in other]
        assert far(model, ASKED[0], other) < 1e-4
    assert steps.taken - before < 30, "the adapters share steps"
    assert len({completions[0].token_ids for completions in together}) > 6
    for name in learners:
        await engine.remove_adapter(name)


@pytest.mark.long
@both
def test_adapters_of_different_ranks_share_a_batch_as_if_each_were_alone(kind: str, host: Host, folder: Path) -> None:
    run(kind, host, eight_in_one_batch, folder)


async def publish_while_sampling(kind: str, folder: Path) -> None:
    engine, steps = engine_of(kind, folder)
    (one, its), (two, others) = learner(1), learner(2)
    await engine.add_adapter("one", its)
    steps.hold(after=4)
    running = asyncio.create_task(engine.generate(by("one")))
    await steps.held()
    publishing = asyncio.create_task(engine.add_adapter("two", others))
    later = asyncio.create_task(engine.generate(by(None)))
    steps.release()
    await publishing
    assert far(two, ASKED[0], await engine.generate(by("two"))) < 1e-4
    assert far(one, ASKED[0], await running) < 1e-4
    assert far(small_model(), ASKED[0], await later) < 1e-4
    with pytest.raises(UserError, match="there is an adapter two already"):
        await engine.add_adapter("two", its)
    await asyncio.gather(engine.remove_adapter("one"), engine.remove_adapter("two"))


@both
def test_an_adapter_is_published_while_others_sample(kind: str, host: Host, folder: Path) -> None:
    run(kind, host, publish_while_sampling, folder)


async def unpublish_while_sampling(kind: str, folder: Path) -> None:
    engine, steps = engine_of(kind, folder)
    (one, its), (two, others) = learner(1), learner(2)
    await engine.add_adapter("name", its)
    steps.hold(after=4)
    running = asyncio.create_task(engine.generate(by("name")))
    await steps.held()
    leaving = asyncio.create_task(engine.remove_adapter("name"))
    steps.hold(after=1)
    await steps.held()
    assert not leaving.done()
    steps.release()
    assert far(one, ASKED[0], await running) < 1e-4
    await leaving
    with pytest.raises(UserError, match="there is no adapter name; loaded: none"):
        await engine.generate(by("name"))
    with pytest.raises(UserError, match="there is no adapter name"):
        await engine.remove_adapter("name")
    await engine.add_adapter("name", others)  # a name may be used again, and nothing of the first adapter is left
    assert far(two, ASKED[0], await engine.generate(by("name"))) < 1e-4
    await engine.remove_adapter("name")


@both
def test_an_adapter_is_forgotten_when_its_samples_are_drawn(kind: str, host: Host, folder: Path) -> None:
    run(kind, host, unpublish_while_sampling, folder)


async def more_than_resident(kind: str, folder: Path) -> None:
    engine, _ = engine_of(kind, folder)
    learners = {f"of {seed}": learner(seed) for seed in range(RESIDENT + 3)}
    for name, (_, adapter) in learners.items():
        await engine.add_adapter(name, adapter)
    first = {name: await engine.generate(by(name)) for name in learners}
    second = {name: await engine.generate(by(name)) for name in learners}  # each had left to make room
    assert first == second
    together = await asyncio.gather(*(engine.generate(by(name)) for name in (*learners, None)))
    assert [far(model, ASKED[0], drawn) < 1e-4 for (model, _), drawn in zip(learners.values(), together, strict=False)]
    assert far(small_model(), ASKED[0], together[-1]) < 1e-4
    await asyncio.gather(*map(engine.remove_adapter, learners))


@pytest.mark.long
@both
def test_an_adapter_that_left_the_memory_comes_back_with_the_same_bits(kind: str, host: Host, folder: Path) -> None:
    run(kind, host, more_than_resident, folder)


async def refusals(kind: str, folder: Path) -> None:
    engine, _ = engine_of(kind, folder)
    _, adapter = learner(1)
    with adapter.open() as tensors:
        half = shared(tuple(tensors)[1:], rank=adapter.rank, alpha=8.0)
    with pytest.raises(WeightSyncError, match="the other half of .* is missing"):
        await engine.add_adapter("half", half)
    await engine.add_adapter("one", adapter)
    await engine.pause()
    with pytest.raises(WeightSyncError, match=r"an engine with adapters \(one\) takes no new weights"):
        await engine.load_weights(SharedWeights(changed(small_model(), 1)), 1)
    await engine.resume()
    await engine.remove_adapter("one")


@both
def test_what_does_not_fit_is_refused(kind: str, host: Host, folder: Path) -> None:
    run(kind, host, refusals, folder)


async def cancelled_requests(kind: str, folder: Path) -> None:
    engine, steps = engine_of(kind, folder)
    learners = {f"of {seed}": learner(seed) for seed in range(RESIDENT + 2)}
    for name, (_, adapter) in learners.items():
        await engine.add_adapter(name, adapter)
    steps.hold(after=3)
    running = [asyncio.create_task(engine.generate(by(name))) for name in learners]
    await steps.held()
    for task in running[::2]:
        task.cancel()
    steps.release()
    for task in running:
        with suppress(asyncio.CancelledError):
            await task
    drawn = await asyncio.gather(*(engine.generate(by(name)) for name in learners))
    assert (
        max(far(model, ASKED[0], completions) for (model, _), completions in zip(learners.values(), drawn, strict=True))
        < 1e-4
    )
    await asyncio.gather(*map(engine.remove_adapter, learners))


@pytest.mark.long
@both
def test_cancelled_requests_leave_their_places_to_others(kind: str, host: Host, folder: Path) -> None:
    run(kind, host, cancelled_requests, folder)


def likeliest(model: Any, ids: tuple[int, ...], top: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """After each token but the last: transformers' likeliest tokens and their log-probabilities."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
    topk = (logits / temperature).log_softmax(-1).topk(top)
    return topk.indices, topk.values


def agree(top_logprobs: TopLogprobs | None, tokens: Tensor, logprobs: Tensor) -> None:
    assert top_logprobs is not None
    assert top_logprobs.token_ids.tolist() == tokens.tolist()
    torch.testing.assert_close(torch.from_numpy(top_logprobs.logprobs.copy()), logprobs, atol=2e-5, rtol=1e-5)


async def likeliest_tokens(kind: str, folder: Path) -> None:
    engine, _ = engine_of(kind, folder)
    model, adapter = learner(3)
    await engine.add_adapter("one", adapter)
    requests = [
        evolve(
            request(prompt, count=2, temperature=0.7, top_k=3),
            adapter=name,
            scores_prompt=True,
            prompt_top_logprobs=4,
            top_logprobs=top,
        )
        for prompt, name, top in zip(prompts(1, 7, 30, 8), ("one", None, "one", None), (5, 2, 1, 0), strict=True)
    ]
    for generation_request, completions in zip(
        requests, await asyncio.gather(*map(engine.generate, requests)), strict=True
    ):
        scored = model if generation_request.adapter else small_model()
        for completion in completions:
            assert completion.prompt_scores is not None
            agree(completion.prompt_scores.top, *likeliest(scored, generation_request.prompt_ids, 4))
            assert far_at(scored, generation_request, completion, 0.7) < 1e-4
            if generation_request.top_logprobs:
                expected = likeliest(
                    scored, generation_request.prompt_ids + completion.token_ids, generation_request.top_logprobs, 0.7
                )
                agree(completion.top_logprobs, *(part[len(generation_request.prompt_ids) - 1 :] for part in expected))
            else:
                assert completion.top_logprobs is None
    await engine.remove_adapter("one")


def far_at(model: Any, request: GenerationRequest, drawn: Completion, temperature: float) -> float:
    expected = full_forward_logprobs(model, request.prompt_ids, drawn, temperature)
    return (torch.tensor(drawn.logprobs) - expected).abs().max().item()


@both
def test_the_likeliest_tokens_are_those_of_transformers(kind: str, host: Host, folder: Path) -> None:
    run(kind, host, likeliest_tokens, folder)


async def samples(kind: str, folder: Path) -> None:
    engine, _ = engine_of(kind, folder)
    samplers = Samplers(engine, max_model_len=LENGTH, vocabulary=VOCABULARY, snapshots=folder.parent)
    _, adapter = learner(1)
    await samplers.publish("one", adapter)
    stored = folder.parent / f"stored for {kind}"
    write_adapter(adapter, stored)
    await samplers.publish_stored("the same", stored)
    prompt = prompts(6)[0]
    sample_request = SampleRequest(sampler="one", prompt=prompt, n=2, max_tokens=10, seed=5)
    (one,), (other,), (third,) = [
        await asyncio.gather(samplers.sample(variant))
        for variant in (sample_request, evolve(sample_request, sampler="the same"), evolve(sample_request, seed=6))
    ]
    drawn = [[(sequence.tokens, sequence.logprobs) for sequence in result.sequences] for result in (one, other, third)]
    assert drawn[0] == drawn[1] != drawn[2]
    crowd = [evolve(sample_request, sampler=name, seed=seed) for seed in range(6) for name in ("one", "the same", None)]
    among = await asyncio.gather(samplers.sample(sample_request), *map(samplers.sample, crowd))
    assert [sequence.tokens for sequence in among[0].sequences] == [sequence.tokens for sequence in one.sequences]

    scored = await samplers.sample(
        evolve(sample_request, prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=3)
    )
    assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == len(prompt)
    assert scored.prompt_logprobs[0] != scored.prompt_logprobs[0]
    assert scored.prompt_top is not None and scored.prompt_top.token_ids.shape == (len(prompt) - 1, 2)
    first = scored.sequences[0]
    assert first.top is not None and first.top.token_ids.shape == (len(first.tokens), 3)
    assert (one.prompt_logprobs, one.prompt_top, one.sequences[0].top) == (None, None, None)

    sequence = (await samplers.sample(evolve(sample_request, n=1, max_tokens=None, stop_tokens=()))).sequences[0]
    assert len(sequence.tokens) == LENGTH - len(prompt) and not sequence.ended  # not even an end token ends it
    end = sequence.tokens[7]
    until = sequence.tokens[: sequence.tokens.index(end) + 1]
    stopped = (await samplers.sample(evolve(sample_request, n=1, max_tokens=None, stop_tokens=(end,)))).sequences[0]
    assert (stopped.tokens, stopped.ended) == (until, True)
    text = nano_tokenizer().decode(sequence.tokens[3:5])
    if "\N{REPLACEMENT CHARACTER}" not in text:
        at_text = (await samplers.sample(evolve(sample_request, n=1, stop=(text,), stop_tokens=()))).sequences[0]
        assert at_text.ended and text in nano_tokenizer().decode(at_text.tokens)
    await asyncio.gather(samplers.unpublish("one"), samplers.unpublish("the same"), samplers.unpublish("nobody"))
    with pytest.raises(RequestError, match="there is no sampler one: it was never published, or was deleted"):
        await samplers.sample(sample_request)


@both
def test_samplers_answer_requests_of_the_service(kind: str, host: Host, folder: Path) -> None:
    run(kind, host, samples, folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ()}, "the prompt is empty"),
        ({"prompt": (1,) * LENGTH}, "the prompt has 96 tokens, and the model holds 96"),
        ({"prompt": (VOCABULARY,)}, f"tokens of a prompt are between 0 and {VOCABULARY - 1}"),
        ({"n": 0}, "0 samples are requested"),
        ({"max_tokens": 0}, "max_tokens: 0 is not positive"),
        ({"temperature": -1.0}, "temperature: -1.0 is not zero or positive"),
        ({"top_p": 0.0}, "top_p: 0.0 is not above 0"),
        ({"top_k": -2}, "top_k: -2 is not between"),
        ({"stop": ("",)}, "stop: .* without empty text"),
        ({"stop_tokens": (-1,)}, "tokens of a stop are between"),
        ({"topk_prompt_logprobs": 21}, "topk_prompt_logprobs is between 0 and 20"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs is between 0 and 20"),
        ({"sampler": "other"}, "there is no sampler other"),
    ],
)
async def test_a_request_that_cannot_be_answered_is_refused_in_one_sentence(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    engine = TorchEngine(small_model(), nano_tokenizer(), max_num_seqs=8)
    samplers = Samplers(engine, max_model_len=LENGTH, vocabulary=VOCABULARY, snapshots=tmp_path)
    with pytest.raises(RequestError, match=message):
        await samplers.sample(evolve(SampleRequest(sampler=None, prompt=(1, 2)), **change))
    await engine.close()


async def test_all_weights_of_a_model_replace_those_before(folder: Path) -> None:
    engine, _ = made(folder)
    samplers = Samplers(engine, max_model_len=LENGTH, vocabulary=VOCABULARY, snapshots=folder.parent)
    models = {name: small_model(seed=seed) for seed, name in enumerate(("one", "two"), 1)}

    async def transfer(model: Any) -> None:
        await engine.pause()
        await engine.load_weights(SharedWeights(changed(model, 1)), engine.weight_version + 1)
        await engine.resume()

    for name, model in models.items():
        await samplers.publish_weights(name, partial(transfer, model))
        result = await samplers.sample(SampleRequest(sampler=name, prompt=(1, 2, 3), max_tokens=4, stop_tokens=()))
        drawn = result.sequences[0]
        with torch.no_grad():
            logits = model(torch.tensor([(1, 2, 3, *drawn.tokens)]), use_cache=False).logits[0, 2:-1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(drawn.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(drawn.logprobs), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(RequestError, match="sampler one was replaced by two: engines hold one version"):
        await samplers.sample(SampleRequest(sampler="one", prompt=(1,)))
    with pytest.raises(RequestError, match="the base model is not held any more"):
        await samplers.sample(SampleRequest(sampler=None, prompt=(1,)))
    with pytest.raises(RequestError, match="an adapter fits only the base"):
        await samplers.publish("adapter", learner(1)[1])
    await engine.close()


async def test_an_engine_that_starts_later_gets_the_adapters_that_are_stored(folder: Path, tmp_path: Path) -> None:
    engine, _ = made(folder)
    late, _ = made(folder)
    samplers = Samplers(engine, max_model_len=LENGTH, vocabulary=VOCABULARY, snapshots=tmp_path)
    adapter = learner(1)[1]
    write_adapter(adapter, tmp_path / "one")
    await samplers.publish("one", adapter)
    await samplers.publish("not stored any more", adapter)
    async with samplers.admitting(late):
        publishing = asyncio.ensure_future(samplers.publish("two", adapter))
        await asyncio.sleep(0)
        assert not publishing.done()  # until the late engine is among those that get it
    await publishing
    completions, late_completions = [await sampler.generate(by("one")) for sampler in (engine, late)]
    assert [completion.token_ids for completion in completions] == [
        completion.token_ids for completion in late_completions
    ]
    with pytest.raises(UserError, match="there is no adapter two; loaded: one$"):
        await late.generate(by("two"))
    await asyncio.gather(engine.close(), late.close())


async def test_an_engine_whose_policy_is_an_adapter_takes_no_others(folder: Path) -> None:
    engine, _ = made(folder)
    await engine.pause()
    await engine.load_weights(learner(1)[1], 1)
    await engine.resume()
    with pytest.raises(UserError, match="adapter one fits only the base, and this engine's policy is an adapter"):
        await engine.add_adapter("one", learner(2)[1])
    await engine.close()


async def test_a_deterministic_engine_draws_the_same_bits_beside_others(folder: Path) -> None:
    engine, _ = made(folder, deterministic=True)
    learners = {f"of {seed}": learner(seed) for seed in range(3)}
    for name, (_, adapter) in learners.items():
        await engine.add_adapter(name, adapter)
    unbatched = [await engine.generate(by(name)) for name in learners]
    assert unbatched == list(await asyncio.gather(*(engine.generate(by(name)) for name in learners)))
    await engine.close()


async def test_a_request_without_ends_goes_past_the_models_own(folder: Path) -> None:
    engine, _ = made(folder)
    generation_request = request(prompts(4)[0], count=16, max_generate_length=60, temperature=2.0)
    ended = [completion for completion in await engine.generate(generation_request) if completion.stop_reason == "stop"]
    assert ended and all(completion.token_ids[-1] == EOS for completion in ended)
    endless = await engine.generate(evolve(generation_request, end_ids=()))
    assert {len(completion.token_ids) for completion in endless} == {60}
    assert any(EOS in completion.token_ids for completion in endless)
    await engine.close()
