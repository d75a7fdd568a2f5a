"""Rows and rewards of a stand-in for reasoning-gym, some of whose dependencies are compiled from C.

The stand-in (`stand_in/reasoning_gym`) has what the environment touches; `reasoning_gym_live.py` asks the same of every
task of the package itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from skyrl.config import SkyRLTrainConfig, load, resolve
from skyrl.config.checks.data import reasoning_tasks_are_valid
from skyrl.config.foundation.reasoning_tasks import TaskRows, refusal, task_rows
from skyrl.data import reasoning_rows
from skyrl.data.sources import BadRow, Row, read_rows
from skyrl.envs import find_env
from skyrl.envs.builtin import reasoning_gym
from skyrl.envs.builtin.reasoning_gym import answer_in
from skyrl.errors import DataError, Problem, TaskError
from skyrl.experiments.first_rows import first_rows_can_be_used
from skyrl.experiments.preflight import data_files_exist

STAND_IN = str(Path(__file__).parent / "stand_in")
GYM = "environment.skyrl_gym.reasoning_gym."


@pytest.fixture(scope="module", autouse=True)
def package() -> Iterator[None]:
    """The stand-in can be imported, here and in the processes that draw and score."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STAND_IN)
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        del sys.modules[name]
    reasoning_rows.read_reasoning_rows.cache_clear()
    reasoning_gym._sandbox.cache_clear()


def run(**values: Any) -> SkyRLTrainConfig:
    """A resolved run of chain_sum, with few rows."""
    few = {f"{GYM}train_rows": 6, f"{GYM}eval_rows": 4, "environment.env_class": "reasoning_gym:chain_sum"}
    return resolve(load([], {**few, **values}))


def rows(source: str) -> list[Row]:
    return [row for row in read_rows(source) if not isinstance(row, BadRow)]


def question(row: Row) -> str:
    return str(row["prompt"][-1]["content"])


@pytest.mark.long
def test_a_task_makes_rows_for_training_and_evaluation_that_share_no_question() -> None:
    data = run(**{f"{GYM}tasks": {"chain_sum": {"most": 3}}}).data  # 16 questions
    training, evaluation = rows(*data.train_data), rows(*data.val_data)
    assert (len(training), len(evaluation)) == (6, 4)
    assert len({question(row) for row in (*training, *evaluation)}) == 10
    assert {row["data_source"] for row in training} == {"chain_sum"}
    assert training[0]["prompt"][0] == {"role": "system", "content": "Answer between <answer> and </answer>."}


def test_the_seed_decides_the_questions() -> None:
    one, same, other = (rows(*run(**{f"{GYM}seed": seed}).data.val_data) for seed in (0, 0, 1000))
    assert one == same != other


@pytest.mark.long
def test_a_task_that_chooses_from_a_set_draws_the_same_rows_in_every_process() -> None:
    drawn = []
    for _ in range(2):
        reasoning_rows.read_reasoning_rows.cache_clear()
        drawn.append(rows("reasoning_gym://picked_letter?rows=30"))
    assert drawn[0] == drawn[1]


def test_tasks_are_mixed_by_their_weights() -> None:
    tasks = {"chain_sum": {"weight": 3, "most": 30}, "picked_letter": {}}
    data = run(**{"environment.env_class": "reasoning_gym", f"{GYM}tasks": tasks}).data
    assert [task_rows(source).task for source in data.train_data] == ["chain_sum", "picked_letter"]
    assert data.train_weights == (3.0, 1.0)
    assert task_rows(data.train_data[0]).settings == {"most": 30, "seed": 0, "size": 40}
    assert (
        run(**{"environment.env_class": "reasoning_gym", f"{GYM}tasks": {"chain_sum": {}}}).data.train_weights is None
    )


SEVERAL = ["reasoning_gym:chain_sum", "rewards.py:brief"]


@pytest.mark.parametrize(
    ("named", "tasks"),
    [
        (SEVERAL, ["chain_sum"]),
        (["rewards.py:brief", "reasoning_gym:chain_sum"], ["chain_sum"]),
        (["rewards.py:brief", "reasoning_gym", "gsm8k"], ["chain_sum", "picked_letter"]),
        (["rewards.py:brief", "gsm8k"], []),
        ("reasoning_gym", ["chain_sum", "picked_letter"]),
    ],
)
def test_a_task_makes_the_rows_wherever_it_is_named(named: Any, tasks: list[str]) -> None:
    tables = {"chain_sum": {"most": 30}, "picked_letter": {"weight": 2}}
    data = run(**{"environment.env_class": named, f"{GYM}tasks": tables}).data
    for sources in (data.train_data, data.val_data):
        specs = [task_rows(source) for source in sources if source.startswith("reasoning_gym://")]
        assert [spec.task for spec in specs] == tasks
        assert all(spec.names_environment == isinstance(named, str) for spec in specs)
    assert data.train_weights == ((1.0, 2.0) if len(tasks) == 2 else None)


def test_each_of_several_rewards_judges_the_rows_of_a_task(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def brief(completion, **columns):\n    return 1 / len(completion)\n")
    several = ["reasoning_gym:chain_sum", f"{tmp_path / 'rewards.py'}:brief"]
    composed = run(**{"environment.env_class": several, "environment.reward_weights": [1.0, 0.5]})
    row = rows(*composed.data.train_data)[0]
    assert "env_class" not in row and composed.environment.task is not None
    right = row["reward_spec"]["ground_truth"]
    assert find_env(composed.environment.task)(row).step(right).reward == pytest.approx(1 + 0.5 / len(right))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment.env_class": ["reasoning_gym:a", "reasoning_gym:b"]}, "would each score every answer"),
        ({"environment.env_class": ["reasoning_gym", "reasoning_gym:b"]}, "would each score every answer"),
        ({"environment.env_class": ["reasoning_gym", "gsm8k"]}, "no task is given"),
        (
            {"environment.env_class": SEVERAL, "data.train_data": ["reasoning_gym://chain_sum"]},
            "so no other reward judges them",
        ),
        ({"environment.env_class": SEVERAL, "data.train_data": ["mine.jsonl"]}, "and mine.jsonl has other rows"),
    ],
)
def test_a_list_of_rewards_that_would_not_do_what_it_says_is_reported(changes: dict[str, Any], message: str) -> None:
    assert message in " ".join(problem.message for problem in reasoning_tasks_are_valid(run(**changes)))


def test_sources_that_are_written_are_kept() -> None:
    data = run(**{"data.train_data": ["mine.jsonl"]}).data
    assert data.train_data == ("mine.jsonl",)
    assert task_rows(*data.val_data).skip == 0


@pytest.mark.parametrize("value", [3, 2.5, True, None, "plain", "3", "a b&c=d", ["+", "-"], {"a": [1]}])
def test_a_source_keeps_the_settings_of_its_task(value: object) -> None:
    for named in (True, False):
        settings = {"seed": 0, "size": 9, "x": value}
        expected = TaskRows(
            task="t", skip=1, rows=2, system_prompt="simple", settings=settings, names_environment=named
        )
        assert task_rows(expected.source()) == expected


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("chain_sums", "no task 'chain_sums'; did you mean chain_sum?"),
        ("composite", "no task 'composite'; its tasks are chain_sum, lenient, picked_letter"),
        ("chain_sum?min_term=2", "no setting 'min_term'; did you mean min_terms?"),
        ("chain_sum?min_terms=two", "'two' is not of the type of its default, 2"),
        ("chain_sum?min_terms=true", "true is not of the type of its default, 2"),
        ("chain_sum?min_terms=0", "chain_sum refuses its settings: min_terms must be positive"),
        ("chain_sum?system_prompt=none", "no system prompt 'none', only default, simple"),
        ("lenient?rows=2", "lenient cannot be learned: its score_answer gives 'no such answer' the score of"),
        ("chain_sum?rows=0", "rows is 0, not a number of rows"),
        ("chain_sum?skip=-1", "skip is -1, not a number of rows"),
        ("chain_sum?most=1&rows=9", "have 4 different questions, and 9 are needed: lower train_rows"),
    ],
)
def test_a_source_that_cannot_be_drawn_is_a_sentence(source: str, reason: str) -> None:
    with pytest.raises(DataError) as raised:
        read_rows(f"reasoning_gym://{source}")
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("values", "path", "message"),
    [
        ({"environment.env_class": "reasoning_gym:chain_sun"}, "environment.env_class", "did you mean chain_sum?"),
        ({f"{GYM}tasks": {"chain_sum": {"mosst": 4}}}, f"{GYM}tasks.chain_sum.mosst", "did you mean most?"),
        ({f"{GYM}tasks": {"chain_sum": {"most": "4"}}}, f"{GYM}tasks.chain_sum.most", "not of the type"),
        ({f"{GYM}tasks": {"chain_sum": {"min_terms": -1}}}, f"{GYM}tasks.chain_sum.min_terms", "must be positive"),
        ({f"{GYM}tasks": {"chain_sum": {"seed": 1}}}, f"{GYM}tasks.chain_sum.seed", "no such setting here"),
        ({f"{GYM}tasks": {"chain_sum": {"weight": 0}}}, f"{GYM}tasks.chain_sum.weight", "not a positive number"),
        ({f"{GYM}tasks": {"chain_sum": 3}}, f"{GYM}tasks.chain_sum", "not a table"),
        ({f"{GYM}system_prompt": "simpel"}, f"{GYM}system_prompt", "only default, simple"),
        ({"environment.env_class": "reasoning_gym"}, f"{GYM}tasks", "no task is given"),
    ],
)
def test_the_check_of_a_configuration_names_the_wrong_setting(
    values: Mapping[str, Any], path: str, message: str
) -> None:
    (problem,) = reasoning_tasks_are_valid(run(**values))
    assert problem.path == path
    assert message in problem.message


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("{0}", 1.0),
        ("<think>7</think> {0}", 1.0),
        ("<answer>7</answer>, no: <answer> {0}\n</answer>.", 1.0),
        ("{0} is it", 0.0),
        ("", 0.0),
        ("<answer></answer>", 0.0),
    ],
)
def test_an_answer_is_scored_by_its_task(answer: str, reward: float) -> None:
    row = rows("reasoning_gym://chain_sum?rows=1&most=9")[0]
    truth = row["reward_spec"]["ground_truth"]
    step = find_env("reasoning_gym:chain_sum")(row).step(answer.format(truth))
    assert step.done
    assert (step.reward == 1) is (reward == 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("answer", ["1/0", "exit()", "leave", "sleep", "no python", "x" * 100_001])
def test_an_answer_that_cannot_be_scored_gets_nothing(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym, "SECONDS", 20.0 if answer != "sleep" else 2.0)
    row = rows("reasoning_gym://picked_letter?rows=1")[0]
    env = find_env("reasoning_gym")(row)
    assert env.step(answer).reward == 0
    assert env.get_metrics() == {"unscorable_answers": float(len(answer) < 100)}
    word = json.loads(json.dumps(row["prompt"][-1]["content"])).removeprefix("Write ")
    assert env.step(f"'{word}'").reward == 1


def test_a_row_of_another_task_is_refused() -> None:
    with pytest.raises(TaskError, match="judges rows of its own tasks"):
        find_env("reasoning_gym")({"reward_spec": {"ground_truth": "4"}})


def test_a_missing_package_is_one_sentence_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    configured = run()
    monkeypatch.setattr("skyrl.config.foundation.reasoning_tasks.find_spec", lambda name: None)
    problems: list[Problem] = [*reasoning_tasks_are_valid(configured), *data_files_exist(configured)]
    assert {problem.path for problem in problems} == {"data.train_data", "data.val_data"}
    assert all("reasoning-gym is not installed: pip install" in problem.message for problem in problems)
    assert "[reasoning-gym]" in str(refusal("reasoning_gym://chain_sum"))
    reasoning_gym._sandbox.cache_clear()
    with pytest.raises(TaskError, match="not installed"):
        find_env("reasoning_gym")({"reasoning_gym": {"task": "chain_sum", "settings": {}, "entry": "{}"}})


def test_the_last_tagged_text_is_the_answer() -> None:
    assert answer_in("<answer>1</answer> <answer> 2 </answer> 3") == "2"
    assert answer_in("<think>1</think>\n2\n") == "2"
    assert answer_in(" 1 ") == "1"


@pytest.mark.parametrize("judge", [True, False])
def test_the_rows_of_a_task_are_counted_before_the_start(judge: bool) -> None:
    sizes = {"trainer.train_batch_size": 8, "trainer.policy_mini_batch_size": 8}
    problems = [*first_rows_can_be_used(judge=judge)(run(**sizes))]
    assert [(problem.path, problem.message) for problem in problems if problem.severity == "error"] == [
        ("trainer.train_batch_size", "8 prompts, but the training data has 6")
    ]
    fits = dict.fromkeys(sizes, 6)
    assert [
        problem for problem in first_rows_can_be_used(judge=judge)(run(**fits)) if problem.severity == "error"
    ] == []


@pytest.mark.parametrize("source", ["reasoning_gym://nothing", "reasoning_gym://chain_sum?rows=none"])
def test_a_task_that_cannot_be_drawn_is_reported_once(source: str) -> None:
    wrong = run(**{"data.train_data": [source]})
    assert not [problem for problem in first_rows_can_be_used(judge=True)(wrong) if problem.path == "data.train_data"]
    assert [problem.path for problem in data_files_exist(wrong)] == ["data.train_data"]
