"""The system of a file is recognised by its settings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.errors import ConfigError
from skyrl.interop.recognised import recognised_system
from tests.interop.corpora import RECORDED

VERL = "python3 -m verl.trainer.main_ppo data.train_batch_size=8 actor_rollout_ref.model.path=a/b\n"


def read(name: str) -> Any:
    return json.loads((RECORDED / f"{name}.json").read_text())


def words(script: Mapping[str, Any]) -> str:
    return f"python -m {script['entrypoint']} " + " ".join(f"'{word}'" for word in script["overrides"])


def tables(keys: Iterable[str]) -> str:
    return json.dumps(dict.fromkeys(keys, 1))


CORPORA: list[tuple[str, str, Callable[[], list[str]], Counter[str]]] = [
    ("skyrl", "a.sh", lambda: [*map(words, read("skyrl_overrides_hydra_era")["scripts"])], Counter(skyrl=75)),
    (
        "skyrl",
        "a.sh",
        lambda: [
            words(entry) for entry in read("skyrl_overrides_2026_08") if "skyrl.train" in str(entry["entrypoint"])
        ],
        Counter(skyrl=45),
    ),
    ("areal", "a.yaml", lambda: [*map(tables, read("areal_yaml_keys").values())], Counter(areal=15)),
    ("trl", "a.yaml", lambda: [*map(tables, read("trl_options_2026_07").values())], Counter(trl=15)),
    ("verl", "a.yaml", lambda: [*map(tables, read("verl_options_2026_01").values())], Counter(verl=16)),
]


@pytest.mark.parametrize(("name", "texts", "expected"), [corpus[1:] for corpus in CORPORA], ids=range(len(CORPORA)))
def test_published_files_are_recognised(
    name: str, texts: Callable[[], list[str]], expected: Counter[str], tmp_path: Path
) -> None:
    systems: Counter[str] = Counter()
    for text in texts():
        (tmp_path / name).write_text(text)
        systems[recognised_system(str(tmp_path / name))] += 1
    assert systems == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "seed: 1\n", "may be of AReaL or SkyRL or TRL: name the system with --from (areal, skyrl, trl)"),
        ("a.yaml", "mine: 2\nours: 3\n", "is not recognised as a file of AReaL, prime-rl, SkyRL, TRL, verl"),
        ("a.sh", "python train.py\n", "is not recognised as a file of AReaL, prime-rl, SkyRL, TRL, verl"),
        ("a.sh", "python -m verl.x && python -m areal.y\n", "a.sh may be of AReaL or verl"),
        ("a.sh", "uv run rl @ rl.toml\n", "this is a prime-rl script, which skyrl does not convert"),
        ("a.toml", "[trainer]\nepochs = 1\n", "is a configuration of skyrl's own already"),
    ],
)
def test_a_file_of_no_system_or_of_several_is_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as refused:
        recognised_system(str(tmp_path / name))
    assert message in " ".join(
        f"{problem.path} {problem.message}: {problem.hint}" for problem in refused.value.problems
    )


def test_convert_says_which_system_it_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(VERL)
    result = CliRunner().invoke(cli, ["config", "convert", "run.sh", "--to", "run.toml", "--json"])
    assert result.exit_code == 0
    assert result.stderr == "run.sh is a file of verl, by its settings; --from chooses another system.\n"
    assert json.loads(result.stdout)["result"]["from"] == "verl"
    explicit_result = CliRunner().invoke(
        cli, ["config", "convert", "run.sh", "--to", "2.toml", "--from", "verl", "--json"]
    )
    assert explicit_result.stderr == ""
