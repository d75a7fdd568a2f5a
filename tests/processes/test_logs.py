from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from skyrl.processes.logs import end_of, last_line, last_words

ROOT = Path(__file__).parents[2]


def run(log: Path, code: str) -> str:
    """What a process leaves in its log that runs this code; nothing of it reaches its own output."""
    head = (
        "import logging, os, sys, warnings; from pathlib import Path; from skyrl.processes.logs import RankLog\n"
        "log = RankLog(Path(sys.argv[1]), 'policy-3')\n"
    )
    ended = subprocess.run([sys.executable, "-c", head + code, str(log)], cwd=ROOT, capture_output=True, text=True)
    assert ended.stdout == ended.stderr == ""
    return log.read_text()


def test_everything_that_a_process_says_is_in_its_log_in_order(tmp_path: Path) -> None:
    code = "print('one'); os.write(1, b'two\\n'); os.system('echo three'); print('four', file=sys.stderr)"
    assert run(tmp_path / "logs" / "policy-3.log", code) == "one\ntwo\nthree\nfour\n"


def test_a_line_has_the_drivers_time_rank_and_step(tmp_path: Path) -> None:
    code = (
        "log.step, log.offset = 12, 3600.0\n"
        "record = logging.makeLogRecord({'name': 'a.b', 'levelname': 'INFO', 'levelno': 20, 'msg': 'said'})\n"
        "record.created = 1_700_000_000.25\n"  # 2023-11-14T22:13:20.25Z
        "logging.getLogger().handle(record)"
    )
    assert run(tmp_path / "log", code) == "2023-11-14T23:13:20.250Z policy-3 step 12 INFO a.b: said\n"


def test_a_large_log_begins_anew_with_the_next_step_also_for_processes_that_write_to_it(tmp_path: Path) -> None:
    code = (
        "import subprocess; import skyrl.processes.logs; skyrl.processes.logs.LARGEST = 10\n"
        "echo = [sys.executable, '-uc', 'import sys; [print(line, end=\"\") for line in sys.stdin]']\n"
        "child = subprocess.Popen(echo, stdin=subprocess.PIPE, text=True)\n"
        "for step, text in enumerate(('short', 'a longer line', 'the longest line', 'b')):\n"
        "    log.begin_step(step); print(text); os.system('echo c')\n"
        "child.communicate('last words\\n')"
    )
    assert run(tmp_path / "log", code) == "b\nc\nlast words\n"
    assert (tmp_path / "log.1").read_text() == "the longest line\nc\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1"]


def test_warnings_are_lines_of_the_log(tmp_path: Path) -> None:
    assert "policy-3 step 0 WARNING py.warnings: " in run(tmp_path / "log", "warnings.warn('beware')")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("os._exit(7)", "it called os._exit(7)"),
        ("import ctypes; ctypes.string_at(0)", "Segmentation fault"),
        ("os.abort()", "Aborted"),
        ("os.kill(os.getpid(), 9)", ""),
        ("print('all is well')", ""),
    ],
)
def test_the_log_says_how_a_process_ended_that_could_say_it(tmp_path: Path, code: str, words: str) -> None:
    run(tmp_path / "log", code)
    assert last_words(tmp_path / "log") == words


def test_the_last_line_is_the_last_that_says_something(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("first\nlast\n\n")
    assert last_line(tmp_path / "log") == "last"
    assert last_line(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [("one two", "one two"), (" one\n two ", "one two"), ("one two three four", "... three four")],
)
def test_of_a_long_text_the_last_whole_words_are_shown(text: str, expected: str) -> None:
    assert end_of(text, 12) == expected
