"""A reward model as the reward of reinforcement learning: in process, and behind `skyrl serve-reward`."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.config import SkyRLTrainConfig, compose
from skyrl.envs import find_env
from skyrl.envs.services.reward_service import reward_app
from skyrl.errors import ModelError
from skyrl.experiments.ppo import BasePPOExp
from skyrl.models.saving.reward_model import RewardModel
from tests.nano_run import overrides
from tests.supervised_run import records, train, word_of, write

pytestmark = pytest.mark.xdist_group("judge")

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "XYZ"}]


@pytest.fixture(scope="module")
def judge(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model that likes capitals."""
    folder = tmp_path_factory.mktemp("judge")
    rng = random.Random(0)
    rows = [{"prompt": "a", "chosen": word_of(rng, "ABCXYZ"), "rejected": word_of(rng, "abcxyz")} for _ in range(48)]
    data = write(folder / "pairs.jsonl", rows)
    train(nano, folder, "reward_model", train_datasets=(data,), num_epochs=4)
    return str(folder / "run" / "model")


@pytest.mark.long
def test_a_reward_model_as_the_reward_of_reinforcement_learning_is_learned_from(
    nano: Path, tmp_path: Path, judge: str
) -> None:
    assert_learns(nano, tmp_path, environment__skyrl_gym__reward_model__path=judge)


def assert_learns(nano: Path, folder: Path, **changes: Any) -> None:
    """Answers are worth more to the judge at the end of a run than at its beginning."""
    changes = {
        **changes,
        "environment__env_class": "reward_model",
        "trainer__epochs": 3,
        "trainer__eval_interval": -1,
        "trainer__eval_before_train": False,
        "generator__n_samples_per_prompt": 8,
    }
    config: SkyRLTrainConfig = compose([], overrides(nano, folder, **changes)).config
    BasePPOExp(config).run()
    name = "reward/avg_raw_reward"
    rewards = [record[name] for record in records(folder) if name in record]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


def test_a_reward_service_gives_the_scores_of_the_model_and_wants_its_token(judge: str) -> None:
    from starlette.testclient import TestClient

    model = RewardModel(judge)
    client = TestClient(reward_app(model, judge, token="secret-of-this-test"))
    key = {"Authorization": "Bearer secret-of-this-test"}
    assert client.post("/score", json={"chats": [CHAT]}, headers=key).json() == {"scores": model.scores([CHAT])}
    assert client.post("/score", json={"chats": [CHAT]}).status_code == 401
    refused = client.post("/score", json={"chats": [[{"role": "user"}]]}, headers=key)
    assert refused.status_code == 400 and "'role' and 'content'" in refused.json()["error"]
    assert client.get("/health", headers=key).json() == {"model": judge}


def test_the_environment_asks_a_service_over_http(judge: str) -> None:
    import threading

    import uvicorn

    from skyrl.config import RewardModelEnvConfig, SkyRLGymConfig
    from skyrl.processes.service import listen

    model = RewardModel(judge)
    with listen("127.0.0.1", 0, None, "SKYRL_REWARD_TOKEN") as bound:
        server = uvicorn.Server(uvicorn.Config(reward_app(model, judge), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/score"
        gym = SkyRLGymConfig(reward_model=RewardModelEnvConfig(url=url))
        env = find_env("reward_model", gym)({})
        env.init(({"role": "user", "content": "a"},))
        reward = env.step("XYZ").reward
        server.should_exit = True
        thread.join()
    assert reward == pytest.approx(model.scores([CHAT])[0])


@contextmanager
def served(judge: str, *options: str, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command in a process of its own: the address that it printed, and the process, which ends with the block."""
    command = [sys.executable, "-m", "skyrl.cli", "serve-reward", judge, "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1], process
        finally:
            process.kill()


def ends(process: subprocess.Popen[str], number: signal.Signals) -> tuple[str, int]:
    """What it says after this signal, and its status."""
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    return output, process.returncode


@pytest.mark.long
def test_the_command_scores_chats_refuses_what_is_none_and_stops_when_told(judge: str) -> None:
    with served(judge, SKYRL_REWARD_TOKEN="secret-of-this-test") as (url, process):
        key = {"Authorization": "Bearer secret-of-this-test"}
        with httpx.Client(headers=key, timeout=60) as client:
            scores = client.post(url, json={"chats": [CHAT, CHAT]}).json()["scores"]
            for content, message in {
                b"{": "Expecting property name",
                b"[]": "a JSON object",
                b'{"chats": []}': "a list of 1 to 256 chats",
                b'{"chats": [[]]}': "a chat is a list of messages",
                b'{"chats": [[{"role": "user", "content": 3}]]}': "the texts 'role' and 'content'",
                json.dumps(
                    {"chats": [[CHAT[0], {"role": "assistant", "content": "a" * 999}]]}
                ).encode(): "takes 1 to 64",
                json.dumps({"chats": [CHAT[:1]]}).encode(): "no message is from the assistant",
                b"[" * 100_000: "maximum recursion depth",
                b" " * (5 << 20): "the body is longer",
            }.items():
                refused = client.post(url, content=content)
                assert refused.status_code in (400, 413) and message in refused.json()["error"], (
                    content[:60],
                    refused.text,
                )
            assert client.get(url).status_code == 405
            assert client.post(url, json={"chats": [CHAT]}, headers={"Authorization": "no"}).status_code == 401
            assert client.post(url, json={"chats": [CHAT]}).status_code == 200  # after all of that
        assert ends(process, signal.SIGINT) == ("The reward service has stopped.\n", 0)
    assert scores == pytest.approx(RewardModel(judge).scores([CHAT, CHAT]), abs=1e-5)


@pytest.mark.long
def test_a_reward_model_behind_the_command_is_learned_from(nano: Path, tmp_path: Path, judge: str) -> None:
    with served(judge) as (url, process):
        assert_learns(nano, tmp_path, environment__skyrl_gym__reward_model__url=url)
        ends(process, signal.SIGTERM)


def test_the_command_refuses_what_is_no_reward_model_in_one_sentence(nano: Path) -> None:
    result = CliRunner().invoke(cli, ["serve-reward", str(nano / "model"), "--port", "0"])
    assert isinstance(result.exception, ModelError)
    assert "is not a reward model: it has no head that outputs one number" in str(result.exception)
