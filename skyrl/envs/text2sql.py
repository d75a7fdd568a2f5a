"""Questions answered with SQL: the policy may try queries, then submits its solution.

    <think>...</think><sql>SELECT ...</sql>             -> <observation> of the result, and another turn
    <think>...</think><solution>SELECT ...</solution>   -> the reward

The reward rule of SkyRL-Gym's text2sql: -1 for an answer of another form, 1 if the solution gives the same set of rows
as the gold query, else 0. A gold query that cannot be run is an error of the row, and counts as a failure, not as 0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from skyrl.config.settings.environment import Text2SQLEnvConfig
from skyrl.envs.env import Env, EnvStep
from skyrl.envs.rows import first_between, ground_truth, max_turns, tokenizable
from skyrl.errors import TaskError
from skyrl.sandbox.sandbox import ResourceLimits, Sandbox

TOOL_SECONDS, SOLUTION_SECONDS = 5.0, 30.0
SHOWN_ROWS, SHOWN_CHARACTERS = 50, 9000
MOST_ROWS = 100_000
"""Largest number of rows of a result that is compared."""

LONGEST_ANSWER = 200_000
"""Largest number of characters of a whole conversation; a longer one counts as having the wrong form."""

_FOLDERS = ("", "SynSQL-2.5M/databases", "spider/database", "spider/test_database", "bird/train/train_databases")
_NAME = re.compile(r"[\w][\w .\-]*")
_TAGS = re.compile(r"</?(think|sql|observation)\b", re.IGNORECASE)


class Text2SQLEnv(Env):
    """The row's `ground_truth` is the gold query, and its column `db_id` names the database."""

    def __init__(self, extras: Mapping[str, Any], settings: Text2SQLEnvConfig, sandbox: Sandbox) -> None:
        super().__init__(extras)
        self._gold: str = ground_truth(extras, "text2sql")
        self._db = database(Path(settings.db_path).expanduser(), extras.get("db_id"))
        self._max_turns = max_turns(extras, default=5)
        self._sandbox = sandbox
        if not sandbox.may_open(self._db):
            raise TaskError(
                f"text2sql: programs in the sandbox tier {sandbox.tier!r} cannot open {self._db}: it has to be below "
                "environment.skyrl_gym.text2sql.db_path, and if root started the run, everybody must be able to read it"
            )
        self._turns = 0
        self._said = ""
        self._counts = {"queries": 0.0, "failed_queries": 0.0}

    def step(self, action: str) -> EnvStep:
        self._turns += 1
        self._said += action
        if ("<solution>" in action and "</solution>" in action) or self._turns >= self._max_turns:
            return EnvStep(reward=self._reward(), done=True)
        left = self._max_turns - self._turns
        observation = f"\n\n<observation>{self._look(action)}\n({left} turns left)</observation>\n\n"
        self._said += "<observation></observation>"  # content of the database must not affect the check of the form
        return EnvStep(reward=0.0, done=False, observations=({"role": "user", "content": observation},))

    def get_metrics(self) -> dict[str, float]:
        return {**self._counts, "turns": float(self._turns)}

    def _look(self, action: str) -> str:
        query = first_between(action, "<sql>", "</sql>")
        if query is None:
            return "There was neither a query nor a solution in this turn. Think, then write one of them in its tags."
        self._counts["queries"] += 1
        result = self._ask(query, TOOL_SECONDS, SHOWN_ROWS)
        self._counts["failed_queries"] += "error" in result
        return result_text(result)

    def _reward(self) -> float:
        query = solution(self._said)
        if query is None:
            return -1.0
        ours, gold = self._ask(query, SOLUTION_SECONDS, MOST_ROWS), self._ask(self._gold, SOLUTION_SECONDS, MOST_ROWS)
        if "error" in gold or gold["cut"]:
            reason = gold.get("error", f"it gives more than {MOST_ROWS} rows")
            raise TaskError(f"text2sql: the gold query fails on {self._db}: {reason}")
        return float("error" not in ours and not ours["cut"] and _row_set(ours["rows"]) == _row_set(gold["rows"]))

    def _ask(self, query: str, seconds: float, rows: int) -> dict[str, Any]:
        return ask_database(self._sandbox, self._db, query, seconds, rows)


def ask_database(sandbox: Sandbox, db: Path, query: str, seconds: float, rows: int) -> dict[str, Any]:
    """Columns and at most `rows` rows of a read-only query, or its `error`."""
    request = {"db": str(db), "query": query, "rows": rows, "seconds": seconds}
    limits = ResourceLimits(
        seconds=seconds + 1, cpu_seconds=int(seconds) + 2, memory_bytes=512 << 20, output_bytes=32 << 20
    )
    ran = sandbox.run(_query_program(), json.dumps(request).encode(), limits)
    if ran.ended != "exit" or ran.code != 0:
        return {"error": "the query took too long" if ran.ended == "timeout" else "the query took too much"}
    result: dict[str, Any] = json.loads(ran.stdout)
    return result


def database(folder: Path, name: object) -> Path:
    """The file of the database that a row names. Raises `TaskError` if it is not found below `folder`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise TaskError(f"text2sql needs the name of a database in the column db_id, not {name!r:.80}")
    candidates = [folder / below / path for below in _FOLDERS for path in (f"{name}/{name}.sqlite", f"{name}.sqlite")]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    raise TaskError(f"text2sql: no database {name} below {folder} (environment.skyrl_gym.text2sql.db_path)")


def solution(conversation: str) -> str | None:
    """The SQL query of a well-formed conversation, which ends with thoughts and one `<solution>` without other tags;
    else None.
    """
    if len(conversation) > LONGEST_ANSWER or conversation.count("<solution>") != 1:
        return None
    before, _, rest = conversation.partition("<solution>")
    if rest.count("</solution>") != 1:
        return None
    query = rest.partition("</solution>")[0]
    thought = conversation.find("<think>")
    if _TAGS.search(query) or thought < 0 or "</think>" not in conversation[thought:]:
        return None
    answers = before.split("</observation>")[1:]
    return query if all(answer.lstrip().lower().startswith("<think>") for answer in answers) else None


def result_text(result: Mapping[str, Any]) -> str:
    """The text of a result that the policy sees."""
    if "error" in result:
        return tokenizable(f"Error: {result['error']}")
    lines = [" | ".join(map(str, result["columns"]))]
    lines += [" | ".join("NULL" if value is None else str(value) for value in row) for row in result["rows"]]
    text = tokenizable("\n".join(lines))
    if len(text) > SHOWN_CHARACTERS:
        return f"{text[:SHOWN_CHARACTERS]}\n... cut at {SHOWN_CHARACTERS} characters"
    return f"{text}\n... cut at {SHOWN_ROWS} rows" if result["cut"] else text


def _row_set(rows: Sequence[Sequence[Any]]) -> set[tuple[Any, ...]]:
    """The rows as a set, compared by value: 4 equals 4.0, 0.0 equals -0.0, and no number equals a text."""
    return {tuple(value["blob"].encode() if isinstance(value, dict) else value for value in row) for row in rows}


@cache
def _query_program() -> str:
    return Path(__file__).with_name("sqlite_query.py").read_text(encoding="utf-8")
