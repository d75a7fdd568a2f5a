"""How long hostile answers hold a thread of the trainer, and by how much what works elsewhere is late.

    python -m tests.envs.grader_times [COUNT [GRADER...]]

Prints a line for each grader over COUNT (1000) hostile answers: exceptions, rewards, the most CPU-seconds that one
answer took of the calling thread and, where a worker or a sandbox with a limit does the work, the seconds by which the
latest answer was behind that limit. No test asserts seconds: they depend on the machine, whose load is printed.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path

from attrs import frozen

from skyrl.config.settings.environment import SearchEnvConfig, Text2SQLEnvConfig
from skyrl.envs import find_env, text2sql
from skyrl.envs.builtin import math_equal
from skyrl.envs.builtin.code import CodeEnv
from skyrl.envs.builtin.math_equal import MathEqual
from skyrl.envs.builtin.search_code import SearchCodeEnv
from skyrl.envs.search import ask_retriever
from skyrl.envs.text2sql import Text2SQLEnv
from skyrl.sandbox.sandbox import ResourceLimits, Sandbox
from tests.envs.hostile import FRAMES, INJECTIONS, NUMBERS, QUERIES, answers, boxes, repeats
from tests.sandbox.endless import NEVER_END

EXTRAS = {"reward_spec": {"ground_truth": "271828"}, "max_turns": 1}
TEXT = ("gsm8k", "gsm8k_multi_turn", "multiply", "aime", "search")
SECONDS = 0.5
"""Limit of a program, and of a query."""


@frozen
class Grader:
    """What grades an answer, and the seconds that work elsewhere may take for it; None: it works in this thread."""

    grade: Callable[[str], float]
    answers: Sequence[str]
    limit: float | None = None


def main() -> None:
    """Measure."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    selected = sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        for name, grader in graders(count, Path(folder)).items():
            if not selected or name in selected:
                print(name, measured(grader), flush=True)


def measured(grader: Grader) -> Mapping[str, object]:
    """Grade every answer once. The first grading starts what it needs and is not counted."""
    grader.grade("1")
    rewards: Counter[float] = Counter()
    raised: Counter[str] = Counter()
    cpu, late = 0.0, 0.0
    for answer in grader.answers:
        started, used = time.monotonic(), time.thread_time()
        try:
            rewards[grader.grade(answer)] += 1
        except Exception as error:  # noqa: BLE001 - all are counted
            raised[f"{type(error).__name__}: {str(error)[:80]}"] += 1
        cpu = max(cpu, time.thread_time() - used)
        if grader.limit is not None:
            late = max(late, time.monotonic() - started - grader.limit)
    seconds = {"most CPU-seconds": round(cpu, 3)} | ({} if grader.limit is None else {"latest": round(late, 2)})
    report = {"answers": len(grader.answers), "exceptions": dict(raised), "rewards": dict(rewards)}
    return report | seconds | {"load": round(os.getloadavg()[0])}


def graders(count: int, folder: Path) -> dict[str, Grader]:
    """Every grader of skyrl that reads an answer, by its name."""
    framed = (frame.format(number) for number in NUMBERS for frame in FRAMES)
    texts = list(dict.fromkeys(islice(chain(answers(), framed, repeats(), INJECTIONS), count)))
    boxed = [f"\\boxed{{{content}}}" for content in boxes(count)]
    sandbox = Sandbox(readable=[folder])
    by_name = {name: Grader(_stepper(name), texts) for name in TEXT}
    retrieve = partial(ask_retriever, SearchEnvConfig(), None)
    by_name["searchcode"] = Grader(lambda answer: SearchCodeEnv(EXTRAS, retrieve, sandbox).step(answer).reward, texts)
    equal = MathEqual()
    by_name["math-verify"] = Grader(
        lambda answer: float(equal(answer.removeprefix("\\boxed{")[:-1], "271828")), boxed, math_equal.SECONDS
    )
    programs = list(islice(_programs(count), count))
    for called in (False, True):
        name = "code, called" if called else "code"
        by_name[name] = Grader(_code(sandbox, is_called=called), programs, SECONDS)
    text2sql.SOLUTION_SECONDS = SECONDS  # of the query; the process around it has a second more
    by_name["text2sql"] = Grader(_sql(folder, sandbox), list(islice(cycle(_solutions()), count)), SECONDS + 1)
    return by_name


def _stepper(name: str) -> Callable[[str], float]:
    return lambda answer: find_env(name)(EXTRAS).step(answer).reward


def _programs(count: int) -> Iterator[str]:
    """Answers with programs that print what is hostile to a comparison, that never end, or that are none."""
    texts = list(answers())
    for number, text in enumerate(cycle(texts)):
        hostile = (*NUMBERS, *(repeat for repeat in repeats() if len(repeat) < 20_000))
        printed = hostile[number % len(hostile)]
        endless = list(NEVER_END.values())[number // 10 % len(NEVER_END)]
        yield text if number % 10 < 4 else f"```python\n{endless if number % 10 == 4 else f'print({printed!r})'}\n```"


def _code(sandbox: Sandbox, *, is_called: bool) -> Callable[[str], float]:
    test = {"fn_name": "f", "input": [1], "output": 0.5} if is_called else {"input": "", "output": "5"}
    limits = ResourceLimits(seconds=SECONDS)
    return lambda answer: CodeEnv({"reward_spec": {"ground_truth": [test]}}, sandbox, limits).step(answer).reward


def _sql(folder: Path, sandbox: Sandbox) -> Callable[[str], float]:
    file = folder / "shop" / "shop.sqlite"
    file.parent.mkdir()
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE t (a INTEGER)")
    connection.close()
    extras = {"reward_spec": {"ground_truth": "SELECT 1"}, "db_id": "shop", "max_turns": 1}
    settings = Text2SQLEnvConfig(db_path=str(folder))
    return lambda answer: Text2SQLEnv(extras, settings, sandbox).step(answer).reward


def _solutions() -> list[str]:
    queries = [f"<think>a</think><solution>{query}</solution>" for query in QUERIES]
    return [*queries, *(f"<think>a</think><solution>{answer}</solution>" for answer in answers())]


if __name__ == "__main__":
    main()
