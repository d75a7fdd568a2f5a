"""Files that nobody meant to convert are refused in one message, or converted; none ends in a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.errors import SkyRLError
from skyrl.interop.areal.convert import convert_keys
from skyrl.interop.skyrl.scripts import convert_overrides
from skyrl.interop.values import without_references

MANY = 2_000
"""Settings of one kind: enough that quadratic work would be noticed."""


@pytest.mark.sampled(6)
@pytest.mark.parametrize("house", ["skyrl", "areal"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.sh", b""),
        ("a.sh", bytes(range(256)) * 20),
        ("a.yaml", bytes(range(256)) * 20),
        ("a.yaml", b"- 1\n"),
        ("a.yaml", b"[" * 5000),
        ("a.json", b'{"a":' * 5000 + b"1" + b"}" * 5000),
        ("a.sh", b"python x trainer.run_name='\n\"\n"),
        ("a.sh", b"python x trainer.epochs=" + b"[" * 3000),
        ("a.sh", b"python x trainer.run_name=" + b"${A:-" * 20_000 + b"}" * 20_000),
        ("a.sh", b"python x trainer.run_name=" + b"$(" * 20_000),
        ("a.sh", b"python x " + b"a." * 30_000 + b"=1"),
        ("a.sh", b"A=(\n" * 3000),
        ("a.sh", b"A=$A$A\n" * 1000 + b"python x trainer.run_name=$A"),
        ("a.yaml", b"a: ${a}\nb: ${c}\nc: ${b}\n"),
        ("a.yaml", b"trainer: 1\nactor: 2\nmodel: 3\n"),
        ("a.yaml", b"actor: {backend: 'fsdp:d" + b"9" * 400 + b"', path: [1]}\nrollout: {backend: null}\n"),
        ("a.yaml", b"cluster: {n_gpus_per_node: text}\nallocation_mode: 7\nactor: {ppo_n_minibatches: 0}\n"),
        ("a.yaml", b"actor: {kl_ctl: text, gae_lambda: [], adv_norm: {mean_level: 7}}\ngconfig: {n_samples: x}\n"),
        ("a.yaml", b"strategy: []\nmodel: 1\ntrain_datasets: 3\ntrain_dataset_splits: {a: 1}\nlogger: {a: 1}\n"),
    ],
)
def test_hostile_files_raise_no_traceback(
    name: str, content: bytes, house: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content)
    for words in (["convert", name, "--from", house], ["check", name]):
        result = CliRunner().invoke(cli, ["config", *words])
        assert result.exception is None or isinstance(result.exception, SkyRLError | SystemExit), result.exc_info


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "key", ["trainer.x{}", "trainer.epochs", "x{}.y", "model.x{}", "generator.inference_engine.x{}"]
)
def test_thousands_of_settings_each_have_a_line(key: str) -> None:
    overrides = [f"{key.format(number)}=1" for number in range(MANY)]
    assert len(convert_overrides(overrides).lines) == MANY


@pytest.mark.long
def test_similar_names_are_searched_in_the_first_lines_only() -> None:
    lines = convert_keys({f"actor.pth{number}": 1 for number in range(MANY)}).lines
    suggested = ["did you mean" in line.reason for line in lines]
    assert len(lines) == MANY
    assert suggested[0] and not any(suggested[200:])


def test_references_that_repeat_each_other_are_filled_once() -> None:
    values = {f"k{number}": f"${{k{number + 1}}}" * 3 for number in range(300)}
    assert without_references(values | {"k300": "end"})[0]["k299"] == "endendend"
