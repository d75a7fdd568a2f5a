"""What every engine promises, asked of the torch engine, of vLLM and of servers alike; and that they agree on tokens.

Each scenario runs in a process of its own, see `vllm_host.py`, which keeps one engine of each kind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import attrs
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from skyrl.config import InferenceEngineConfig, SamplingParams
from skyrl.errors import RunError, UserError, WeightSyncError
from skyrl.inference.engine import Completion, EngineLoad, GenerationRequest, InferenceEngine, InFlight, NewTokens
from skyrl.inference.torch.engine import TorchEngine
from skyrl.inference.vllm.engine import VLLMEngine
from skyrl.weight_receiver.incoming_weights import FolderWeights, SharedWeights, weight_info
from skyrl.weight_sync.senders import FolderSender
from tests.inference.nano import EOS, full_forward_logprobs, keys, nano_tokenizer, prompts, request
from tests.inference.server_engines import SERVERS, arrived, engine_over, hung_up, waiting_at
from tests.inference.steps import Steps, gate_of_model, gate_of_vllm
from tests.inference.vllm_host import Host
from tests.inference.vllm_models import changed, saved, small_model
from tests.long_cases import long_except

pytestmark = pytest.mark.xdist_group("vllm")

T = TypeVar("T")

SECOND_EOS = 101
"""Another end of a sequence, from the generation config."""


@attrs.frozen
class Held:
    """An engine that stands in front of a step, and what it was asked."""

    engine: InferenceEngine
    steps: Steps
    running: list[asyncio.Task[tuple[Completion, ...]]]


ENGINES: dict[str, tuple[InferenceEngine, Steps]] = {}
"""One engine of each kind, with the gate in front of its steps; filled in the other process only."""

DRAWN: dict[str, list[tuple[Completion, ...]]] = {}
"""Requests, and what the torch engine answered; filled there, too."""


def make(kind: str, folder: Path, **options: Any) -> tuple[InferenceEngine, Steps]:
    if kind == "torch":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return TorchEngine(model, nano_tokenizer(), max_num_seqs=16, **options), gate_of_model(model)
    if kind in SERVERS:
        return engine_over(kind, folder, **options)
    config = InferenceEngineConfig(backend="vllm", model_dtype="float32", async_engine=False, max_num_seqs=16)
    engine = VLLMEngine(config, model_path=str(folder), device="cpu", tokenizer=nano_tokenizer(), **options)
    return engine, gate_of_vllm()


def engine_of(kind: str, folder: Path) -> InferenceEngine:
    if kind not in ENGINES:
        ENGINES[kind] = make(kind, folder, max_model_len=96)
    return ENGINES[kind][0]


@asynccontextmanager
async def held(kind: str, folder: Path, *requests: GenerationRequest, after: int) -> AsyncIterator[Held]:
    """The engine held in front of a step, `after` steps into these requests. However the block ends, the engine runs
    freely and takes work when it is left, and nothing of the block is still running.
    """
    engine = engine_of(kind, folder)
    steps = ENGINES[kind][1]
    steps.hold(after=0 if kind in SERVERS else after)
    running = [asyncio.create_task(engine.generate(request)) for request in requests]
    try:
        if kind in SERVERS:  # samples are requests of their own there, and none may be late
            await waiting_at(kind, sum(len(request.keys) for request in requests))
            steps.hold(after=after)
        await steps.held()
        yield Held(engine, steps, running)
    finally:
        steps.release()
        await engine.resume()
        await asyncio.gather(*running, return_exceptions=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = small_model()
    model.generation_config.eos_token_id = [EOS, SECOND_EOS]
    return saved(tmp_path_factory.mktemp("contract") / "model", model)


OTHERS = long_except(["vllm", "sglang server", "our server", "vllm server"], "vllm", "sglang server")
"""Kinds of engine beside the torch engine, which they are compared with."""

every = pytest.mark.parametrize("kind", ["torch", *OTHERS])
other = pytest.mark.parametrize("kind", OTHERS)


async def draw(kind: str, folder: Path, *requests: GenerationRequest) -> list[tuple[Completion, ...]]:
    return list(await asyncio.gather(*map(engine_of(kind, folder).generate, requests)))


def agree(one: list[tuple[Completion, ...]], other: list[tuple[Completion, ...]]) -> None:
    """The same but for the rounding of log-probabilities."""
    for completion, other_completion in zip(sum(one, ()), sum(other, ()), strict=True):
        assert attrs.evolve(completion, logprobs=()) == attrs.evolve(other_completion, logprobs=())
        assert completion.logprobs == pytest.approx(other_completion.logprobs, abs=1e-4)


async def draw_by_torch(folder: Path, *requests: GenerationRequest) -> list[tuple[Completion, ...]]:
    """What the torch engine draws, which is asked once for all kinds that are compared with it."""
    key = repr(requests)
    if key not in DRAWN:
        DRAWN[key] = await draw("torch", folder, *requests)
    return DRAWN[key]


GREEDY = [request(prompt, temperature=0.0, max_generate_length=80) for prompt in prompts(*range(3, 27, 2))]


@other
def test_engines_draw_the_same_greedy_completions(host: Host, folder: Path, kind: str) -> None:
    expected, actual = host.run(draw_by_torch, folder, *GREEDY), host.run(draw, kind, folder, *GREEDY)
    agree(expected, actual)
    completions = sum(expected, ())
    assert {completion.stop_reason for completion in completions} == {"stop", "length"}
    ends = {completion.token_ids[-1] for completion in completions if completion.stop_reason == "stop"}
    assert SECOND_EOS in ends  # and such a token stays in the ids


@other
def test_engines_stop_at_the_same_stop_strings(host: Host, folder: Path, kind: str) -> None:
    requests = []
    for generation_request, completions in zip(GREEDY, host.run(draw_by_torch, folder, *GREEDY), strict=True):
        pairs = [completions[0].text[at : at + 2] for at in range(2, len(completions[0].text) - 2)]
        stops = tuple(pair for pair in pairs if pair.isascii() and pair.isprintable())[:1]
        sampling = SamplingParams(temperature=0.0, max_generate_length=80, stop=(*stops, "nowhere"))
        requests.append(attrs.evolve(generation_request, sampling=sampling))
    expected, actual = host.run(draw_by_torch, folder, *requests), host.run(draw, kind, folder, *requests)
    agree(expected, actual)
    stopped = [
        c.text
        for c, request in zip(sum(expected, ()), requests, strict=True)
        if c.text.endswith(request.sampling.stop or ())
    ]
    assert len(stopped) >= 6


@other
def test_engines_apply_a_repetition_penalty_alike(host: Host, folder: Path, kind: str) -> None:
    requests = [request(p, temperature=0.0, repetition_penalty=1.7) for p in prompts(4, 9)]
    agree(host.run(draw_by_torch, folder, *requests), host.run(draw, kind, folder, *requests))


@other
def test_engines_apply_a_frequency_penalty_alike(host: Host, folder: Path, kind: str) -> None:
    plain = [request(p, greedy=True, max_generate_length=40) for p in prompts(4, 9)]
    requests = [request(p, greedy=True, max_generate_length=40, frequency_penalty=1.2) for p in prompts(4, 9)]
    expected = host.run(draw_by_torch, folder, *requests)
    agree(expected, host.run(draw, kind, folder, *requests))
    repeated = [max(map(c.token_ids.count, c.token_ids)) for c in sum(host.run(draw_by_torch, folder, *plain), ())]
    assert max(max(map(c.token_ids.count, c.token_ids)) for c in sum(expected, ())) < max(repeated)


@other
def test_engines_stop_at_the_same_tokens(host: Host, folder: Path, kind: str) -> None:
    longest = sum(host.run(draw_by_torch, folder, *GREEDY), ())
    ends = tuple(c.token_ids[min(5, len(c.token_ids) - 1)] for c in longest[:4])
    requests = [
        request(
            generation_request.prompt_ids,
            greedy=True,
            max_generate_length=80,
            stop_token_ids=ends if index % 2 else ends[:1],
        )
        for index, generation_request in enumerate(GREEDY)
    ]
    expected, actual = host.run(draw_by_torch, folder, *requests), host.run(draw, kind, folder, *requests)
    agree(expected, actual)
    stopped = [
        c
        for c, request in zip(sum(expected, ()), requests, strict=True)
        if c.token_ids[-1] in (request.sampling.stop_token_ids or ())
    ]
    assert len(stopped) >= 4
    assert all(completion.stop_reason == "stop" for completion in stopped)


@other
def test_no_completion_ends_before_its_least_length(host: Host, folder: Path, kind: str) -> None:
    free = sum(host.run(draw_by_torch, folder, *GREEDY), ())
    assert any(completion.stop_reason == "stop" and len(completion.token_ids) < 40 for completion in free)
    stop = next(letter for c in free for letter in c.text[2:30] if letter.isascii() and letter.isprintable())
    more: list[dict[str, Any]] = [{}, {"stop": (stop,)}, {"stop_token_ids": (free[0].token_ids[0],)}]
    requests = [
        request(
            generation_request.prompt_ids, greedy=True, max_generate_length=60, min_new_tokens=40, **more[index % 3]
        )
        for index, generation_request in enumerate(GREEDY)
    ]
    expected, actual = host.run(draw_by_torch, folder, *requests), host.run(draw, kind, folder, *requests)
    agree(expected, actual)
    assert all(len(completion.token_ids) >= 40 for completion in sum(expected, ()))
    assert len({len(completion.token_ids) for completion in sum(expected, ())}) > 1


@every
def test_prompt_and_completion_together_have_a_limit(host: Host, folder: Path, kind: str) -> None:
    short, full = prompts(15, 20)
    requests = [request(prompt, greedy=True, max_tokens=20, max_generate_length=60) for prompt in (short, full)]
    (five,), (none,) = host.run(draw, kind, folder, *requests)
    assert (len(five.token_ids), five.stop_reason) == (5, "length")
    assert (none.token_ids, none.stop_reason) == ((), "length")


@every
def test_greedy_is_temperature_zero(host: Host, folder: Path, kind: str) -> None:
    one, other = request(prompts(7)[0], greedy=True), request(prompts(7)[0], temperature=0.0)
    first, second = host.run(draw, kind, folder, one, other)
    agree([first], [second])
    assert first == second or kind in SERVERS  # whose requests do not arrive together, and so not in one batch


@every
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.02}, {"temperature": 1.3}, {"top_p": 0.5}]
)
def test_logprobs_are_those_of_the_tempered_softmax_before_any_cut(
    host: Host, folder: Path, kind: str, sampling: dict[str, Any]
) -> None:
    requests = [request(p, count=3, **sampling) for p in prompts(4, 11)]
    mixed = [*requests, request(prompts(6)[0], temperature=0.0)]  # one batch, so greedy rows beside tempered ones
    model = small_model()
    for generation_request, completions in zip(mixed, host.run(draw, kind, folder, *mixed), strict=True):
        for completion in completions:
            temperature = generation_request.sampling.temperature or 1.0
            expected = full_forward_logprobs(model, generation_request.prompt_ids, completion, temperature)
            assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@every
def test_a_sample_draws_the_same_whatever_runs_beside_it(host: Host, folder: Path, kind: str) -> None:
    generation_request = request(prompts(7)[0], count=3)
    unbatched = host.run(draw, kind, folder, generation_request)
    others = [request(p, count=2) for p in prompts(5, 9)]
    (among, *_) = host.run(draw, kind, folder, generation_request, *others)
    assert [c.token_ids for c in among] == [c.token_ids for c in unbatched[0]]
    assert len({c.token_ids for c in among}) == 3  # each sample has draws of its own


@every
def test_each_key_gets_its_completion_in_order(host: Host, folder: Path, kind: str) -> None:
    generation_request = request(prompts(7)[0], count=5)
    (forwards,) = host.run(draw, kind, folder, generation_request)
    turned = attrs.evolve(generation_request, keys=tuple(reversed(keys("of 7 tokens", 5))))
    (backwards,) = host.run(draw, kind, folder, turned)
    assert [c.token_ids for c in backwards] == [c.token_ids for c in reversed(forwards)]


@every
def test_the_model_ends_where_its_longest_sequence_ends(host: Host, folder: Path, kind: str) -> None:
    nearly, full = prompts(91, 96)
    requests = [request(nearly, temperature=0.0), request(full)]
    (five,), (none,) = host.run(draw, kind, folder, *requests)
    assert (len(five.token_ids), five.stop_reason) == (5, "length")
    assert (none.token_ids, none.text, none.stop_reason) == ((), "", "length")


@every
def test_what_cannot_be_answered_is_refused_by_name(host: Host, folder: Path, kind: str) -> None:
    with pytest.raises(RunError, match="prompt 'of 97 tokens' has 97 tokens, more than max_model_len = 96"):
        host.run(draw, kind, folder, request(prompts(97)[0]))
    with pytest.raises(RunError, match="prompt 'nothing' is empty"):
        host.run(draw, kind, folder, request((), name="nothing"))
    with pytest.raises(UserError, match="no setting called beams"):
        host.run(draw, kind, folder, request((1,), additional_kwargs={"beams": 2}))


async def work_around_a_pause(kind: str, folder: Path) -> list[Any]:
    """Tokens of a request that ran when the engine was paused, whether a later one has run before `resume`, and tokens
    of that one.
    """
    generation_request = request((1, 2), max_generate_length=60, min_new_tokens=60)
    async with held(kind, folder, generation_request, after=5) as scene:
        pausing = await begun(scene.engine.pause())
        waiting = await begun(scene.engine.generate(request((3, 4), min_new_tokens=12)))
        scene.steps.release()
        await pausing
        (finished,) = await scene.running[0]
        await scene.engine.pause()  # would wait for a later request that had been let in
        ran = waiting.done()
        await scene.engine.resume()
        (later,) = await waiting
    return [len(finished.token_ids), ran, len(later.token_ids)]


async def begun(call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """The call as a task that has reached the engine."""
    task = asyncio.create_task(call)
    await asyncio.sleep(0)
    return task


@every
def test_a_pause_lets_running_samples_finish_and_holds_later_ones(host: Host, folder: Path, kind: str) -> None:
    assert host.run(work_around_a_pause, kind, folder) == [60, False, 12]


async def load(kind: str, folder: Path, fault: str) -> tuple[str, list[tuple[Completion, ...]]]:
    """What loading new weights raises, and greedy completions after it."""
    engine, problem = engine_of(kind, folder), ""
    weights = dict(changed(small_model(), seed=5))
    if fault == "missing":
        del weights["model.norm.weight"]
    elif fault == "unknown":
        weights["model.extra.weight"] = torch.zeros(1)
    elif fault == "shape":
        weights["model.norm.weight"] = torch.zeros(7)
    if fault != "not paused":
        await engine.pause()
    try:
        await give(kind, engine, weights)
    except WeightSyncError as error:
        problem = str(error)
    finally:
        await engine.resume()
    return problem, await draw(kind, folder, *GREEDY[:3])


FAULTS = {
    "missing": "model.norm.weight is missing",
    "unknown": "model.extra.weight is not a weight of this model",
    "shape": "model.norm.weight has shape (7,), this model's has (64,)",
    "not paused": "before the engine was paused and idle",
}
ONE_OF_EACH = [("torch", "missing"), ("vllm", "shape"), ("vllm", "not paused"), ("sglang server", "unknown")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        pytest.param(kind, fault, marks=[pytest.mark.long] * ((kind, fault) not in ONE_OF_EACH))
        for kind in ("torch", "vllm", "sglang server", "our server", "vllm server")
        for fault in FAULTS
    ],
)
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_kept(
    host: Host, folder: Path, kind: str, fault: str
) -> None:
    before = host.run(draw, kind, folder, *GREEDY[:3])
    problem, after = host.run(load, kind, folder, fault)
    assert FAULTS[fault] in problem
    agree(after, before)


async def load_and_restore(kind: str, folder: Path) -> tuple[list[Any], list[Any], list[Any]]:
    """Completions under the stored weights, under changed ones, and under the stored ones again."""
    before = await draw(kind, folder, *GREEDY[:3])
    try:
        problem, new = await load(kind, folder, "none")
        assert not problem
    finally:
        await restore(kind, engine_of(kind, folder))
    return before, new, await draw(kind, folder, *GREEDY[:3])


async def give(kind: str, engine: InferenceEngine, weights: Mapping[str, Tensor]) -> None:
    """The engine's next version: in memory, or in files where it is a server."""
    version = engine.weight_version + 1
    if kind not in SERVERS:
        await engine.load_weights(SharedWeights(tuple(weights.items())), version)
        return
    with TemporaryDirectory() as folder:
        FolderSender(path=folder, dtype="float32")(iter(weights.items()))
        infos = tuple(weight_info(name, tensor) for name, tensor in weights.items())
        await engine.load_weights(FolderWeights(path=folder, weights=infos), version)


async def restore(kind: str, engine: InferenceEngine) -> None:
    """Loads the stored weights again."""
    await engine.pause()
    try:
        await give(kind, engine, small_model().state_dict())
    finally:
        await engine.resume()


@pytest.mark.sampled(3)
@every
def test_after_new_weights_nothing_computed_with_the_old_ones_is_left(host: Host, folder: Path, kind: str) -> None:
    before, new, restored = host.run(load_and_restore, kind, folder)
    model = small_model()
    changed(model, seed=5)
    for generation_request, (completion,) in zip(GREEDY[:3], new, strict=True):
        expected = full_forward_logprobs(model, generation_request.prompt_ids, completion, 1.0)
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    versions = [{*c.weight_versions} for group in (before, new, restored) for (c,) in group]
    (first,), (second,), (third,) = versions[0], versions[3], versions[6]
    assert (second, third) == (first + 1, first + 2)
    agree(restored, [tuple(attrs.evolve(c, weight_versions=(third,) * len(c.token_ids)) for c in g) for g in before])


async def give_up(kind: str, folder: Path) -> tuple[bool, int]:
    """Whether a request of 90 steps was cancelled after 10, and the steps that the engine took for it in all."""
    generation_request = request((1,), count=4, max_generate_length=90, min_new_tokens=90)
    async with held(kind, folder, generation_request, after=10) as scene:
        before = scene.steps.taken - 10
        scene.running[0].cancel()
        await asyncio.gather(*scene.running, return_exceptions=True)
        await hung_up(kind)
        pausing = await begun(scene.engine.pause())
        scene.steps.release()
        await pausing
        return scene.running[0].cancelled(), scene.steps.taken - before


@every
def test_a_request_that_nobody_waits_for_is_given_up(host: Host, folder: Path, kind: str) -> None:
    cancelled, steps = host.run(give_up, kind, folder)
    assert cancelled
    assert 10 < steps < 30  # the step that was begun, and those of the turns that an event loop takes to pass it on


async def heard_while_held(kind: str, folder: Path) -> tuple[list[NewTokens], list[NewTokens], tuple[Completion, ...]]:
    """Tokens that were reported while the engine stood in front of a step, all that were reported, and the answer."""
    heard: list[NewTokens] = []
    generation_request = request((1, 2), count=2, max_generate_length=60, min_new_tokens=60)
    async with held(kind, folder, attrs.evolve(generation_request, on_tokens=heard.append), after=12) as scene:
        async with asyncio.timeout(120):
            while {new.index for new in heard} != {0, 1}:
                await asyncio.sleep(0.01)
        early = list(heard)
        scene.steps.release()
        return early, heard, await scene.running[0]


@every
def test_tokens_are_reported_while_the_engine_draws_the_next(host: Host, folder: Path, kind: str) -> None:
    early, heard, completions = host.run(heard_while_held, kind, folder)
    assert 2 <= sum(len(new.token_ids) for new in early) <= 2 * 12
    for index, completion in enumerate(completions):
        reported: tuple[int, ...] = ()
        for new in heard:
            if new.index == index:
                assert new.start == len(reported)
                reported += new.token_ids
        assert reported == completion.token_ids
        assert len(reported) == 60


LONG = [request(prompt, temperature=1.0, max_generate_length=70, count=2) for prompt in prompts(4, 9, 20, seed=13)]
"""The draws of these keys end none of them in the 30 steps or so that the interruptions below take."""


async def interrupt(kind: str, folder: Path, in_flight: InFlight, seed: int | None) -> list[tuple[Completion, ...]]:
    """Completions of `LONG`, interrupted twice; new weights come in between unless `seed` is None. The stored weights
    are there again afterwards.
    """
    try:
        async with held(kind, folder, *LONG, after=12) as scene:
            for _ in range(2):
                await scene.steps.held()
                pausing = await begun(scene.engine.pause(in_flight))
                await arrived(kind)
                scene.steps.release()
                await pausing
                assert not any(task.done() for task in scene.running)
                if seed is not None:
                    await give(kind, scene.engine, dict(changed(small_model(), seed)))
                scene.steps.hold(after=12)
                await scene.engine.resume()
            scene.steps.release()
            return list(await asyncio.gather(*scene.running))
    finally:
        await restore(kind, engine_of(kind, folder))


@pytest.mark.sampled(5)
@every
@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_samples_that_stand_still_for_a_moment_are_what_they_would_have_been(
    host: Host, folder: Path, kind: str, in_flight: InFlight
) -> None:
    expected = host.run(draw, kind, folder, *LONG)
    agree(
        [_unversioned(completions) for completions in host.run(interrupt, kind, folder, in_flight, None)],
        list(map(_unversioned, expected)),
    )


def _unversioned(completions: tuple[Completion, ...]) -> tuple[Completion, ...]:
    return tuple(attrs.evolve(completion, weight_versions=()) for completion in completions)


def _by_version(
    model: Any, request: GenerationRequest, completion: Completion, version: int
) -> tuple[list[float], list[float]]:
    """Log-probabilities of the tokens of a version: the engine's, and those of a fresh forward pass of `model`."""
    fresh = full_forward_logprobs(model, request.prompt_ids, completion, 1.0).tolist()
    positions = [position for position, drawn in enumerate(completion.weight_versions) if drawn == version]
    return [completion.logprobs[position] for position in positions], [fresh[position] for position in positions]


@pytest.mark.sampled(6)
@every
@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_samples_go_on_under_new_weights_and_every_token_knows_which(
    host: Host, folder: Path, kind: str, in_flight: InFlight
) -> None:
    answers = host.run(interrupt, kind, folder, in_flight, 5)
    old, new = small_model(), small_model()
    changed(new, seed=5)
    apart = 0.0
    for generation_request, completions in zip(LONG, answers, strict=True):
        for completion in completions:
            versions = completion.weight_versions
            assert list(versions) == sorted(versions)
            first, *_, last = sorted(set(versions))
            assert first < last, "it was interrupted"
            reported, fresh = _by_version(old, generation_request, completion, first)
            assert reported == pytest.approx(fresh, abs=1e-4)
            reported, fresh = _by_version(new, generation_request, completion, last)
            apart = max(apart, *(abs(one - other) for one, other in zip(reported, fresh, strict=True)))
    assert apart < 1e-4 if in_flight == "recompute" else apart > 1e-2


async def loads_seen(kind: str, folder: Path) -> list[EngineLoad | None]:
    """While more samples are drawn than the engine runs at once, and afterwards."""
    engine = engine_of(kind, folder)
    drawing = asyncio.ensure_future(engine.generate(request(prompts(5)[0], count=24, max_generate_length=60)))
    seen: list[EngineLoad | None] = []
    while not drawing.done():
        seen.append(await engine.current_load())
        await asyncio.sleep(0)
    await drawing
    return [*seen, await engine.current_load()]


@pytest.mark.long
@every
def test_an_engine_reports_the_requests_that_it_does_not_run(host: Host, folder: Path, kind: str) -> None:
    seen = host.run(loads_seen, kind, folder)
    assert None not in seen
    waiting = [load.waiting for load in seen if load is not None]
    assert 0 < max(waiting) <= 24
    assert waiting[-1] == 0


async def close_while_paused(kind: str, folder: Path) -> list[str]:
    """What a request raises that waits while an engine is closed, and one that comes later."""
    engine, _ = make(kind, folder)
    await engine.pause()
    waiting = await begun(engine.generate(request((1, 2))))
    await engine.close()
    messages = []
    for call in (waiting, engine.generate(request((1, 2)))):
        try:
            await asyncio.wait_for(call, 30)
        except RunError as error:
            messages.append(str(error))
    return messages


@pytest.mark.sampled(3)
@every
def test_a_closed_engine_refuses_who_waits_and_who_comes(host: Host, folder: Path, kind: str) -> None:
    assert host.run(close_while_paused, kind, folder) == ["this inference engine was closed"] * 2
