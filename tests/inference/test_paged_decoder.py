"""Decoding over pages. On a CPU the kernel is a loop, and a CUDA graph a call with what was there at its recording."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from skyrl.config import SamplingParams
from skyrl.errors import NonFiniteError
from skyrl.inference.engine import Completion, GenerationRequest
from skyrl.inference.torch import causal_lm, paged_decoder, projections
from skyrl.inference.torch.causal_lm import CausalLM
from skyrl.inference.torch.decode_batch import DecodeBatch, Job
from skyrl.inference.torch.engine import TorchEngine
from skyrl.inference.torch.kv_cache import PlacedPrompt
from skyrl.inference.torch.paged_decoder import (
    PagedCache,
    PagedDecoder,
    PagePool,
    PageStorage,
    RowPages,
    gathered_attention,
    padded,
)
from skyrl.inference.weights import replace_weights
from skyrl.models.low_rank import LowRank, set_updates
from skyrl.weight_receiver.incoming_weights import SharedWeights
from tests.inference.nano import EOS, full_forward_logprobs, keys, nano_model, nano_tokenizer, prompts, request
from tests.long_cases import long_except

ROWS, LONGEST = 8, 256

RECORD = PagedDecoder._record
"""The recording itself, which tests without a GPU replace."""


class Recording:
    """What a CUDA graph replays: the step with the storage and the weights that were there when it was recorded."""

    def __init__(self, decoder: PagedDecoder, storage: PageStorage, rows: int) -> None:
        self._then, self._storage, self._rows = copy.copy(decoder), storage, rows
        self._then._fused = copy.copy(decoder._fused)
        self.logits = decoder._logits(storage, rows).clone()

    def replay(self) -> None:
        self.logits.copy_(self._then._logits(self._storage, self._rows))


@pytest.fixture(params=["tables", "one page a row"])
def small_pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of 4 tokens, few of which are reserved."""
    monkeypatch.setattr(paged_decoder, "refusal", lambda *_: "")
    monkeypatch.setattr(paged_decoder, "paged_attention", gathered_attention)
    monkeypatch.setattr(paged_decoder, "has_tables", lambda: request.param == "tables")
    monkeypatch.setattr(paged_decoder, "PAGE", 4)
    monkeypatch.setattr(paged_decoder, "_AHEAD", 3)
    monkeypatch.setattr(paged_decoder, "_PATIENCE", 5)
    monkeypatch.setattr(PagePool, "_room", lambda pool: 8)


@pytest.fixture
def recorded(small_pages: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows for which a step was recorded; steps are replayed as on CUDA."""
    sizes: list[int] = []

    def record(decoder: PagedDecoder, storage: PageStorage, rows: int) -> None:
        sizes.append(rows)
        recording = Recording(decoder, storage, rows)
        decoder._graphs[rows] = recording, recording.logits

    class Replaying(PagedDecoder):
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            self._records = True

    monkeypatch.setattr(PagedDecoder, "_record", record)
    monkeypatch.setattr(causal_lm, "PagedDecoder", Replaying)
    monkeypatch.setattr(projections, "packs", lambda weight: False)  # as on CUDA
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return sizes


@pytest.fixture
def roomy(small_pages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that is large enough from the start."""
    monkeypatch.setattr(PagePool, "_room", lambda pool: 1000)


def over_rows(model: Any) -> CausalLM:
    return CausalLM(model, kept_bytes=1 << 20)


def over_pages(model: Any) -> CausalLM:
    paged_model = CausalLM(model, kept_bytes=1 << 20, paged=(ROWS, LONGEST))
    assert paged_model._paged is not None
    return paged_model


def decoder_of(engine: TorchEngine) -> PagedDecoder:
    decoder = engine._causal_lm._paged
    assert decoder is not None
    return decoder


def job_of(prompt: tuple[int, ...], name: str, count: int, limit: int, sampling: SamplingParams | None = None) -> Job:
    question = GenerationRequest(prompt_ids=prompt, sampling=sampling or SamplingParams(), keys=keys(name, count))
    return Job(request=question, keys=question.keys, limit=limit)


def story(model: CausalLM, kind: str, seed: int) -> list[Completion]:
    """Answers to jobs that join and leave at random steps, while weights change and the engine sleeps."""
    chance, version = random.Random(seed), 0
    batch = DecodeBatch(model, nano_tokenizer(), eos_ids=(EOS,), weight_version=0)
    jobs: list[Job] = []
    gone: set[Job] = set()
    waiting: list[Job] = []

    def advance(steps: int, leaving: set[Job]) -> None:
        left, joining, rows = iter(range(steps)), list[Job](), len(batch.rows)
        gone.update(leaving)
        while waiting and rows + len(waiting[0].unfinished) <= ROWS:
            joining.append(waiting.pop(0))
            rows += len(joining[-1].unfinished)
        batch.advance(leaving, joining, lambda: next(left, None) is None)

    prompt: tuple[int, ...] = (1, 2)
    for number in range(15):
        if chance.random() < 0.5:  # another turn of the conversation, else the same prompt again
            prompt += prompts(chance.randint(1, 20), seed=number)[0]
        sampling = SamplingParams(temperature=chance.choice([0.0, 1.0, 1.3]))
        job = job_of(prompt, str(number), chance.randint(1, 5), chance.randint(1, 30), sampling)
        jobs.append(job)
        waiting.append(job)
        running = list(dict.fromkeys(row.job for row in batch.rows))
        leaving = {chance.choice(running)} if running and chance.random() < 0.3 else set()
        advance(chance.randint(0, 12), leaving)
        event = chance.choice(["nothing", "nothing", "keep", "recompute", "sleep"])
        if event == "recompute":
            running = list(dict.fromkeys(row.job for row in batch.rows))
            batch.interrupt()
            waiting[:0] = running
        if event in ("keep", "recompute"):
            version += 1
            replace_weights(model.hf_model, nano_model(kind, seed=version).state_dict())
            model.invalidate()
            batch.weight_version = version
        if event == "sleep":
            model.release()
    while batch.rows or waiting:
        advance(1000, set())
    assert all(job.done for job in jobs if job not in gone)
    return [job.completions[index] for job in jobs for index in sorted(job.completions)]


STORIES = long_except(product(["qwen2", "qwen3"], range(6)), ("qwen2", 0), ("qwen3", 1))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", STORIES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_pages_hold_what_rows_hold_whatever_happens(case: tuple[str, int], recorded: list[int]) -> None:
    kind, seed = case
    expected = story(over_rows(nano_model(kind)), kind, seed)
    actual = story(over_pages(nano_model(kind)), kind, seed)
    assert len(expected) > 20 and recorded
    for completion, expected_completion in zip(actual, expected, strict=True):
        assert (completion.token_ids, completion.weight_versions) == (
            expected_completion.token_ids,
            expected_completion.weight_versions,
        )
        assert completion.logprobs == pytest.approx(expected_completion.logprobs, abs=1e-4)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", ["qwen2, tied", "llama"])
@pytest.mark.usefixtures("small_pages")
async def test_logprobs_equal_a_full_forward_pass(kind: str) -> None:
    engine = TorchEngine(nano_model(kind), nano_tokenizer(), max_num_seqs=16)
    assert isinstance(engine._causal_lm.new_cache(), PagedCache)
    requests = [request(p, count=3, temperature=0.7) for p in prompts(1, 3, 9, 30)]
    for question, completions in zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True):
        for completion in completions:
            learned = full_forward_logprobs(nano_model(kind), question.prompt_ids, completion, temperature=0.7)
            torch.testing.assert_close(torch.tensor(completion.logprobs), learned, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("roomy")
async def test_weights_replaced_in_place_are_seen_without_another_recording(recorded: list[int]) -> None:
    engine = TorchEngine(nano_model("qwen3"), nano_tokenizer(), max_num_seqs=4)
    generation_request = request((1, 2, 3), count=2)
    await engine.generate(generation_request)
    assert recorded == [2]
    await engine.pause()
    await engine.load_weights(SharedWeights(tuple(nano_model("qwen3", seed=1).state_dict().items())), version=1)
    await engine.resume()
    for completion in await engine.generate(generation_request):
        learned = full_forward_logprobs(
            nano_model("qwen3", seed=1), generation_request.prompt_ids, completion, temperature=1.0
        )
        torch.testing.assert_close(torch.tensor(completion.logprobs), learned, atol=1e-5, rtol=1e-5)
    assert recorded == [2]


@pytest.mark.usefixtures("roomy")
async def test_weights_that_moved_are_recorded_again(recorded: list[int]) -> None:
    model = nano_model()
    engine, generation_request = TorchEngine(model, nano_tokenizer(), max_num_seqs=4), request((1, 2, 3))
    await engine.generate(generation_request)
    other = nano_model(seed=1)
    for weight, other_weight in zip(model.parameters(), other.parameters(), strict=True):
        weight.data = other_weight.data
    engine._causal_lm.invalidate()
    (completion,) = await engine.generate(generation_request)
    assert recorded == [1, 1]
    learned = full_forward_logprobs(nano_model(seed=1), generation_request.prompt_ids, completion, temperature=1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), learned, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("roomy")
async def test_a_first_adapter_is_recorded_and_the_next_one_replaces_it_in_place(recorded: list[int]) -> None:
    model = nano_model()
    engine, generation_request = TorchEngine(model, nano_tokenizer(), max_num_seqs=4), request((1, 2, 3))
    (last,) = await engine.generate(generation_request)
    for scale in (1.0, 2.0):
        set_updates(model, {"model.layers.0.mlp.up_proj": LowRank(torch.ones(2, 32), torch.full((48, 2), scale))})
        engine._causal_lm.invalidate()
        (completion,) = await engine.generate(generation_request)
        learned = full_forward_logprobs(model, generation_request.prompt_ids, completion, temperature=1.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs), learned, atol=1e-5, rtol=1e-5)
        assert completion != last
        last = completion
    assert recorded == [1, 1]


@pytest.mark.usefixtures("roomy")
async def test_sleep_gives_graphs_and_pages_up(recorded: list[int]) -> None:
    engine, generation_request = TorchEngine(nano_model(), nano_tokenizer(), max_num_seqs=4), request((1, 2, 3))
    before = await engine.generate(generation_request)
    decoder = decoder_of(engine)
    assert decoder._graphs and decoder._pool.storage is not None
    await engine.pause()
    await engine.sleep()
    assert not decoder._graphs and decoder._pool.storage is None
    await engine.wake()
    await engine.resume()
    assert await engine.generate(generation_request) == before
    assert recorded == [1, 1]
    await engine.close()
    assert not decoder._graphs and decoder._pool.storage is None


@pytest.mark.usefixtures("roomy")
def test_a_larger_graph_serves_until_the_right_size_is_worth_its_recording(recorded: list[int]) -> None:
    batch = DecodeBatch(over_pages(nano_model()), nano_tokenizer(), eos_ids=(), weight_version=0)
    long, short = (job_of((1, 2), name, count, limit) for name, count, limit in (("long", 2, 60), ("short", 5, 10)))
    batch.advance((), [long, short], lambda: False)
    assert short.done and recorded == [8]
    left = iter(range(5))
    batch.advance((), (), lambda: next(left, None) is None)
    assert recorded == [8]
    batch.advance((), (), lambda: False)
    assert long.done and recorded == [8, 2]


class Driver:
    """torch.cuda as far as a recording needs it; `fails` refuses every recording."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
        self.fails, self.asked = fails, list[dict[str, Any]]()
        for name in ("CUDAGraph", "Stream", "current_stream", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, MagicMock(side_effect=lambda: MagicMock()))
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "graph", self.graph)
        monkeypatch.setattr(PagedDecoder, "_record", RECORD)

    @contextlib.contextmanager
    def graph(self, graph: Any, **options: Any) -> Iterator[None]:
        self.asked.append(options)
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        yield


async def test_where_a_recording_fails_steps_go_on_without(
    recorded: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(monkeypatch, fails=True)
    engine = TorchEngine(nano_model(), nano_tokenizer(), max_num_seqs=4)
    generation_request = request((1, 2, 3), count=3)
    for completion in await engine.generate(generation_request):
        learned = full_forward_logprobs(nano_model(), generation_request.prompt_ids, completion, temperature=1.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs), learned, atol=1e-5, rtol=1e-5)
    assert len(driver.asked) == 1 and "without CUDA graphs" in caplog.text and "not permitted" in caplog.text


@pytest.mark.usefixtures("roomy")
async def test_recordings_of_an_engine_share_memory_and_leave_other_threads_alone(
    recorded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(monkeypatch, fails=False)
    engine = TorchEngine(nano_model(), nano_tokenizer(), max_num_seqs=8)
    for count in (5, 1):
        await engine.generate(request((1, 2, 3), count=count))
    assert [sorted(decoder_of(engine)._graphs)] == [[1, 8]]
    first, second = driver.asked
    assert first == second and first["capture_error_mode"] == "thread_local"
    await engine.close()
    other = TorchEngine(nano_model(), nano_tokenizer(), max_num_seqs=8)
    await other.generate(request((1, 2, 3)))
    assert driver.asked[2]["pool"] != first["pool"] and driver.asked[2]["stream"] != first["stream"]


@pytest.mark.usefixtures("roomy")
async def test_a_storage_above_its_share_is_given_up_with_the_last_row(
    recorded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TorchEngine(nano_model(), nano_tokenizer(), max_num_seqs=4)
    decoder, generation_request = decoder_of(engine), request((1, 2, 3))
    kept = await engine.generate(generation_request)
    assert decoder._pool.storage is not None and decoder._graphs
    monkeypatch.setattr(PagePool, "kept_bytes", 0)
    assert await engine.generate(generation_request) == kept
    assert decoder._pool.storage is None and not decoder._graphs


@pytest.mark.usefixtures("roomy")
def test_twice_what_the_rows_in_flight_may_need_is_reserved_however_many_may_come() -> None:
    lent = pool(rows=64)
    admit(PagedCache(lent), 1, 2, 3, copies=2, total=64)
    assert lent.storage is not None
    pages_per_row = 16 if lent.storage.page == 4 else 1  # pages of a row of 64 tokens
    assert lent.storage.pages == 2 * (1 + 2 * pages_per_row)  # one is for padding


def test_where_memory_is_short_only_what_is_needed_is_reserved(
    small_pages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested_pages: list[int] = []
    grown = PagePool._grown

    def short(pool: PagePool, old: PageStorage | None, pages: int, *sizes: int) -> PageStorage:
        requested_pages.append(pages)
        if len(requested_pages) == 1:
            raise torch.OutOfMemoryError
        return grown(pool, old, pages, *sizes)

    monkeypatch.setattr(PagePool, "_grown", short)
    monkeypatch.setattr(PagePool, "_room", lambda pool: 1000)
    admit(PagedCache(pool(rows=64)), 1, 2, 3)
    assert requested_pages[0] > requested_pages[1] <= 3


def test_the_numbers_of_rows_that_are_recorded_are_few() -> None:
    assert sorted({padded(rows) for rows in range(1, 257)}) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert all(padded(rows) >= rows for rows in range(1, 5000))


@pytest.mark.sampled(2)
def test_a_batch_that_failed_leaves_nothing_in_the_next_one(recorded: list[int]) -> None:
    model = nano_model()
    lm = over_pages(model)
    failing = DecodeBatch(lm, nano_tokenizer(), eos_ids=(), weight_version=0)
    job = job_of((1, 2, 3), "failing", 7, 20)
    left = iter(range(4))
    failing.advance((), [job], lambda: next(left, None) is None)
    head = model.lm_head.weight[0, 0].item()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="after 5 sampled tokens"):
        failing.advance((), (), lambda: False)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = head
    next_job = job_of((4, 5), "next", 5, 40)
    DecodeBatch(lm, nano_tokenizer(), eos_ids=(), weight_version=0).advance((), [next_job], lambda: False)
    for completion in next_job.completions.values():
        learned = full_forward_logprobs(nano_model(), next_job.request.prompt_ids, completion, temperature=1.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs), learned, atol=1e-5, rtol=1e-5)


def pool(rows: int = 4, longest: int = 64) -> PagePool:
    return PagePool(
        layers=1, kv_heads=1, head=2, rows=rows, longest=longest, dtype=torch.float32, device=torch.device("cpu")
    )


def admit(cache: PagedCache, *ids: int, copies: int = 1, total: int = 40) -> None:
    states = torch.tensor(ids, dtype=torch.float32)[None, :, None].expand(1, len(ids), 2)
    cache.reserve(copies, before=len(ids), ahead=total)
    cache.place_all([PlacedPrompt(ids=ids, layers=[(states, -states)], copies=copies, total=total)])


def test_rows_that_leave_give_their_pages_back_and_become_padding(small_pages: None) -> None:
    lent = pool()
    cache = PagedCache(lent)
    for first in (10, 20, 30):
        admit(cache, *range(first, first + 6))
    assert cache.keep([0, 2]) == [0, 2]
    assert lent.storage is not None
    table, pages = lent.storage.table.clone(), lent.storage.pages
    assert table[2:].sum() == 0 and 0 not in table[:2, 0]
    admit(cache, *range(40, 46))
    assert lent.storage.pages == pages
    for row, first in enumerate((10, 30, 40)):
        ids, ((keys, values),) = cache.computed(row, cache.window.end - 6)
        assert ids == tuple(range(first, first + 6))
        assert keys[0, :, 0].tolist() == [-value for value in values[0, :, 0].tolist()] == list(ids)


def test_copies_of_computed_tokens_take_no_more_memory_than_the_tokens(small_pages: None) -> None:
    cache = PagedCache(pool())
    admit(cache, *range(6))
    _, ((keys, _),) = cache.computed(0, 0)
    assert keys.untyped_storage().nbytes() == 2 * 6 * 2 * 4  # keys and values of 6 tokens, 2 numbers of 4 bytes


def test_pages_reserved_before_they_are_needed_do_not_exceed_their_share(small_pages: None) -> None:
    lent = pool(rows=64)
    cache = PagedCache(lent)
    admit(cache, 1, 2, 3, copies=2, total=64)
    assert lent.storage is not None
    assert lent.storage.states[0, 0, :, :, 0, 0].numel() <= 8 * 4


@pytest.mark.parametrize(
    ("device", "dtype", "head", "reason"),
    [
        ("cpu", torch.bfloat16, 64, "the device is cpu"),
        ("cuda", torch.float32, 64, "the type is torch.float32"),
        ("cuda", torch.bfloat16, 20, "heads of 20"),
        ("cuda", torch.bfloat16, 512, "heads of 512"),
    ],
)
def test_where_pages_are_not_used_the_reason_is_named(device: str, dtype: torch.dtype, head: int, reason: str) -> None:
    assert reason in paged_decoder.refusal(torch.device(device), dtype, 4, 2, head)


async def test_deterministic_mode_does_not_use_pages(recorded: list[int]) -> None:
    engine = TorchEngine(nano_model(), nano_tokenizer(), max_num_seqs=4, deterministic=True)
    await engine.generate(request((1, 2, 3)))
    assert engine._causal_lm._paged is None and not recorded


@pytest.mark.parametrize("tables", [True, False])
def test_the_operator_takes_what_is_passed(tables: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert paged_decoder.has_tables()
    monkeypatch.setattr(paged_decoder, "has_tables", lambda: tables)
    query = torch.empty(3, 4, 16, dtype=torch.bfloat16, device="meta")
    keys, values = torch.empty(2, 9, 256, 2, 16, dtype=torch.bfloat16, device="meta")
    table, positions = (
        torch.empty(3, 2 if tables else 1, dtype=torch.int32, device="meta"),
        torch.empty(3, device="meta"),
    )
    mixed = paged_decoder.paged_attention(query, keys, values, RowPages.of(table, positions, 256))
    assert mixed.shape == (3, 64)


@pytest.mark.parametrize("tables", [True, False])
def test_the_kernel_is_tried_before_it_is_used(tables: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(kernel: Any) -> str:
        monkeypatch.setattr(paged_decoder, "paged_attention", kernel)
        return paged_decoder._fault(torch.device("cpu"), torch.bfloat16, 4, 2, 16)

    def raising(*_: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(paged_decoder, "has_tables", lambda: tables)
    assert fault(gathered_attention) == ""
    assert "no kernel image is available" in fault(raising)
    assert "wrong by" in fault(lambda query, keys, values, rows: gathered_attention(query, values, keys, rows))
    assert "wrong by nan" in fault(lambda *parts: gathered_attention(*parts) * torch.nan)


def cuda_model(kind: str = "qwen3", seed: int = 0) -> Any:
    model = nano_model(kind, seed=seed, initializer_range=0.1, max_position_embeddings=1024)
    return model.to("cuda", torch.bfloat16)


def deviation(completions: list[Completion], prompt: tuple[int, ...], seed: int = 0) -> float:
    """Mean difference in nats from the float32 model with the same weights."""
    model = cuda_model(seed=seed).float().cpu()
    differences = [
        (torch.tensor(completion.logprobs) - full_forward_logprobs(model, prompt, completion, temperature=1.0)).abs()
        for completion in completions
    ]
    return float(torch.cat(differences).mean())


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "head"), [(14, 2, 64), (9, 3, 64), (16, 8, 128)])
def test_the_kernel_computes_what_a_loop_does(heads: int, kv_heads: int, head: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert paged_decoder.refusal(device, torch.bfloat16, heads, kv_heads, head) == ""


async def conversations(engine: TorchEngine) -> list[tuple[tuple[int, ...], Completion]]:
    """Prompts of different lengths, up to several pages, and a second turn of each."""
    first = [request(prompt, count=4, max_generate_length=100) for prompt in prompts(1, 20, 300, 700)]
    answers = await asyncio.gather(*map(engine.generate, first))
    second = [
        request(question.prompt_ids + answer[0].token_ids + (1, 2), name=f"second {number}", max_generate_length=30)
        for number, (question, answer) in enumerate(zip(first, answers, strict=True))
    ]
    later = await asyncio.gather(*map(engine.generate, second))
    pairs = zip([*first, *second], [*answers, *later], strict=True)
    return [(question.prompt_ids, completion) for question, answer in pairs for completion in answer]


@pytest.mark.gpu
async def test_graphs_compute_what_steps_without_graphs_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchEngine(cuda_model(), nano_tokenizer(), max_num_seqs=16)
    replayed = await conversations(engine)
    assert decoder_of(engine)._graphs and engine._causal_lm.kept.reused > 1000
    monkeypatch.setattr(paged_decoder, "refusal", lambda *_: "switched off")
    plain = await conversations(TorchEngine(cuda_model(), nano_tokenizer(), max_num_seqs=16))
    assert len(replayed) == len(plain) == 20
    noise = max(deviation([completion], prompt) for prompt, completion in plain)
    assert max(deviation([completion], prompt) for prompt, completion in replayed) < 2 * noise + 0.005


@pytest.mark.gpu
async def test_replays_see_weights_that_were_replaced_in_place() -> None:
    engine = TorchEngine(cuda_model(), nano_tokenizer(), max_num_seqs=4)
    generation_request = request((1, 2, 3), count=4)
    old = await engine.generate(generation_request)
    graphs = dict(decoder_of(engine)._graphs)
    await engine.pause()
    await engine.load_weights(SharedWeights(tuple(cuda_model(seed=1).state_dict().items())), version=1)
    await engine.resume()
    new = await engine.generate(generation_request)
    assert graphs and decoder_of(engine)._graphs == graphs
    assert (
        deviation(list(new), generation_request.prompt_ids, seed=1)
        < 0.05
        < deviation(list(old), generation_request.prompt_ids, seed=1)
    )


@pytest.mark.gpu
async def test_an_engine_on_cuda_sleeps_and_samples_the_same_afterwards() -> None:
    engine = TorchEngine(cuda_model(), nano_tokenizer(), max_num_seqs=4)
    generation_request = request((1, 2, 3), count=3)
    before, reserved = await engine.generate(generation_request), torch.cuda.memory_reserved()
    await engine.pause()
    await engine.sleep()
    assert not decoder_of(engine)._graphs and decoder_of(engine)._pool.storage is None
    assert torch.cuda.memory_reserved() < reserved
    await engine.wake()
    await engine.resume()
    after = await engine.generate(generation_request)
    assert [completion.token_ids for completion in after] == [completion.token_ids for completion in before]


@pytest.mark.gpu
def test_several_engines_record_at_the_same_time() -> None:
    counts: Counter[tuple[int, ...]] = Counter()

    def draw() -> None:
        engine = TorchEngine(cuda_model(), nano_tokenizer(), max_num_seqs=16)
        requests = [request((1, 2, 3), count=count, name="same") for count in (1, 3, 9)]
        for question in requests:
            counts[asyncio.run(engine.generate(question))[0].token_ids] += 1

    threads = [threading.Thread(target=draw) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts.total() == 9
