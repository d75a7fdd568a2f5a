from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path

import pytest

from skyrl.config.settings.environment import SkyRLGymConfig, Text2SQLEnvConfig
from skyrl.envs import find_env
from skyrl.envs.builtin.program_tests import ProgramTest
from skyrl.envs.text2sql import Text2SQLEnv, database, result_text, solution
from skyrl.errors import TaskError
from skyrl.sandbox.sandbox import Sandbox
from tests.envs.hostile import FRAMES, NUMBERS, QUERIES, UNITS, answers, endless, repeats

GRADERS = {"gsm8k": 0.0, "gsm8k_multi_turn": 0.2, "multiply": 0.5, "aime": 0.0, "search": 0.0}
"""What each gives at most to a wrong answer in the right form."""

EXTRAS = {"reward_spec": {"ground_truth": "271828"}, "max_turns": 1}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", GRADERS)
def test_hostile_answers_neither_run_nor_pay(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hostile = list(answers())
    assert len(hostile) >= 500
    assert [answer[:80] for answer in hostile if find_env(name)(EXTRAS).step(answer).reward > GRADERS[name]] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("name", GRADERS)
def test_a_thousand_more_hostile_answers_neither_raise_nor_pay(name: str) -> None:
    hostile = [*repeats(), *(frame.format(number) for number in (*NUMBERS, *UNITS) for frame in FRAMES)]
    assert len(hostile) >= 1000
    graded = {answer[:80]: find_env(name)(EXTRAS).step(answer).reward for answer in hostile}
    assert {answer: reward for answer, reward in graded.items() if reward > GRADERS[name]} == {}


WANTED: tuple[tuple[object, str | None], ...] = (
    *(("5", None), ("0.5", None), ("1e3", None), ("5 0.5\n7", None), ("0", None), (5, "f"), (0.5, "f"), (True, "f")),
    *(([0.5, 5], "f"), ({"a": 0.5}, "f"), ("5", "f"), (None, "f"), ([[0.5]], "f")),
)


@pytest.mark.parametrize(("expected", "function"), WANTED)
def test_hostile_output_of_a_program_is_wrong_and_never_raises(expected: object, function: str | None) -> None:
    test = ProgramTest(stdin="", expected=expected, function=function)
    plain = [*NUMBERS, *(repeat for repeat in repeats() if len(repeat) < 13_000)]
    framed = [
        frame.replace("NUMBER", number)
        for number in NUMBERS
        for frame in ("[NUMBER, 5]", '{"a": NUMBER}', "[[NUMBER]]", "NUMBER 0.5\n7")
    ]
    assert [printed[:80] for printed in (*plain, *framed) if test.passes(printed)] == []


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", GRADERS)
def test_the_time_to_grade_grows_with_the_length_of_an_answer_and_no_faster(name: str) -> None:
    """It ends: an hour for each answer would be more than the watch of pytest allows."""
    assert [answer[:80] for answer in endless() if find_env(name)(EXTRAS).step(answer).reward > GRADERS[name]] == []


def test_the_time_to_find_a_query_grows_with_the_length_of_an_answer_and_no_faster() -> None:
    for answer in endless():
        solution(answer)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Databases below a folder of their own: `shop`, of one table."""
    file = tmp_path / "databases" / "shop" / "shop.sqlite"
    file.parent.mkdir(parents=True)
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE t (a INTEGER, b TEXT)")
        connection.executemany("INSERT INTO t VALUES (?, ?)", [(number, f"b{number}") for number in range(100)])
    connection.close()
    for part in (file.parents[1], file.parent):
        part.chmod(0o755)
    return tmp_path / "databases"


def sql_env(folder: Path, gold: str = "SELECT a FROM t WHERE a < 2") -> Text2SQLEnv:
    extras = {"reward_spec": {"ground_truth": gold}, "db_id": "shop", "max_turns": 3}
    env = find_env("text2sql", SkyRLGymConfig(text2sql=Text2SQLEnvConfig(db_path=str(folder))))(extras)
    assert isinstance(env, Text2SQLEnv)
    return env


def test_a_query_is_tried_and_the_solution_is_rewarded_by_its_rows(folder: Path) -> None:
    env = sql_env(folder)
    first = env.step("<think>look</think><sql>SELECT a, b FROM t LIMIT 1</sql>")
    assert "a | b\n0 | b0" in first.observations[0]["content"]
    last = env.step("<think>so</think><solution>SELECT a FROM t WHERE a IN (1, 0) ORDER BY a DESC</solution>")
    assert (first.reward, first.done, last.reward, last.done) == (0.0, False, 1.0, True)
    assert env.get_metrics() == {"queries": 1.0, "failed_queries": 0.0, "turns": 2.0}


def test_a_wrong_solution_earns_nothing_and_a_wrong_form_costs_one(folder: Path) -> None:
    assert sql_env(folder).step("<think>a</think><solution>SELECT 7</solution>").reward == 0.0
    assert sql_env(folder).step("<solution>SELECT a FROM t WHERE a < 2</solution>").reward == -1.0


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("ours", "gold"),
    [
        ("SELECT count(*) FROM t", "SELECT 100.0"),
        ("SELECT -0.0", "SELECT 0"),
        ("SELECT x'00ff', NULL", "SELECT x'00FF', NULL"),
        ("SELECT printf('%.1f', 2.0)", "SELECT format('%.1f', 2)"),
        ("PRAGMA table_info(t)", "PRAGMA TABLE_INFO(t)"),
        ("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 20000) SELECT x FROM c",) * 2,
    ],
)
def test_rows_compare_as_values_of_sqlite(folder: Path, ours: str, gold: str) -> None:
    assert sql_env(folder, gold).step(f"<think>a</think><solution>{ours}</solution>").reward == 1.0


@pytest.mark.parametrize(("ours", "gold"), [("SELECT '4'", "SELECT 4"), ("SELECT x'34'", "SELECT '34'")])
def test_a_number_is_no_text_and_a_text_no_blob(folder: Path, ours: str, gold: str) -> None:
    assert sql_env(folder, gold).step(f"<think>a</think><solution>{ours}</solution>").reward == 0.0


def test_a_gold_query_with_more_rows_than_are_compared_is_a_failure_that_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl.envs.text2sql.MOST_ROWS", 99)
    with pytest.raises(TaskError, match="it gives more than 99 rows"):
        sql_env(folder, "SELECT a FROM t").step("<think>a</think><solution>SELECT 1</solution>")


def test_neither_a_hint_nor_what_the_database_holds_spoils_the_form(folder: Path) -> None:
    env = sql_env(folder)
    env.step("<think>hm</think> what now?")
    env.step("<think>look</think><sql>SELECT '<solu' || 'tion>'</sql>")
    assert env.step("<think>so</think><solution>SELECT a FROM t WHERE a < 2</solution>").reward == 1.0


def test_the_first_query_of_a_turn_is_the_one_that_is_tried(folder: Path) -> None:
    observation = sql_env(folder).step("<sql>SELECT 11</sql> or <sql>SELECT 22</sql>").observations[0]["content"]
    assert "11" in observation
    assert "22" not in observation


def test_a_solution_whose_rows_were_cut_earns_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of it are the rows of the right answer."""
    monkeypatch.setattr("skyrl.envs.text2sql.MOST_ROWS", 2)
    for query, reward in (("SELECT a FROM t LIMIT 2", 1.0), ("SELECT a FROM t", 0.0)):
        assert sql_env(folder).step(f"<think>a</think><solution>{query}</solution>").reward == reward


def test_a_long_result_is_cut_and_says_so(folder: Path) -> None:
    observation = sql_env(folder).step("<sql>SELECT a FROM t</sql>").observations[0]["content"]
    assert "cut at 50 rows" in observation
    assert "cut at 9000 characters" in result_text({"columns": ["a"], "rows": [["x" * 20_000]], "cut": False})


@pytest.mark.parametrize("name", ["../shop", "shop/shop", "/etc/passwd", "", None, "nowhere", ".shop"])
def test_a_row_names_databases_of_the_folder_and_no_other_file(folder: Path, name: object) -> None:
    with pytest.raises(TaskError):
        database(folder, name)


@pytest.mark.long
def test_hostile_queries_change_nothing_and_end_in_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("skyrl.envs.text2sql.TOOL_SECONDS", 0.5)
    assert len(QUERIES) >= 40
    before = listing(tmp_path)
    for query in QUERIES:
        env = sql_env(folder)
        observation = env.step(f"<sql>{query}</sql>").observations[0]["content"]
        assert len(observation) < 10_000, query[:80]
        assert env.get_metrics()["failed_queries"] == 1.0, (query[:80], observation[:200])
    assert sql_env(folder).step("<sql>SELECT 1</sql>").observations[0]["content"].count("Error") == 0
    assert listing(tmp_path) == before


def test_a_database_that_the_sandbox_could_not_open_is_refused_at_once(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (folder / "shop").rename(tmp_path / "elsewhere" / "shop")
    (folder / "shop").symlink_to(tmp_path / "elsewhere" / "shop")
    extras = {"reward_spec": {"ground_truth": "SELECT 1"}, "db_id": "shop"}
    sandbox = Sandbox(readable=[folder])
    sandbox.tier = "bwrap"  # which has no other files
    with pytest.raises(TaskError, match="has to be below environment.skyrl_gym.text2sql.db_path"):
        Text2SQLEnv(extras, Text2SQLEnvConfig(db_path=str(folder)), sandbox)


def listing(folder: Path) -> dict[str, str]:
    """Every file below it, with a digest of what it holds."""
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.rglob("*") if file.is_file()}
