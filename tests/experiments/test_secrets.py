"""Twenty secrets, planted wherever a run may come across one: none is in what it writes or prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl.errors import ConfigError
from skyrl.processes.redaction import redacted, redacted_tree
from tests.experiments.forked import TINY, _context
from tests.experiments.phases import command
from tests.nano_run import config, overrides

pytestmark = pytest.mark.xdist_group("forked")

IN_VARIABLES = {
    "WANDB_API_KEY": "canary01wandb",
    "HF_TOKEN": "hf_canary02token",
    "OPENAI_API_KEY": "sk-canary03/with+signs=",
    "AWS_SECRET_ACCESS_KEY": 'canary04aws\\back"quote',
    "AWS_SESSION_TOKEN": "canary05session",
    "DB_PASSWORD": "canary06 with spaces",
    "MY_CREDENTIALS": "canary07credentials",
    "GITHUB_TOKEN": "ghp_canary08",
    "TRACKER_COOKIE": "canary09cookie",
    "HTTPS_PROXY": "http://proxyuser:canary10proxy@127.0.0.1:9",
    "PROJECT_KEY": "canary11project",
    "RUN_SECRET": "canary12üñí",
}
IN_THE_CONFIGURATION = {
    "environment.skyrl_gym.search.search_url": "http://someone:canary13search@127.0.0.1:9/retrieve",
    "environment.skyrl_gym.llm_as_a_judge.base_url": "https://canary14judge@127.0.0.1:9/v1",
    "trainer.project_name": "env:PROJECT_KEY",
    "trainer.run_name": "env:RUN_SECRET",
}
IN_TEXTS = """
import os, sys, traceback, logging

HEADERS = {"Authorization": "Bearer canary15bearer", "X-Api-Key": "canary16header", "Cookie": "session=canary17cookie"}

def judge(completion, ground_truth, **others):
    print("all that is there:", dict(os.environ), HEADERS)
    logging.getLogger("judge").warning("curl -H 'Authorization: Basic canary18basic' %s", os.environ["OPENAI_API_KEY"])
    if BROKEN:
        raise RuntimeError(
            f"401 for https://canary19user:canary20word@127.0.0.1/judge with {HEADERS} and {os.environ['HF_TOKEN']}"
        )
    return float(bool(completion) and completion.isascii())
"""
CANARIES = [f"canary{number:02}" for number in range(1, 21)]


def written(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for file in folder.rglob("*"):
        if file.is_file():
            yield file, file.read_bytes()


def run(nano: Path, out: Path, *, broken: bool, **changes: Any) -> str:
    (out.parent / "judges").mkdir(exist_ok=True)
    judge = out.parent / "judges" / f"{out.name}.py"
    judge.write_text(f"BROKEN = {broken}\n{IN_TEXTS}", encoding="utf-8")
    out.mkdir(exist_ok=True)
    values = overrides(nano, out, **{**TINY, "trainer__max_training_steps": 2, "trainer__eval_interval": 1, **changes})
    values |= IN_THE_CONFIGURATION | {"environment.env_class": f"{judge}:judge"}
    words = [f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in values.items()]
    process = _context.Process(target=command, args=(words, IN_VARIABLES, out))
    process.start()
    process.join(240)
    said = (out / "said").read_text(encoding="utf-8")
    assert process.exitcode == (1 if broken else 0), said
    return said


@pytest.mark.parametrize("broken", [False, True])
def test_twenty_secrets_are_nowhere_in_what_a_run_leaves(nano: Path, tmp_path: Path, broken: bool) -> None:
    said = run(nano, tmp_path / "out", broken=broken)
    assert "all that is there" in said and said.count("***") > 20
    assert ("401 for https://***@127.0.0.1/judge" in said) == broken
    for file, content in written(tmp_path / "out"):
        assert [canary for canary in CANARIES if canary.encode() in content] == [], file
    if not broken:  # and what is stored without them is still the same run
        again = run(nano, tmp_path / "out", broken=broken, trainer__max_training_steps=3)
        assert "Going on after step 2" in again


def test_what_was_hidden_cannot_be_used_by_mistake(nano: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\*\*\* stands where a secret was: give it again"):
        config(nano, tmp_path, environment__skyrl_gym__search__search_url="http://***@127.0.0.1/retrieve")


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("see https://user:word@host/path?a=b", "see https://***@host/path?a=b"),
        ("Authorization: Bearer abcdefghijkl", "Authorization: ***"),
        ('{"x-api-key": "abc", "n": 3}', '{"x-api-key": "***", "n": 3}'),
        ("sent bearer abcdefgh.ijkl", "sent bearer ***"),
        ("user@host, http://host/a@b, 3:4", "user@host, http://host/a@b, 3:4"),
        ("the token after the key", "the token after the key"),
    ],
)
def test_secrets_are_known_by_their_form(text: str, clean: str) -> None:
    assert redacted(text) == clean


def test_secrets_are_known_by_their_value(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    socket = str(tmp_path / "agent")
    monkeypatch.setenv("SOME_API_KEY", "abcdefgh")
    monkeypatch.setenv("SHORT_KEY", "abc")
    monkeypatch.setenv("SSH_AUTH_SOCK", socket)
    assert redacted(f"xabcdefghx abc {socket}") == f"x***x abc {socket}"
    assert redacted_tree({"abcdefgh": [1, ["abcdefgh", None]], "n": [1.5]}) == {"***": [1, ["***", None]], "n": [1.5]}
