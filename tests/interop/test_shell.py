"""Shell scripts are read as Bash reads them: a stub of each program receives the words that are read."""

from __future__ import annotations

import contextlib
import sys
from functools import cache
from pathlib import Path

import pytest

from skyrl.errors import ConfigError
from skyrl.interop.shell.scripts import Script, read_script
from skyrl.interop.shell.unknown import is_known
from skyrl.interop.shell.variables import LONGEST
from skyrl.interop.shell.words import calculated
from skyrl.sandbox.sandbox import Sandbox
from tests.interop.stubs import differences, from_outside, received

SYSTEMS = {
    "skyrl": (
        "uv run --isolated --extra vllm -m skyrl.train.entrypoints.main_base",
        "trainer.epochs=",
        "data.train_data=",
    ),
    "verl": ("python3 -m verl.trainer.main_ppo", "trainer.total_epochs=", "+data.train_files="),
    "areal": ("python3 examples/math/gsm8k_rl.py --config gsm8k.yaml", "total_train_epochs=", "train_dataset.path="),
    "trl": ("accelerate launch --num_processes 2 grpo.py", "--num_train_epochs=", "--dataset_name="),
}
"""System -> its program, a setting of a number and a setting of a text, which the forms call RUN, NUMBER and TEXT."""

_KNOWN, _UNDECIDED = (Path(__file__).parent / "shell_forms.txt").read_text().split("\n## ")[1:]


def forms(part: str) -> dict[str, str]:
    """Name of a form -> its script."""
    return {section.partition("\n")[0]: section.partition("\n")[2] for section in part.split("\n### ")[1:]}


FORMS = {**forms(_KNOWN), "windows lines": "N=1\r\nRUN \\\r\n  NUMBER$N\r\n"}
"""Scripts all of whose words are known."""

UNDECIDED = forms(_UNDECIDED)
"""Scripts with words or branches that only running them would tell."""


def written(form: str, system: str) -> str:
    run, number, text = SYSTEMS[system]
    return form.replace("RUN", run).replace("NUMBER", number).replace("TEXT", text)


CASES = [(name, system) for name in {**FORMS, **UNDECIDED} for system in SYSTEMS]


@cache
def all_read() -> dict[tuple[str, str], tuple[Script, list[list[str]]]]:
    """Each script as it is read, and what the stubs of its programs received, all in one shell."""
    scripts = {case: written({**FORMS, **UNDECIDED}[case[0]], case[1]) for case in CASES}
    read = {case: read_script(text) for case, text in scripts.items()}
    sandbox = Sandbox()
    try:
        texts = [(scripts[case].replace("\r", ""), from_outside(read[case])) for case in CASES]
        calls = received(texts, sandbox)
    finally:
        sandbox.close()
    assert calls is not None
    return {case: (read[case], case_calls) for case, case_calls in zip(CASES, calls, strict=True)}


@pytest.mark.parametrize(("name", "system"), CASES)
def test_what_is_read_is_what_programs_receive(name: str, system: str) -> None:
    script, calls = all_read()[name, system]
    assert differences(script, calls) == []
    assert any(call[0] == SYSTEMS[system][0].split()[0] for call in calls)
    if name in FORMS:
        assert all(is_known(word) for command in script.commands for word in command.words)
        assert all(command.is_certain for command in script.commands) and not script.undecided


def words_of(text: str) -> list[list[str]]:
    return [command.texts for command in read_script(text).commands]


def refusal(text: str) -> str:
    """Why a script is refused; empty if it is read."""
    try:
        read_script(text)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("letter", ["\xa0", "\xa1", "\xc0", "\xff", "\u0416", "\u6f22", "\U0001f600", "\U0010fffd"])
def test_letters_beyond_ascii_are_kept(letter: str) -> None:
    """The grammar's scanner crashes at them: the text that it gets has none above 255."""
    one, two = f"{letter}{letter}a{letter}", f"\xa1\xc0{letter}\xff"
    text = f"A={one}\nrun '{two}' \"$A b\" --x={one} ${{A/{letter}/-}} <<EOF\n{letter}\nEOF\n"
    assert words_of(text) == [["run", two, f"{one} b", f"--x={one}", f"-{letter}a{letter}"]]


@pytest.mark.parametrize("script", ["echo ${00}", "echo ${0\u00b2}", "shift \u00b2", "exit \u00b2", "echo ${\u0661}"])
def test_what_only_looks_like_a_number_is_read_or_refused(script: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(read_script(script), Script)


def test_at_least_as_many_forms_as_public_scripts_use() -> None:
    assert len(CASES) >= 150


@pytest.mark.parametrize(
    ("text", "assumed"),
    [
        ("python x a=${N:-4}", {"N": "4"}),
        (': "${N:=4}"\npython x a=$N', {"N": "4"}),
        ('[ "$DEBUG" = 1 ] && A=1\npython x a=$A', {"DEBUG": "false"}),
        ("python x $MORE", {"MORE": "no words"}),
        ("python x a=$((N + 1))", {"N": "0"}),
        ("python x a=${1:-8}", {"$1": "8"}),
        ("if [ -v N ]; then A=1; fi\npython x a=1", {"N": "not set"}),
        ("N=3\npython x a=${N:-4} b=$M", {}),
    ],
)
def test_what_is_assumed_to_be_unset_is_told(text: str, assumed: dict[str, str]) -> None:
    assert dict(read_script(text).assumed) == assumed


def test_an_assumption_holds_in_the_lines_before_it() -> None:
    assert words_of('python x a="$N"\npython x a=${N:-4}') == [["python", "x", "a="], ["python", "x", "a=4"]]


@pytest.mark.parametrize(
    ("text", "undecided"),
    [
        ("a=1\nif [ -f x ]; then a=2; fi", [(2, "[ -f x ]")]),
        ("case $(uname) in Linux) a=1;; esac", [(1, "$(uname)")]),
        ("for i in *.txt $(ls); do a=1; done", [(1, "for i in *.txt $(ls); do a=1; done")]),
        ("command -v uv || a=1", [(1, "command -v uv")]),
        ("while kill -0 $PID; do sleep 1; done", [(1, "while kill -0 $PID; do sleep 1; done")]),
    ],
)
def test_a_condition_that_only_the_machine_decides_is_told_with_its_line(
    text: str, undecided: list[tuple[int, str]]
) -> None:
    assert list(read_script(text).undecided) == undecided


def test_what_differs_between_branches_is_unknown_and_what_does_not_is_kept() -> None:
    [[*words]] = words_of("a=1\nif [ -f x ]; then a=2 b=3; else b=3; fi\npython x a=$a b=$b")
    assert words == ["python", "x", "a=$(a of line 2)", "b=3"]


def test_a_branch_that_leaves_the_script_is_taken_not_to_happen() -> None:
    [command] = read_script("if [ ! -f x ]; then a=2; exit 1; fi\npython x a=${a:-1}").commands
    assert (command.texts, command.is_certain) == (["python", "x", "a=1"], False)


def test_scripts_that_are_read_by_the_script_are_named() -> None:
    assert read_script("source env.sh\n. ./more.sh a\npython x").sourced == ((1, "env.sh"), (2, "./more.sh a"))


def test_the_line_of_a_command_is_that_of_its_first_word() -> None:
    script = read_script('\npython a \\\n  b=1\nbash -c "\npython c"\nf() {\npython d; }\nf\n')
    assert [command.line for command in script.commands] == [2, 4, 7]


@pytest.mark.parametrize(
    "script",
    ["", "'", '"', "a='b\nc'", "${${${", "A=(", "\\", "\x00", "x=" + "${A:-" * 5000, "`", "$((", "<<EOF", "if"],
)
def test_no_text_is_too_broken_to_be_read_or_refused(script: str) -> None:
    assert "not understood" in (message := refusal(script)) or "cannot be followed" in message or words_of(script) == []


@pytest.mark.parametrize(
    "script",
    [
        "f() { f; }\nf",
        "A=x\n" + "A=$A$A\n" * 40,
        "while true; do :; done",
        "for ((;;)); do :; done",
        'eval "$(echo \'eval \\"$X\\"\')"',
        "f() { f; f; }\nf",
        'A=\'eval "$A"\'\neval "$A"',
    ],
)
def test_a_script_that_does_not_end_is_left(script: str) -> None:
    message = refusal(script)
    assert "cannot be followed to its end" in message or sum(map(len, words_of(script))) < LONGEST


def test_without_the_grammar_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tree_sitter_bash", None)
    with pytest.raises(ConfigError, match=r"is not installed[\s\S]*\[convert\]"):
        read_script("python x")


@pytest.mark.parametrize(
    ("sum_", "value"),
    [
        ("1024 * 2", 2048),
        ("(a + b) * 2", 26),
        ("a / b", 3),
        ("-7 / 2", -3),
        ("-7 % 4", -3),
        ("a ** 2 % 7", 2),
        ("a > b && !c", 1),
        ("a == b || 0", 0),
        ("a ? 5 : 6", 5),
        ("1 << 4 | 1", 17),
        ("010 + 0x10", 24),
        ("unset + 1", 1),
        ("", 0),
        ("a / 0", None),
        ("loop", None),
        ("a , b", None),
        ("2 ** 70", None),
    ],
)
def test_a_sum_is_calculated_as_a_shell_does(sum_: str, value: int | None) -> None:
    assert calculated(sum_, lambda name: {"a": "10", "b": "3", "loop": "loop + 1"}.get(name, "")) == value
