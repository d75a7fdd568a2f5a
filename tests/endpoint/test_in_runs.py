"""The endpoint of a run, and of a model alone."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from skyrl.experiments.ppo import BasePPOExp
from skyrl.experiments.preflight import keys_are_there, packages_are_installed
from tests.nano_run import all_metrics, config, train

ENGINE = "generator__inference_engine__"
HELLO: Any = [{"role": "user", "content": "ab"}]


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def test_a_run_serves_its_policy_while_it_trains(nano: Path, tmp_path: Path) -> None:
    port = free_port()
    changes = {f"{ENGINE}enable_http_endpoint": True, f"{ENGINE}http_endpoint_port": port}
    run = config(nano, tmp_path, **changes, **{f"{ENGINE}served_model_name": "mine"})
    answers: list[Any] = []

    def ask() -> None:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0)
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
    with pytest.raises(openai.APIConnectionError):
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0).models.list()


def test_an_endpoint_that_others_reach_needs_a_token(nano: Path, tmp_path: Path) -> None:
    changes = {f"{ENGINE}enable_http_endpoint": True, f"{ENGINE}http_endpoint_host": "0.0.0.0"}
    run = config(nano, tmp_path, **changes)
    (problem,) = keys_are_there({})(run)
    assert problem.path == "generator.inference_engine.http_endpoint_host"
    assert "SKYRL_ENDPOINT_TOKEN" in problem.hint
    assert list(keys_are_there({"SKYRL_ENDPOINT_TOKEN": "secret"})(run)) == []


def test_serve_answers_until_it_is_interrupted(nano: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "skyrl.cli", "serve", str(nano / "model"), "--port", "0"]
    settings = ["generator.inference_engine.backend=torch", "trainer.device=cpu"]
    settings += ["generator.sampling_params.max_generate_length=8"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([*command, *settings], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        url = process.stdout.readline().rsplit(" ", 1)[-1].strip()
        client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
        (model,) = client.models.list()
        answer = client.chat.completions.create(model=model.id, messages=HELLO)
        process.send_signal(signal.SIGINT)
        said = process.stdout.read()
    assert (model.id, process.returncode) == (str(nano / "model"), 0)
    assert answer.usage is not None and 1 <= answer.usage.completion_tokens <= 8
    assert said == "The endpoint has stopped.\n"
    assert list(tmp_path.glob("skyrl-serve-*")) == []


def test_serve_without_the_packages_of_its_extra_says_what_to_install(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config(nano, tmp_path, **{f"{ENGINE}enable_http_endpoint": True})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else object())
    (problem,) = packages_are_installed(run)
    assert (problem.path, problem.hint) == (
        "generator.inference_engine.enable_http_endpoint",
        "pip install 'skyrl[serve]'",
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
