"""Messages on a terminal: they fit its width, lose no word, place or advice, and have colours where they are wanted."""

from __future__ import annotations

import io
import re
import sys

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl.cli.command_line.messages import say_error, say_problems
from skyrl.errors import ConfigError, Problem, RunError, render
from skyrl.tree.syntax_errors import malformed

WIDTHS = (40, 60, 80, 120, 200)
TEXT = 'a = "x"\n[trainer]\nepochs = False  # ' + "and a remark that makes the line longer " * 2
CASES: dict[str, ConfigError] = {
    "several": ConfigError(
        [
            Problem(
                path="trainer.policy.optimizer_config.lr", message="'fast' is not a number", location="run.toml:14"
            ),
            Problem(
                path="trainer.policy_mini_batch_size",
                message="300 prompts do not divide trainer.train_batch_size = 1024, so the last step would be smaller",
                hint="nearest divisors: 256 and 512\nor leave it out",
                location="command line, argument 2",
            ),
            Problem(path="", message="a problem without a path", location="argument 1"),
            Problem(path="data.train_data", message="there is no file " + "a/very/long/folder" * 5 + "/train.jsonl"),
        ]
    ),
    "syntax": malformed("folder/run.toml", "TOML", "Invalid value", 3, 10, text=TEXT),
    "warnings": ConfigError(
        [Problem(path="trainer.epochs", message="no effect: " + "because of others " * 9, severity="warning")],
        "Warnings",
    ),
    "one": ConfigError([Problem(path="trainer.epoch", message="no such field; did you mean trainer.epochs?")]),
    "control": ConfigError([Problem(path="a\x1b[31m", message="b\x07 " * 40, hint="c\x1b]0;title", location="d\x1b")]),
    "none": ConfigError([], "Nothing to do"),
}


class Terminal(io.StringIO):
    """Standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def shown(error: BaseException, width: int, monkeypatch: pytest.MonkeyPatch, **environment: str) -> list[str]:
    """The lines that a terminal of this width gets."""
    with monkeypatch.context() as patch:
        terminal = Terminal()
        patch.setattr(sys, "stderr", terminal)
        for name, value in {"COLUMNS": str(width), "NO_COLOR": "", "TERM": "xterm", **environment}.items():
            patch.setenv(name, value)
        say_error(error)
        return terminal.getvalue().splitlines()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("case", CASES)
def test_problems_fit_the_terminal_and_keep_every_word_and_place(
    case: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = CASES[case]
    lines = shown(error, width, monkeypatch, NO_COLOR="1")
    assert "\x1b" not in "".join(lines)
    for line in lines:
        one_word = len(line.split()) == 1
        assert len(line) <= width or one_word or re.match(r"\s+(\d+ \| |\^)", line), line
    assert sorted(" ".join(lines).replace("(", " ").replace(")", " ").split()) == sorted(
        str(error).replace("(", " ").replace(")", " ").split()
    )
    for problem in error.problems:
        if problem.location.isprintable() and problem.location:
            assert any(problem.location in line for line in lines)


def test_a_table_that_fits_is_the_plain_message(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in ("one", "syntax", "none"):
        assert shown(CASES[case], 200, monkeypatch, NO_COLOR="1") == str(CASES[case]).splitlines()


def test_a_narrow_terminal_has_each_message_below_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(CASES["several"], 60, monkeypatch, NO_COLOR="1")[:8] == [
        "This run cannot start (4 problems):",
        "  trainer.policy.optimizer_config.lr  run.toml:14",
        "    'fast' is not a number",
        "  trainer.policy_mini_batch_size  command line, argument 2",
        "    300 prompts do not divide trainer.train_batch_size =",
        "    1024, so the last step would be smaller",
        "    nearest divisors: 256 and 512",
        "    or leave it out",
    ]


@pytest.mark.parametrize("case", CASES)
def test_colours_change_no_text(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for width in WIDTHS:
        coloured = shown(CASES[case], width, monkeypatch)
        assert coloured[0].startswith("\x1b[33m" if case in ("warnings", "none") else "\x1b[31m")
        plain = [click.unstyle(line).rstrip() for line in coloured]
        assert plain == shown(CASES[case], width, monkeypatch, NO_COLOR="1")
        assert "\x1b" not in "".join(shown(CASES[case], width, monkeypatch, TERM="dumb"))


def test_a_pipe_gets_the_plain_message(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    for error in CASES.values():
        say_problems(error.problems, error.title)
        assert capsys.readouterr().err == render(error.problems, error.title) + "\n"


@given(st.text(alphabet="ab .-/", max_size=200), st.integers(20, 100))
def test_a_sentence_is_cut_between_words_alone(text: str, width: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        lines = shown(RunError(text), width, patch)
    assert " ".join(lines).split() == text.split()
    assert all(len(line) <= width or " " not in line.strip() for line in lines)


def test_a_command_to_copy_and_a_secret_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    command = "  skyrl run run.toml trainer.run_path=runs/another_folder trainer.ckpt_path=runs/another_folder"
    secret = "it was refused with these words of the server: authorization: Bearer abcdefghijkl0123456789mnop"
    lines = shown(RunError(f"Use another folder:\n{command}\n{secret}"), 60, monkeypatch)
    assert command in lines
    assert "abcdefghijkl0123456789mnop" not in " ".join(lines)
