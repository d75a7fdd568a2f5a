"""Teachers behind real servers: their numbers, one for each source of data, resumption, and what goes wrong."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from skyrl.errors import ProcessError, UserError
from skyrl.inference.servers.http_connection import ATTEMPTS
from skyrl.inference.servers.scoring_server import ScoringServer
from skyrl.inference.torch.engine import TorchEngine
from skyrl.learners.workers.group import ScorerGroup
from skyrl.learners.workers.roles import TeacherWorker
from skyrl.models.files.loading import load_tokenizer
from skyrl.processes.handles import Group
from skyrl.processes.in_process import LocalHandle
from skyrl.training.teacher import ServedTeacher
from tests.endpoint.serving import served
from tests.inference.server_engines import vllm_server
from tests.learners.rows import batch
from tests.nano_run import config, metrics, train
from tests.supervised_run import train as supervised_train
from tests.supervised_run import write

D = "trainer__algorithm__distillation__"
TEACHER_ALONE: dict[str, Any] = {
    f"{D}task_coef": 0,
    "trainer__eval_before_train": False,
    "trainer__eval_interval": -1,
    "trainer__deterministic": True,
}
OF_LIKELY: dict[str, Any] = {f"{D}type": "loss", f"{D}top_k": 16, f"{D}beta": 0.0}
FORMS: dict[str, dict[str, Any]] = {"advantage": {}, "loss": OF_LIKELY}
URL, SOURCES = "trainer__teacher__endpoint__url", "trainer__teacher__endpoint__sources"


def made(folder: Path, nano: Path, seed: int, *, sharpness: float = 12, **changes: Any) -> Path:
    """A teacher with weights of its own and the policy's tokens."""
    shape = AutoConfig.from_pretrained(nano / "model")
    shape.update({"tie_word_embeddings": False, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(shape)
    model.get_output_embeddings().weight.data.mul_(sharpness)  # so that some tokens are much likelier than others
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(nano / "model").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def teachers(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two teachers of other sizes than the policy."""
    folder = tmp_path_factory.mktemp("teachers")
    return made(folder / "one", nano, 7, hidden_size=48), made(folder / "two", nano, 8, hidden_size=16)


@contextmanager
def serving(model: Path, **options: Any) -> Iterator[str]:
    """The address of our endpoint over a model, on a thread."""
    loop, ready, ends = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    urls: list[str] = []

    async def run() -> None:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        tokenizer: Any = load_tokenizer(str(model))
        engine = TorchEngine(loaded, tokenizer, max_num_seqs=16)
        async with served(engine.generate, tokenizer, **{"scores_prompts": True, **options}) as running:
            urls.append(running.url)
            ready.set()
            await ends.wait()
        await engine.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert ready.wait(60)
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join(60)
        loop.close()


@pytest.fixture(scope="module")
def urls(teachers: tuple[Path, Path]) -> Iterator[tuple[str, str]]:
    with serving(teachers[0]) as one, serving(teachers[1]) as two:
        yield one, two


async def assert_same_as_local(trainer: Any, url: str) -> None:
    """The server gives the local teacher's log-probabilities of sampled and of likely tokens, to 1e-4."""
    rows = batch(6)
    worker: Any = TeacherWorker(trainer)
    local = ScorerGroup[TeacherWorker](Group([LocalHandle("teacher", worker)]))
    server = ScoringServer(url, protocol="vllm", token=None, timeout=120, most=8)
    try:
        assert (await server.connect(longest=12, top=5, address="url", length="max_length")).max_model_len in (64, 512)
        with pytest.raises(UserError, match="the longest prompt .* have 10001: .*, or lower max_length$"):
            await server.connect(longest=10_000, top=5, address="url", length="max_length")
        remote = ServedTeacher(server)
        one, other = await local.score(rows), await remote.score(rows)
        torch.testing.assert_close(other, one, atol=1e-4, rtol=0)
        assert one[rows.loss_mask].std() > 0.5
        (ids, logs), (others, other_logs) = [await teacher.token_logprobs(rows, 5, 1.0) for teacher in (local, remote)]
        assert torch.equal(others.counts, ids.counts)
        assert torch.equal(others.values, ids.values)
        torch.testing.assert_close(other_logs.values, logs.values, atol=1e-4, rtol=0)
        print(
            "largest differences",
            (one - other).abs().max().item(),
            (logs.values - other_logs.values).abs().max().item(),
        )
    finally:
        await server.close()


async def test_our_endpoint_gives_the_local_teachers_numbers(
    nano: Path, teachers: tuple[Path, Path], urls: tuple[str, str], tmp_path: Path
) -> None:
    local = config(nano, tmp_path, trainer__teacher__model__path=str(teachers[0])).trainer
    await assert_same_as_local(local, urls[0])


@pytest.mark.long
async def test_vllms_server_gives_the_local_teachers_numbers(nano: Path, tmp_path: Path) -> None:
    teacher = made(tmp_path / "teacher", nano, 7, sharpness=3, hidden_size=128)  # heads of 32: vLLM's least on a CPU
    local = config(nano, tmp_path, trainer__teacher__model__path=str(teacher)).trainer
    limits = ("--max-model-len", "64", "--logprobs-mode", "raw_logprobs")
    await assert_same_as_local(local, vllm_server(teacher, *limits))


def two_sources(nano: Path, folder: Path) -> Path:
    """The training rows of the nano run, whose letters up to d are of one source."""
    rows = [json.loads(line) for line in (nano / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["data_source"] = "first" if row["prompt"][0]["content"] <= "d" else "second"
    file = folder / "two.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.mark.long
@pytest.mark.parametrize("has_default", [False, True])
def test_two_teachers_by_source_bring_the_divergence_down(
    has_default: bool, nano: Path, teachers: tuple[Path, Path], urls: tuple[str, str], tmp_path: Path
) -> None:
    """The second one is served for its source, or is the local one for all sources without an address."""
    addresses = {"first": urls[0]} | ({} if has_default else {"second": urls[1]})
    local = {"trainer__teacher__model__path": str(teachers[1])} if has_default else {}
    train(
        nano,
        tmp_path,
        **{**TEACHER_ALONE, **OF_LIKELY, **local, SOURCES: addresses},
        data__train_data=[str(two_sources(nano, tmp_path))],
        trainer__epochs=5,
        trainer__ckpt_interval=-1,
    )
    losses = [row["policy/teacher_divergence"] for row in metrics(tmp_path)[1:]]
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])


def tuned(nano: Path, folder: Path, answer: str) -> Path:
    """A copy of the policy that gives this answer to every letter."""
    folder.mkdir()
    rows = [{"prompt": [{"role": "user", "content": letter}]} for letter in "abcdefgh"]
    chats = [{"messages": [*row["prompt"], {"role": "assistant", "content": answer}]} for row in rows]
    tuning: dict[str, Any] = {
        "train_datasets": (write(folder / "rows.jsonl", chats),),
        "num_epochs": 30,
        "optimizer_config__lr": 3e-3,
    }
    supervised_train(nano, folder, **tuning)
    return folder / "run" / "model"


def distance(student: Path, teacher: Path, letters: set[str]) -> float:
    """Forward KL from the teacher in nats at the first token of answers, the only one that depends on the letter alone:
    mean over the letters.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(teacher)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (student, teacher)]
    divergences = list[float]()
    for letter in sorted(letters):
        messages = [{"role": "user", "content": letter}]
        ids = torch.tensor([tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)])
        with torch.no_grad():
            student_logprobs, teacher_logprobs = (model(ids).logits[0, -1].log_softmax(-1) for model in models)
        divergences.append((teacher_logprobs.exp() * (teacher_logprobs - student_logprobs)).sum().item())
    return sum(divergences) / len(divergences)


@contextmanager
def two_teachers(models: Sequence[Path], *, local: bool) -> Iterator[tuple[str, Sequence[str]]]:
    """The field of teachers by source, and the two teachers as they stand there: in the run, or behind servers."""
    if local:
        yield "trainer__teacher__sources", [str(model) for model in models]
        return
    with serving(models[0]) as one, serving(models[1]) as two:
        yield SOURCES, (one, two)


@pytest.mark.long
@pytest.mark.parametrize("local", [True, False], ids=["local", "served"])
def test_each_source_learns_from_its_own_teacher_and_not_where_they_are_exchanged(
    local: bool, nano: Path, tmp_path: Path
) -> None:
    models = [tuned(nano, tmp_path / name, answer) for name, answer in (("one", "xxxx"), ("two", "yyyy"))]
    lines = map(json.loads, two_sources(nano, tmp_path).read_text(encoding="utf-8").splitlines())
    prompts = [(row["data_source"], row["prompt"][0]["content"]) for row in lines]
    letters_of = [{letter for source, letter in prompts if source == name} for name in ("first", "second")]
    parts = list(zip(models, letters_of, strict=True))
    before = [distance(nano / "model", model, letters) for model, letters in parts]
    common = {**TEACHER_ALONE, **OF_LIKELY, "trainer__epochs": 10, "trainer__ckpt_interval": -1}
    common |= {"trainer__policy__optimizer_config__lr": 3e-3}
    with two_teachers(models, local=local) as (field, teachers):
        for name, ordered in {"own": teachers, "exchanged": tuple(reversed(teachers))}.items():
            sources = dict(zip(("first", "second"), ordered, strict=True))
            rows = [str(two_sources(nano, tmp_path))]
            train(nano, tmp_path / name, **{**common, field: sources}, data__train_data=rows)
    shares = {
        name: [
            distance(tmp_path / name / "run" / "model", model, letters) / far
            for (model, letters), far in zip(parts, before, strict=True)
        ]
        for name in ("own", "exchanged")
    }
    print(f"nats before {before}, and the share that is left: {shares}")
    assert max(shares["own"]) <= 0.05
    assert min(shares["exchanged"]) > 0.5


@pytest.mark.long
@pytest.mark.parametrize("form", list(FORMS))
def test_a_resumed_run_with_a_served_teacher_goes_on_exactly(
    form: str, nano: Path, urls: tuple[str, str], tmp_path: Path
) -> None:
    own = {**TEACHER_ALONE, **FORMS[form], URL: urls[0]}
    train(nano, tmp_path / "whole", trainer__max_training_steps=4, **own)
    for steps in (2, 4):
        train(nano, tmp_path / "parts", trainer__max_training_steps=steps, **own)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


class Relay:
    """An address in front of a server, which can be lost: it lets some requests pass, then breaks off every connection
    and drops some more.
    """

    def __init__(self, url: str) -> None:
        self._server = int(url.rpartition(":")[2])
        self.url = ""
        self.passing, self.dropping, self._attempts = -1, 0, 0
        self._open = set[asyncio.StreamWriter]()

    @contextmanager
    def running(self) -> Iterator[Relay]:
        """The relay on a thread, for the length of the block."""
        loop, ready, ends = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

        async def run() -> None:
            async with await asyncio.start_server(self._connected, "127.0.0.1", 0) as server:
                self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
                ready.set()
                await ends.wait()
                self._break_off()

        thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
        thread.start()
        try:
            assert ready.wait(60)
            yield self
        finally:
            loop.call_soon_threadsafe(ends.set)
            thread.join(60)
            loop.close()

    def lose(self, after: int, attempts: int) -> None:
        """After `after` requests, break off and drop as many attempts."""
        self.passing, self._attempts = after, attempts

    def _break_off(self) -> None:
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.dropping:
            self.dropping -= 1
            writer.transport.abort()
            return
        answers, asks = await asyncio.open_connection("127.0.0.1", self._server)
        self._open |= {writer, asks}
        await asyncio.gather(self._pass(reader, asks, counted=True), self._pass(answers, writer, counted=False))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if counted and data.startswith(b"POST"):
                    self.passing -= 1
                    if self.passing == -1:
                        self.dropping = self._attempts
                        self._break_off()
                        return
                writer.write(data)
                await writer.drain()
        writer.close()


def test_a_run_goes_on_when_a_lost_teacher_comes_back_or_ends_and_resumes_exactly(
    nano: Path, urls: tuple[str, str], tmp_path: Path
) -> None:
    own = {**TEACHER_ALONE, **OF_LIKELY, "trainer__max_training_steps": 3, "trainer__ckpt_interval": 1}
    one_at_a_time = {"trainer__teacher__endpoint__max_requests": 1}
    train(nano, tmp_path / "whole", **own, **{URL: urls[0]})
    relay = Relay(urls[0])
    with relay.running():
        own |= {URL: relay.url, **one_at_a_time}
        relay.lose(after=30, attempts=ATTEMPTS + 1)
        train(nano, tmp_path / "waits", **own)
        assert relay.passing < -1 and relay.dropping == 0
        relay.lose(after=30, attempts=10**6)
        with pytest.raises(ProcessError, match=rf"the teacher at {relay.url} does not answer: .* which resumes"):
            train(nano, tmp_path / "ends", **own, trainer__teacher__endpoint__timeout=10.0)
        relay.dropping = 0
        train(nano, tmp_path / "ends", **own)
    assert metrics(tmp_path / "waits") == metrics(tmp_path / "whole")
    assert metrics(tmp_path / "ends") == metrics(tmp_path / "whole")


def test_limits_and_tokens_of_a_server_are_named_at_the_start(
    nano: Path, teachers: tuple[Path, Path], urls: tuple[str, str], tmp_path: Path
) -> None:
    with serving(teachers[0], max_model_len=20) as short, pytest.raises(UserError, match="takes 20 tokens, and the"):
        train(nano, tmp_path / "short", **TEACHER_ALONE, **{URL: short})
    with serving(teachers[0], scores_prompts=False) as mute, pytest.raises(UserError, match="does not score tokens: "):
        train(nano, tmp_path / "mute", **TEACHER_ALONE, **{URL: mute})
    with pytest.raises(UserError, match=r"does not score tokens: .* Start it with --max-logprobs 21 or more"):
        train(nano, tmp_path / "many", **{**TEACHER_ALONE, **OF_LIKELY, f"{D}top_k": 21, URL: urls[0]})
    with pytest.raises(UserError, match="no teacher teaches the data source 'letters': add it to trainer.teacher"):
        train(nano, tmp_path / "none", **TEACHER_ALONE, **{SOURCES: {"other": urls[0]}})


@pytest.mark.long
def test_a_run_that_cannot_begin_leaves_no_connection_to_a_teacher(
    nano: Path, urls: tuple[str, str], tmp_path: Path
) -> None:
    too_many = {**TEACHER_ALONE, **OF_LIKELY, f"{D}top_k": 21, URL: urls[0]}
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always", ResourceWarning)
        with pytest.raises(UserError):
            train(nano, tmp_path, **too_many)
        gc.collect()
    assert [str(warning.message) for warning in caught_warnings if "unclosed" in str(warning.message)] == []
