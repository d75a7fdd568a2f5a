"""A secret that somebody wrote into a configuration stays there: nothing prints or stores it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from skyrl.cli.main import main
from skyrl.cli.preparing.config import config
from skyrl.config import compose, load, resolve
from skyrl.config.loading.stored import stored_form
from skyrl.errors import ConfigError
from skyrl.tree.masking import HIDDEN, is_secret_name, masked

TABLES = (
    "generator.inference_engine.engine_init_kwargs",
    "generator.sampling_params.additional_kwargs",
    "generator.chat_template_kwargs",
    "trainer.policy.model_config_kwargs",
)
NAMES = (
    "token", "hf_token", "password", "db_passwd", "aws_secret_access_key", "api_key", "X-Api-Key", "apiKey",
    "Authorization", "client_secret", "Cookie", "signature",
)  # fmt: skip
FORMS = (
    "https://user:{}@host/x.parquet",
    "https://bucket.s3.amazonaws.com/x?X-Amz-Signature={}&y=1",
    "https://bucket.s3.amazonaws.com/x?X-Amz-Credential={}",
    "https://storage.googleapis.com/x?X-Goog-Signature={}",
    "https://x.blob.core.windows.net/x?sv=1&sig={}",
    "https://host/x?token={}",
    "https://host/x?api_key={}",
    "Bearer {}",
)


def planted() -> tuple[list[str], dict[str, Any]]:
    """100 canaries, and overrides that hold one each: by name at three depths, and by form in lists and texts."""
    numbers = itertools.count()
    canaries: list[str] = []

    def canary() -> str:
        canaries.append(f"cAnArY{next(numbers):03}x")
        return canaries[-1]

    values: dict[str, Any] = {
        table: {
            **{name: canary() for name in NAMES},
            "headers": {name: canary() for name in NAMES[:6]},
            "credentials": {"of": ["anybody", {"who": canary()}]},
        }
        for table in TABLES
    }
    values["data.train_data"] = [form.format(canary()) for form in FORMS]
    values["data.val_data"] = [form.format(canary()) for form in FORMS]
    values["environment.skyrl_gym.reward_model.url"] = FORMS[0].format(canary())
    values["trainer.run_name"] = "hf_" + (key := canary()) * 2 + "0" * 8
    assert key
    values["trainer.resume_path"] = FORMS[1].format(canary())
    values["trainer.ckpt_best_metric"] = f"sk-{canary()}-{'0' * 8}"
    while len(canaries) < 100:
        values[TABLES[0]][f"service_{len(canaries)}_api_key"] = canary()
    return canaries, values


def written(folder: Path, values: dict[str, Any]) -> Path:
    """The values as a file of nested tables."""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        table = nested
        for name in path.split(".")[:-1]:
            table = table.setdefault(name, {})
        table[path.rpartition(".")[2]] = value
    (folder / "run.json").write_text(json.dumps(nested))
    return folder / "run.json"


@pytest.mark.parametrize("command", ["run", "doctor", "plan"])
def test_what_a_command_refuses_holds_none_of_100_canaries(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command as it is started, whose output has no secrets: its refusals quote what they found."""
    canaries, values = planted()
    with pytest.raises(SystemExit) as ended:
        main([command, str(written(tmp_path, values)), "trainer.device=cpu", "trainer.policy.model.path=owner/name"])
    output = "".join(capsys.readouterr())
    assert ended.value.code == 2
    assert "train_data" in output or command == "plan"
    assert [canary for canary in canaries if canary in output] == []


def test_nothing_that_prints_or_stores_a_configuration_holds_one_of_100_canaries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    canaries, values = planted()
    assert len(canaries) == 100
    file = written(tmp_path, values)
    outputs = [json.dumps(stored_form(resolve(load([file]))))]
    commands = [
        ["show"], ["show", "--format", "yaml"], ["show", "--format", "toml"], ["show", "--sparse"],
        ["show", "--origins"], ["show", "--derived"], ["show", "--written"],
        *(["explain", path] for path in values), *(["explain", path, "--json"] for path in values),
        ["explain", f"{TABLES[0]}.hf_token"], ["explain", f"{TABLES[0]}.headers.password"],
    ]  # fmt: skip
    for words in commands:
        result = CliRunner().invoke(config, [*words, str(file)])
        assert result.exception is None or isinstance(result.exception, SystemExit), words
        outputs.append(result.output)
    with pytest.raises(SystemExit):
        main(["config", "check", "--json", str(file)])
    answer, messages = capsys.readouterr()
    outputs += [answer, messages]
    assert json.loads(answer)["problems"]
    (tmp_path / "empty.json").write_text("{}")
    for words in (["diff"], ["diff", "--json"]):
        outputs.append(CliRunner().invoke(config, [*words, str(tmp_path / "empty.json"), str(file)]).output)
    leaked = {canary for canary in canaries for text in outputs if canary in text}
    assert leaked == set()
    assert all(HIDDEN in text for text in (outputs[0], outputs[1], outputs[-1]))


def test_a_stored_run_that_is_read_again_is_refused_where_a_secret_was(tmp_path: Path) -> None:
    written = {"generator.chat_template_kwargs": {"hf_token": "abc", "headers": {"Cookie": "abc"}}}
    (tmp_path / "config.json").write_text(json.dumps(stored_form(resolve(load([], written)))))
    with pytest.raises(ConfigError) as caught:
        compose([tmp_path])
    hidden = [problem for problem in caught.value.problems if HIDDEN in problem.message]
    assert [problem.path.rpartition("kwargs.")[2] for problem in hidden] == ["hf_token", "headers.Cookie"]
    assert all("config.json" in problem.location for problem in hidden)


@pytest.mark.parametrize(
    "name",
    [
        "pad_token",
        "eos_token",
        "stop_token",
        "max_tokens",
        "stop_token_ids",
        "tokenizer",
        "author",
        "key",
        "sort_key",
    ],
)
def test_names_of_tokens_and_keys_of_other_kinds_are_no_secrets(name: str) -> None:
    assert not is_secret_name(name)
    assert masked({name: "plain"}) == {name: "plain"}


def test_a_reference_says_where_a_secret_is_and_stays() -> None:
    assert masked({"token": "env:HF_TOKEN", "n_token": 3}) == {"token": "env:HF_TOKEN", "n_token": 3}
