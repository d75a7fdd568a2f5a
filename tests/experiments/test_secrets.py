"""A hundred secrets, planted wherever a run may come across one: none is in what it writes or prints."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl.errors import ConfigError
from skyrl.processes.redaction import redacted, redacted_tree
from skyrl.tree.masking import masked
from tests.experiments.forked import TINY
from tests.experiments.phases import command
from tests.forkserver import CONTEXT
from tests.long_cases import long_except
from tests.nano_run import config, overrides

pytestmark = pytest.mark.xdist_group("forked")

SERVICES = ("MLFLOW", "SWANLAB", "COMET", "NEPTUNE", "REDIS", "MONGO", "SMTP", "LDAP", "VAULT", "S3")
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
    "AWS_SECRET_ACCESS_KEY_2": "/canary21/begins/with+a/slash",
    "DB_PASS": "canary22database",
    "MYSQL_PWD": "canary23mysql",
    "AZURE_STORAGE_CONNECTION_STRING": "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=canary24azure==;E=core",
    "SLACK_WEBHOOK_URL": "https://hooks.example.org/services/T0/B0/canary25slack",
    "SENTRY_DSN": "https://canary26sentry@127.0.0.1/1",
    "GITLAB_PAT": "canary27gitlab",
    "PRIVATE_NOTE": "canary28private",
    "AZURE_SAS": "canary29signature",
    **{
        f"{service}_{kind}": f"canary{30 + 4 * number + index}of{service.lower()}"
        for number, service in enumerate(SERVICES)
        for index, kind in enumerate(("API_KEY", "AUTH_TOKEN", "PASS", "CLIENT_SECRET"))
    },
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

FORMS = [
    "Authorization: Basic canary70basic==", "authorization=token canary71token", "X-Api-Key: canary72key",
    '{"x-auth-token": "canary73auth"}', "Cookie: canary74cookie", "sent bearer canary75bearer",
    "AccountName=a;AccountKey=canary76account==;x=1", "SharedAccessKey=canary77shared",
    "Server=s;Password=canary78word;",
    "uid=a;pwd=canary79pwd;", "dsn: host=a password=canary80dsn", "https://a/b?sig=canary81signature&x=1",
    "https://hooks.slack.com/services/T0/B0/canary82slack", "https://discord.com/api/webhooks/1/canary83discord",
    "https://x.webhook.office.com/webhookb2/canary84teams", "https://api.telegram.org/bot12:canary85telegram/send",
    "ghp_canary86aaaaaaaaaaaaaaaaaaaa", "github_pat_canary87aaaaaaaaaaaaaaaa", "glpat-canary88aaaaaaaaaaaaaa",
    "hf_canary89aaaaaaaaaaaaaaaaaaa", "sk-canary90aaaaaaaaaaaaaaaaaaa", "sk-proj-canary91aaaaaaaaaaaaa",
    "xoxb-canary92aaaaaaaaaaaaaaa", "-----BEGIN RSA PRIVATE KEY-----\\ncanary93/a+b=\\n-----END RSA PRIVATE KEY-----",
    "postgres://user:canary94@db/x", "redis://:canary95@cache:6379", "amqp://canary96:x@queue", "s3://canary97:key@bucket",
    "client_secret=canary98client", "api_key: 'canary99api'", "proxy-authorization: Bearer canary100proxy",
]

def judge(completion, ground_truth, **others):
    print("all that is there:", dict(os.environ), HEADERS)
    logging.getLogger("judge").warning("curl -H 'Authorization: Basic canary18basic' %s", os.environ["OPENAI_API_KEY"])
    if BROKEN:
        raise RuntimeError(
            f"401 for https://canary19user:canary20word@127.0.0.1/judge with {HEADERS} and {os.environ['HF_TOKEN']}"
        )
    for text in FORMS:
        print(text)
        logging.getLogger("judge").warning("%s", text)
    return float(bool(completion) and completion.isascii())
"""
FORMS_IN_TEXTS = [
    text
    for text in ast.literal_eval(IN_TEXTS.partition("FORMS = ")[2].partition("\n]\n")[0] + "]")
    if not text.startswith(("Cookie", "api_key"))
]
"""Headers of other names are hidden in logs alone: an answer may mention cookies."""

CANARIES = [f"canary{number:02}" for number in range(1, 101)]

TRACKED: dict[str, Any] = {
    "trainer__logger": ["console", "tensorboard", "wandb"],
    "trainer__trackers": {
        "tags": ["env:PROJECT_KEY"],
        "notes": "env:RUN_SECRET",
        "finish_seconds": 240.0,
        "wandb": {"mode": "offline"},
    },
}
"""Trackers whose packages fit beside the others; the others are in `test_trackers_elsewhere.py`."""


def written(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for file in folder.rglob("*"):
        if file.is_file():
            yield file, file.read_bytes()


def with_notes(nano: Path, out: Path) -> Path:
    """The data of the run, with a column that somebody has written a key into."""
    rows = map(json.loads, (nano / "train.jsonl").read_text(encoding="utf-8").splitlines())
    file = out.parent / "judges" / "noted.jsonl"
    note = f"use {IN_VARIABLES['WANDB_API_KEY']} and ghp_canary86aaaaaaaaaaaaaaaaaaaa"
    file.write_text("".join(json.dumps(row | {"note": note}) + "\n" for row in rows), encoding="utf-8")
    return file


def run(nano: Path, out: Path, *, broken: bool, verb: str = "run", **changes: Any) -> str:
    (out.parent / "judges").mkdir(exist_ok=True)
    judge = out.parent / "judges" / f"{out.name}.py"
    judge.write_text(f"BROKEN = {broken}\n{IN_TEXTS}", encoding="utf-8")
    out.mkdir(exist_ok=True)
    values = overrides(nano, out, **{**TINY, "trainer__max_training_steps": 2, "trainer__eval_interval": 1, **changes})
    values |= {"trainer.recording": "jsonl", "data.train_data": [str(with_notes(nano, out))]}
    values |= IN_THE_CONFIGURATION | {"environment.env_class": f"{judge}:judge"}
    words = [f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in values.items()]
    return command_output(words, out, verb, exit_code=1 if broken else 0)


def command_output(words: list[str], out: Path, *verbs: str, exit_code: int = 0) -> str:
    """What a command prints in a process whose environment holds the secrets."""
    process = CONTEXT.Process(target=command, args=(words, IN_VARIABLES, out, verbs))
    process.start()
    process.join(240)
    output = (out / "said").read_text(encoding="utf-8")
    assert process.exitcode == exit_code, output
    return output


@pytest.mark.parametrize("broken", long_except([False, True], True))
def test_a_hundred_secrets_are_nowhere_in_what_a_run_leaves(nano: Path, tmp_path: Path, broken: bool) -> None:
    tracked: dict[str, Any] = {} if broken else TRACKED
    output = run(nano, tmp_path / "out", broken=broken, **tracked)
    assert "all that is there" in output and output.count("***") > 20
    assert ("401 for https://***@127.0.0.1/judge" in output) == broken
    for file, content in written(tmp_path / "out"):
        assert [canary for canary in CANARIES if canary.encode() in content] == [], file
    if not broken:
        recorded = next((tmp_path / "out" / "run" / "recording").glob("*.jsonl")).read_text(encoding="utf-8")
        assert "use *** and ghp_***" in recorded
        for kept in ("tensorboard/events.out.*", "wandb/offline-run-*/run-*.wandb", "trackers/*.json"):
            assert list((tmp_path / "out" / "run").glob(kept)), output
    if not broken:  # and what is stored without them is still the same run
        resumed_output = run(nano, tmp_path / "out", broken=broken, trainer__max_training_steps=3)
        assert "Continuing after step 2" in resumed_output


def test_a_hundred_secrets_are_nowhere_in_what_a_look_at_a_run_prints(nano: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(nano, out, broken=False)
    looked = {
        "doctor": run(nano, tmp_path / "another", broken=False, verb="doctor"),
        "ckpt list": command_output([str(out / "checkpoints")], out, "ckpt", "list"),
        "ckpt verify": command_output([str(out / "checkpoints")], out, "ckpt", "verify"),
        "config show": command_output([str(out / "run" / "config.json")], out, "config", "show"),
    }
    assert "all that is there" in looked["doctor"]  # the reward was called, and printed
    for output in looked.values():
        assert output and [canary for canary in CANARIES if canary in output] == []


def test_what_was_hidden_cannot_be_used_by_mistake(nano: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\*\*\* is a placeholder for a secret: give the secret again"):
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
        ("max_tokens=1024 password= x", "max_tokens=1024 password= x"),
        ("a basic understanding, a task-specific sk-", "a basic understanding, a task-specific sk-"),
    ],
)
def test_secrets_are_known_by_their_form(text: str, clean: str) -> None:
    assert redacted(text) == clean


def test_secrets_are_known_by_their_value(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    socket = str(tmp_path / "agent")
    monkeypatch.setenv("SOME_API_KEY", "abcdefgh")
    monkeypatch.setenv("SHORT_KEY", "abc")
    monkeypatch.setenv("SSH_AUTH_SOCK", socket)
    monkeypatch.setenv("A_TOKEN_PATH", "/run/not/there/yet")
    monkeypatch.setenv("PWD", "/some/folder")
    assert redacted(f"xabcdefghx abc {socket}") == f"x***x abc {socket}"
    assert redacted("/run/not/there/yet /some/folder") == "/run/not/there/yet /some/folder"
    monkeypatch.setenv("SOME_API_KEY", "/another/secret")
    assert redacted("abcdefgh /another/secret") == "abcdefgh ***"
    tree = {"/another/secret": [1, ["/another/secret", None]], "n": [1.5]}
    assert redacted_tree(tree) == {"***": [1, ["***", None]], "n": [1.5]}


@pytest.mark.parametrize(
    "text",
    [
        *FORMS_IN_TEXTS,
        "https://bucket.s3.amazonaws.com/x?X-Amz-Signature=canary01signature",
        "key AIzacanary02aaaaaaaaaaaaaaa",
    ],
)
def test_a_form_that_is_hidden_in_logs_is_hidden_in_configurations_and_recordings(text: str) -> None:
    assert "canary" in text
    assert "canary" not in json.dumps(masked({"a": [text]}))
    assert "canary" not in json.dumps(redacted_tree({"a": [text]}))
    assert "canary" not in redacted(text)


@pytest.mark.parametrize(
    "key",
    ["Authorization", "X-Api-Key", "api_token", "secret_key", "cookie", "passwd", "webhook_url", "connection_string"],
)
def test_a_key_that_is_hidden_in_recordings_is_hidden_in_configurations(key: str) -> None:
    assert redacted_tree({key: "a"}) == masked({key: "a"}) == {key: "***"}


def test_secrets_are_known_by_their_key_in_tables() -> None:
    headers = {
        "Authorization": "a",
        "X-Api-Key": "b",
        "key": "c",
        "api_key": "env:NAME",
        "password": "",
        "n": {"passwd": "d"},
    }
    assert redacted_tree(headers) == headers | {"Authorization": "***", "X-Api-Key": "***", "n": {"passwd": "***"}}
