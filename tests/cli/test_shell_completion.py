"""Completion of words and values, in a bash and a zsh that a terminal talks to."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl.cli.command_line.arguments import values_of
from skyrl.config.loading.kinds import KINDS, root_of
from skyrl.config.settings.environment import ENVIRONMENTS
from skyrl.config.settings.estimators import ADVANTAGE_ESTIMATORS
from skyrl.config.settings.losses import POLICY_LOSSES
from skyrl.tree.classes import leaf_paths

ROOT = Path(__file__).parents[2]


def test_a_field_with_few_values_completes_to_them() -> None:
    assert values_of("trainer.strategy") == ["fsdp", "fsdp2", "deepspeed", "megatron"]
    assert values_of("generator.inference_engine.backend") == ["vllm", "torch", "http", "sglang"]
    assert values_of("trainer.logger")[:2] == ["console", "wandb"]
    assert values_of("trainer.algorithm.use_kl_loss") == ["true", "false"]
    assert values_of("trainer.algorithm.advantage_estimator") == list(ADVANTAGE_ESTIMATORS)
    assert values_of("trainer.algorithm.policy_loss_type") == list(POLICY_LOSSES)
    assert values_of("environment.env_class") == list(ENVIRONMENTS)
    assert values_of("strategy", ["kind=sft"]) == ["fsdp", "fsdp2", "deepspeed", "megatron"]
    assert values_of("trainer.epochs") == values_of("no.field") == values_of("strategy", ["not_there.toml"]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_whose_schema_has_an_enumeration_completes(kind: str) -> None:
    for path, attribute in leaf_paths(root_of(kind)):
        if "Literal[" in str(attribute.type) and "Mapping" not in str(attribute.type):
            texts = re.findall(r"'([^']+)'", str(attribute.type))
            assert set(texts) <= set(values_of(path, [f"kind={kind}"])), path


START = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], ""),
    "zsh": (
        ["zsh", "-f", "-i"],
        "unset zle_bracketed_paste; bindkey -e; setopt nolistambiguous; autoload -Uz compinit; compinit -uD; ",
    ),
}
"""Shell -> its command without files of the user, and what it needs before it completes anything."""


class Shell:
    """An interactive shell with the completion of skyrl, in a terminal."""

    def __init__(self, name: str, folder: Path) -> None:
        command, before = START[name]
        (folder / "skyrl").write_text(f'#!/bin/sh\nexec {sys.executable} -m skyrl.cli "$@"\n')
        (folder / "skyrl").chmod(0o755)
        path = f"{folder}:/usr/bin:/bin"
        environment = {"PATH": path, "PYTHONPATH": str(ROOT), "TERM": "dumb", "PS1": "", "HOME": str(folder)}
        options = ("enable-bracketed-paste off", "page-completions off", "show-all-if-ambiguous on")
        (folder / ".inputrc").write_text("".join(f"set {option}\n" for option in options))
        self._terminal, inside = pty.openpty()
        settings = termios.tcgetattr(inside)
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(inside, termios.TCSANOW, settings)
        self._process = subprocess.Popen(
            command, stdin=inside, stdout=inside, stderr=inside, env=environment, cwd=folder, start_new_session=True
        )
        os.close(inside)
        os.write(self._terminal, f'{before}eval "$(skyrl completion {name})"\n'.encode())

    def completed(self, line: str) -> str:
        """The line after TAB, as the command then gets its words: each in brackets."""
        return self._output_of(f"{line}\t\x01printf '<%s>' \x05").rpartition("\n")[2]

    def offered(self, line: str) -> set[str]:
        """The words that TAB lists."""
        return set(self._output_of(f"{line}\t\x01: \x05").split())

    def _output_of(self, keys: str) -> str:
        """What is printed until the command that these keys write has run."""
        os.write(self._terminal, f"{keys}; echo ' :'end:\n".encode())
        text = ""
        while " :end:" not in text:
            ready, _, _ = select.select([self._terminal], [], [], 240)
            assert ready, text
            text += os.read(self._terminal, 65536).decode(errors="replace").replace("\r", "")
        return text.partition(" :end:")[0]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)


@pytest.fixture(scope="module", params=[name for name in START if shutil.which(name)])
def shell(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "training.toml").touch()
    (folder / "rows").mkdir()
    (folder / "rows" / "of mine.jsonl").touch()
    shell = Shell(request.param, folder)
    yield shell
    shell.close()


@pytest.mark.sampled(18)
@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("skyrl run trainer.strategy=meg", "<skyrl><run><trainer.strategy=megatron>"),
        ("skyrl run trainer.algorithm.policy_loss_type=cis", "<skyrl><run><trainer.algorithm.policy_loss_type=cispo>"),
        ("skyrl config check preset:one", "<skyrl><config><check><preset:one-process>"),
        ("skyrl run data.train_data=training.t", "<skyrl><run><data.train_data=training.toml>"),
        ("skyrl run training.t", "<skyrl><run><training.toml>"),
        ("skyrl run data.train_data=rows/of", "<skyrl><run><data.train_data=rows/of mine.jsonl>"),
        ("skyrl eval rows generator.inference_engine.back", "<skyrl><eval><rows><generator.inference_engine.backend=>"),
    ],
)
def test_a_word_is_completed(shell: Shell, typed: str, words: str) -> None:
    assert shell.completed(typed) == words


@pytest.mark.long
def test_values_paths_and_files_are_offered_together(shell: Shell) -> None:
    assert {"trainer.", "training.toml"} <= shell.offered("skyrl run tr")
    values = {value.removeprefix("trainer.strategy=") for value in shell.offered("skyrl run trainer.strategy=")}
    assert {"fsdp", "fsdp2", "deepspeed", "megatron"} <= values
