"""The endpoint of a run, and of a model alone."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from skyrl.cli.serving.serve import serve
from skyrl.errors import UserError
from skyrl.experiments.ppo import BasePPOExp
from skyrl.experiments.preflight import keys_are_there, packages_are_installed
from skyrl.inference.adapters import shared, write_adapter
from skyrl.installation import install_command
from tests.experiments.forked import RunSession, tiny
from tests.nano_run import all_metrics, config, train

ENGINE = "generator__inference_engine__"
HELLO: Any = [{"role": "user", "content": "ab"}]


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@pytest.mark.long
def test_a_run_serves_its_policy_while_it_trains(nano: Path, tmp_path: Path) -> None:
    port = free_port()
    changes = {f"{ENGINE}enable_http_endpoint": True, f"{ENGINE}http_endpoint_port": port}
    run = config(nano, tmp_path, **changes, **{f"{ENGINE}served_model_name": "mine"})
    answers: list[Any] = []

    def ask() -> None:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0) as client:
            answers.append([model.id for model in client.models.list()])
            answers.append(client.chat.completions.create(model="mine", messages=HELLO, max_tokens=3).usage)

    class Asked(BasePPOExp):
        def begin_recording(self) -> None:
            thread.start()

        async def close(self) -> None:
            await asyncio.to_thread(thread.join)
            await super().close()

    experiment, thread = Asked(run), threading.Thread(target=ask)
    assert experiment.run()
    assert answers[0] == ["mine"]
    assert answers[1].prompt_tokens == 3  # two letters and the end of the message
    with (
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0) as client,
        pytest.raises(openai.APIConnectionError),
    ):
        client.models.list()


@pytest.mark.long
def test_idle_connections_cannot_end_a_run_by_its_limit_of_open_files(nano: Path, tmp_path: Path) -> None:
    """The run may open 256 files; somebody holds as many connections to its endpoint as it gets, from start to end."""
    port = free_port()
    changes = {
        f"{ENGINE}enable_http_endpoint": True,
        f"{ENGINE}http_endpoint_port": port,
        "trainer__max_training_steps": 4,
    }
    session = RunSession(tiny(nano, tmp_path, **changes), tmp_path)
    assert session.process.pid is not None
    resource.prlimit(session.process.pid, resource.RLIMIT_NOFILE, (256, 256))
    connections: list[socket.socket] = []
    opened = 0
    while session.process.exitcode is None:
        try:
            connections.append(socket.create_connection(("127.0.0.1", port), 1))
            opened += 1
        except OSError:
            time.sleep(0.05)  # it does not listen yet, or has enough
        if len(connections) == 400:
            connections.pop(0).close()
            time.sleep(0.01)
    for connection in connections:
        connection.close()
    assert session.ends() == 0, session.said
    assert opened > 256
    assert "Traceback" not in session.said and "Too many open files" not in session.said
    assert all_metrics(tmp_path)[-1]["step"] == 4


def test_an_endpoint_that_others_reach_needs_a_token(nano: Path, tmp_path: Path) -> None:
    changes = {f"{ENGINE}enable_http_endpoint": True, f"{ENGINE}http_endpoint_host": "0.0.0.0"}
    run = config(nano, tmp_path, **changes)
    (problem,) = keys_are_there({})(run)
    assert problem.path == "generator.inference_engine.http_endpoint_host"
    assert "SKYRL_ENDPOINT_TOKEN" in problem.hint
    assert list(keys_are_there({"SKYRL_ENDPOINT_TOKEN": "secret"})(run)) == []


@pytest.mark.long
def test_serve_answers_until_it_is_interrupted(nano: Path, tmp_path: Path) -> None:
    adapter = stored_adapter(nano / "model", tmp_path / "run")
    command = [sys.executable, "-m", "skyrl.cli", "serve", str(nano / "model"), "--port", "0"]
    command += ["--adapter", f"math={adapter.parent}"]
    settings = ["generator.inference_engine.backend=torch", "trainer.device=cpu"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([*command, *settings], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        url = process.stdout.readline().rsplit(" ", 1)[-1].strip()
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
            model, other = client.models.list()
            answer = client.chat.completions.create(model=model.id, messages=HELLO)
            drawn = [logprobs_of(client, name) for name in (model.id, other.id, model.id)]
        process.send_signal(signal.SIGINT)
        output = process.stdout.read()
    assert (model.id, other.id, process.returncode) == (str(nano / "model"), "math", 0)
    assert drawn[0] == pytest.approx(drawn[2], abs=1e-4)
    assert drawn[0] != pytest.approx(drawn[1], abs=1e-2)
    assert model.model_extra == {"max_model_len": 64}  # the model has fewer positions than the default answer
    assert answer.usage is not None and 1 <= answer.usage.completion_tokens <= 32
    assert output == "The endpoint has stopped.\n"
    assert list(tmp_path.glob("skyrl-serve-*")) == []


def stored_adapter(model: Path, run: Path) -> Path:
    """An adapter for this model, as a run stores it."""
    learner: Any = AutoModelForCausalLM.from_pretrained(model)
    layers = {name: module for name, module in learner.named_modules() if name.endswith("q_proj")}
    noise = torch.Generator().manual_seed(1)
    tensors = {
        f"base_model.model.{name}.lora_{part}.weight": torch.randn(shape, generator=noise)
        for name, layer in layers.items()
        for part, shape in (("A", (2, layer.in_features)), ("B", (layer.out_features, 2)))
    }
    write_adapter(shared(tuple(tensors.items()), rank=2, alpha=8), run / "adapter")
    return run / "adapter"


def logprobs_of(client: openai.OpenAI, name: str) -> list[float]:
    """Log-probabilities of an answer that is drawn with a seed."""
    answer = client.completions.create(model=name, prompt=[1, 2, 3], seed=1, logprobs=1, max_tokens=4)
    assert answer.model == name and answer.choices[0].logprobs is not None
    return list(answer.choices[0].logprobs.token_logprobs or ())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--adapter", "math"], "--adapter math: give a name and a folder"),
        (["--adapter", "math=nowhere"], "--adapter math: nowhere contains no adapter"),
        (["--adapter", "math={adapter}", "--adapter", "math={adapter}"], "two adapters have this name"),
        (["--adapter", "{model}={adapter}"], "this is the name of the model itself"),
        (["--adapter", "math={adapter}", "--takes-weights"], "pass only one of the two"),
        (
            ["--adapter", "math={adapter}", "generator.inference_engine.rollout_dtype=int8"],
            "does not work with 8-bit weights",
        ),
    ],
)
def test_serve_refuses_adapters_that_it_cannot_serve(nano: Path, tmp_path: Path, args: list[str], message: str) -> None:
    adapter = stored_adapter(nano / "model", tmp_path)
    words = [arg.format(adapter=adapter, model=nano / "model") for arg in args]
    settings = ["generator.inference_engine.backend=torch", "trainer.device=cpu"]
    result = CliRunner().invoke(serve, [str(nano / "model"), *words, *settings])
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


def test_serve_without_the_packages_of_its_extra_says_what_to_install(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config(nano, tmp_path, **{f"{ENGINE}enable_http_endpoint": True})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else object())
    (problem,) = packages_are_installed(run)
    assert (problem.path, problem.hint) == (
        "generator.inference_engine.enable_http_endpoint",
        install_command("serve"),
    )


AGENT = '''
import openai

async def solve(task, base_url, api_key, model):
    """One question, and another behind the answer."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = list(task["messages"])
        for more in ("a", None):
            answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=2)
            text = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": more}]
    return float(text.isascii())
'''


@pytest.mark.long
def test_a_run_trains_and_evaluates_an_agent(nano: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    agent = {"environment__agent__function": f"{tmp_path}/agent.py:solve", "environment__agent__reward": "returned"}
    train(nano, tmp_path, **agent, generator__max_input_length=40, trainer__max_training_steps=3)
    records = all_metrics(tmp_path)
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    last = records[-1]
    assert last["environment/agent_requests"] == 2.0
    assert last["environment/agent_rows"] == 1.0
    assert "eval/all/avg_score" in last
