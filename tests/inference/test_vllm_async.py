"""vLLM's asynchronous engine, in processes of its own: requests, weights that travel, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from skyrl.config import InferenceEngineConfig
from skyrl.errors import ProcessError, WeightSyncError
from skyrl.inference.engine import Completion
from skyrl.inference.vllm import backend as vllm_backend
from skyrl.inference.vllm.backend import AsyncBackend
from skyrl.inference.vllm.engine import VLLMEngine
from skyrl.weight_receiver.incoming_weights import (
    BroadcastWeights,
    FolderWeights,
    SharedWeights,
    acknowledgement,
    as_plain,
    digest,
    from_plain,
    weight_info,
)
from skyrl.weight_receiver.transfer_group import TransferGroup, presence_key
from tests.inference.nano import full_forward_logprobs, nano_tokenizer, prompts, request
from tests.inference.steps import Steps, gate_of_processes
from tests.inference.vllm_host import Host
from tests.inference.vllm_models import changed, saved, small_model
from tests.processes.clusters import family, lives

pytestmark = pytest.mark.xdist_group("vllm")

ENGINES: list[VLLMEngine] = []
"""Of the other process."""

GATES: list[Steps] = []
"""The gate in front of the steps of those engines; of the other process, too."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = small_model(tied=True)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return saved(tmp_path_factory.mktemp("async") / "model", model)


async def start(folder: Path, *, disable_multiproc: bool = True) -> set[int]:
    """Starts an engine; the ids of its processes."""
    tokenizer = nano_tokenizer()
    tokenizer.eos_token = None
    GATES.append(gate_of_processes())
    config = InferenceEngineConfig(
        model_dtype="float32",
        max_num_seqs=16,
        vllm_v1_disable_multiproc=disable_multiproc,
        engine_init_kwargs={"logits_processors": ["tests.inference.vllm_gate:AskTheGate"]},
    )
    before = set(family(os.getpid()))
    ENGINES.append(VLLMEngine(config, model_path=str(folder), device="cpu", tokenizer=tokenizer))
    return set(family(os.getpid())) - before


def alive(pids: set[int]) -> set[int]:
    """Those that still run; a zombie does not."""
    return {pid for pid in pids if lives(pid)}


def left_after(pids: set[int], seconds: float) -> set[int]:
    """Those that still run when all have ended, or after so many seconds."""
    deadline = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive(pids)


def travelling(folder: Path, weights: tuple[tuple[str, Tensor], ...], *, flipped: str = "") -> FolderWeights:
    """The weights in a file, with the digest of each; that of `flipped` is another's."""
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in weights}, folder / "part.safetensors")
    digests = {name: digest(tensor if name != flipped else tensor + 1) for name, tensor in weights}
    (folder / "part.json").write_text(json.dumps(digests), encoding="utf-8")
    return FolderWeights(path=str(folder), weights=tuple(weight_info(*weight) for weight in weights))


async def ask(count: int = 2) -> list[Completion]:
    groups = await asyncio.gather(*(ENGINES[-1].generate(request(p, count=count)) for p in prompts(5, 12)))
    return [completion for group in groups for completion in group]


async def longest_queue() -> int:
    """Requests that waited while more were drawn than the engine runs at once."""
    engine = ENGINES[-1]
    drawing = asyncio.create_task(engine.generate(request((1, 2, 3), count=24, max_generate_length=60)))
    longest = 0
    while not drawing.done():
        load = await engine.current_load()
        longest = max(longest, load.waiting if load else 0)
        await asyncio.sleep(0)
    await drawing
    return longest


async def load(incoming: Any, version: int) -> int:
    engine = ENGINES[-1]
    await engine.pause()
    try:
        await engine.load_weights(incoming, version)
    finally:
        await engine.resume()
    return engine.weight_version


async def load_in_flight(incoming: Any, version: int) -> Completion:
    """A completion that was half drawn when the weights changed, by vLLM's own way to keep what is running."""
    engine = ENGINES[-1]
    backend: Any = engine._backend
    steps = GATES[-1]
    steps.hold(after=20)
    running = asyncio.create_task(engine.generate(request((1, 2, 3), max_generate_length=240)))
    pausing = None
    while pausing is None or not pausing.done():  # a step at a time until the engine has heard of the pause
        held_step = asyncio.create_task(steps.held())
        await asyncio.wait({held_step, pausing or held_step}, return_when=asyncio.FIRST_COMPLETED)
        pausing = pausing or asyncio.create_task(engine._run_on_loop(backend._llm.pause_generation(mode="keep")))
        steps.hold(after=1)
    steps.release()
    loaded = backend.call_workers("skyrl_load_weights", incoming, engine._expected.tied)
    assert await engine._run_on_loop(loaded) == [acknowledgement(from_plain(incoming))]
    await engine._run_on_loop(backend._llm.reset_prefix_cache(reset_running_requests=True))
    await engine._run_on_loop(backend._llm.update_weight_version(str(version)))
    await engine._run_on_loop(backend._llm.resume_generation())
    (completion,) = await running
    return completion


async def signal_the_engine_process(pids: set[int], number: int) -> list[str]:
    """What a running request and a later one raise after it."""
    vllm_backend._ALIVE_SECONDS = 2.0
    engine = ENGINES.pop()
    GATES[-1].hold(after=10)
    running = asyncio.create_task(engine.generate(request((1,), count=8, max_generate_length=250)))
    await GATES[-1].held()
    for pid in pids:
        os.kill(pid, number)
    messages = []
    for call in (running, engine.generate(request((2,)))):
        try:
            await asyncio.wait_for(call, 60)
        except ProcessError as error:
            messages.append(str(error))
    await engine.close()
    return messages


async def die_while_weights_are_awaited(pids: set[int], weights: Any) -> str:
    """What loading raises when the engine's processes are killed while they wait for the learner."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    group = TransferGroup(host="127.0.0.1", port=store.port, name="one", rank=1, size=2, timeout=1000)
    engine = ENGINES.pop()
    await engine.pause()
    loading = asyncio.create_task(engine.load_weights(BroadcastWeights(group=group, weights=weights), 1))
    while not group.store().check([presence_key(1)]):
        await asyncio.sleep(0.05)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    try:
        await asyncio.wait_for(loading, 60)
    except ProcessError as error:
        return str(error)
    finally:
        await engine.close()
    return ""


@pytest.mark.long
def test_an_engine_process_that_dies_in_a_transfer_is_a_dead_process_and_not_weights_that_do_not_fit(
    host: Host, folder: Path
) -> None:
    pids = host.run(start, folder)
    weights = tuple(weight_info(*weight) for weight in changed(small_model(tied=True), seed=1))
    assert "signal 9" in host.run(die_while_weights_are_awaited, pids, weights)


async def test_a_call_that_vllm_never_answers_ends_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_backend, "_LOOK_SECONDS", 0.01)
    errors = SimpleNamespace(EngineDeadError=RuntimeError, EngineGenerateError=RuntimeError)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.exceptions", errors)
    backend, child = object.__new__(AsyncBackend), SimpleNamespace(pid=7, exitcode=None)
    child.is_alive = lambda: child.exitcode is None
    llm = SimpleNamespace(collective_rpc=lambda *_, **__: asyncio.Event().wait())
    vars(backend).update(_llm=llm, _children={child.pid: child}.values(), _hung="")
    call = asyncio.create_task(backend.call_workers("skyrl_load_weights"))
    await asyncio.sleep(0.05)
    assert not call.done()
    child.exitcode = -9
    with pytest.raises(ProcessError, match="vLLM's engine died: process 7 ended with signal 9"):
        await asyncio.wait_for(call, 10)


async def close() -> None:
    await ENGINES.pop().close()


def matches(model: Any, completions: list[Completion], count: int = 2) -> None:
    for index, completion in enumerate(completions):
        expected = full_forward_logprobs(model, prompts(5, 12)[index // count], completion, 1.0)
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.long
def test_an_engine_in_its_own_process_keeps_the_contract_until_it_is_killed(
    host: Host, folder: Path, tmp_path: Path
) -> None:
    pids = host.run(start, folder)
    model = small_model(tied=True)
    matches(model, host.run(ask))
    assert 0 < host.run(longest_queue) <= 24
    weights = changed(model, seed=1)
    assert host.run(load, travelling(tmp_path / "1", weights), 1) == 1
    completions = host.run(ask)
    matches(model, completions)
    assert {version for completion in completions for version in completion.weight_versions} == {1}

    with pytest.raises(WeightSyncError, match="shared in memory"):
        host.run(load, SharedWeights(weights), 2)

    in_flight = travelling(tmp_path / "2", changed(model, seed=2))
    half = host.run(load_in_flight, as_plain(in_flight), 2)
    versions = half.weight_versions
    assert set(versions) == {1, 2}
    assert versions == tuple(sorted(versions))
    expected = full_forward_logprobs(model, (1, 2, 3), half, 1.0).tolist()
    switch = versions.index(2)
    assert half.logprobs[switch:] == pytest.approx(expected[switch:], abs=1e-4)

    said_of_death = host.run(signal_the_engine_process, pids, signal.SIGKILL)
    assert len(said_of_death) == 2
    assert all("signal 9" in line and "\n" not in line for line in said_of_death)


@pytest.mark.long
def test_an_engine_process_that_hangs_is_ended_and_named(host: Host, folder: Path) -> None:
    pids = host.run(start, folder)
    messages = host.run(signal_the_engine_process, pids, signal.SIGSTOP)
    assert messages == ["vLLM's engine process gave no sign of life for 2 s and was ended"] * 2
    assert not left_after(pids, 10)


@pytest.mark.long
def test_bytes_that_were_changed_put_the_engine_out_of_service_until_whole_ones_come_and_closing_leaves_no_process(
    host: Host, folder: Path, tmp_path: Path
) -> None:
    pids = host.run(start, folder)
    spoilt = travelling(tmp_path / "spoilt", changed(small_model(tied=True), seed=1), flipped="model.norm.weight")
    with pytest.raises(WeightSyncError, match=r"out of service.* model\.norm\.weight was changed in transit"):
        host.run(load, spoilt, 1)
    with pytest.raises(WeightSyncError, match="out of service"):
        host.run(ask)
    model = small_model(tied=True)
    assert host.run(load, travelling(tmp_path / "whole", changed(model, seed=2)), 2) == 2
    matches(model, host.run(ask))
    assert alive(pids)
    host.run(close)
    assert not left_after(pids, 20)


def shared_memory(pids: set[int]) -> set[Path]:
    """The segments that these processes have mapped."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()]
    return {Path("/" + line.split(" /", 1)[1]) for line in lines if " /dev/shm/" in line and "(deleted)" not in line}


@pytest.mark.long
@pytest.mark.parametrize("disable_multiproc", [True, False])
def test_nothing_is_left_when_the_process_that_hosts_an_engine_is_killed(folder: Path, disable_multiproc: bool) -> None:
    with Host() as host:
        pids = host.run(start, folder, disable_multiproc=disable_multiproc)
        assert host.process.pid is not None
        segments = shared_memory(pids | {host.process.pid})
        sockets = list(Path(tempfile.gettempdir()).glob(f"skyrl-vllm-{host.process.pid}-*"))
        assert len(sockets) == 1
        assert len(alive(pids)) >= (1 if disable_multiproc else 2)
        host.process.kill()
        assert not left_after(pids, 30)
    assert not sockets[0].exists()
    assert not [segment for segment in segments if segment.exists()]
