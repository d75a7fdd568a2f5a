"""Checks: each one fires where it should, is silent where it should, and says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from skyrl.config import SkyRLTrainConfig, check, compose, load, resolve
from skyrl.config.check import CHECKS, SCHEDULES_WITH_SETTINGS
from skyrl.config.not_yet import LATER_NAMES, NOT_YET, NotYet
from skyrl.errors import ConfigError, Problem
from skyrl.tree import FrozenDict, evolve_at, get_at
from skyrl.tree.classes import table_paths
from skyrl.tree.rules import paths_read
from tests.config.leaves import LEAVES, OTHERS, RUNNABLE

PATHS = set(LEAVES) | set(table_paths(SkyRLTrainConfig))

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    # check: what is written, and what the problem is about
    "the_policy_has_a_model": [
        ({"trainer.policy.model.path": None}, "trainer.policy.model.path"),
        ({"trainer.policy.model.path": ""}, "trainer.policy.model.path"),
    ],
    "there_is_data_to_train_on": [({"data.train_data": []}, "data.train_data")],
    "evaluation_has_data": [
        ({"data.val_data": [], "trainer.eval_interval": -1}, "data.val_data"),
        ({"data.val_data": [], "trainer.eval_before_train": False}, "data.val_data"),
    ],
    "mini_batches_divide_the_batch": [({"trainer.policy_mini_batch_size": 300}, "trainer.policy_mini_batch_size")],
    "critic_mini_batches_divide_the_batch": [
        (
            {"trainer.critic_mini_batch_size": 300, "trainer.critic.model.path": "critic"},
            "trainer.critic_mini_batch_size",
        )
    ],
    "micro_batches_divide_the_mini_batch": [
        ({"trainer.micro_train_batch_size_per_gpu": 3}, "trainer.micro_train_batch_size_per_gpu")
    ],
    "several_evaluation_samples_differ": [
        ({"generator.eval_n_samples_per_prompt": 4}, "generator.eval_n_samples_per_prompt")
    ],
    "no_source_is_named_twice": [
        ({"data.train_data": ["a.parquet", "b.parquet", "a.parquet"]}, "data.train_data"),
        ({"data.val_data": ["a.parquet", "a.parquet"]}, "data.val_data"),
    ],
    "mini_batches_in_samples_are_those_in_prompts": [
        ({f"trainer.{role}_mini_batch_size_in_samples": 5}, f"trainer.{role}_mini_batch_size_in_samples")
        for role in ("policy", "critic")
    ],
    "the_schedule_needs_no_settings": [
        ({"trainer.policy.optimizer_config.scheduler": name}, "trainer.policy.optimizer_config.scheduler")
        for name in SCHEDULES_WITH_SETTINGS
    ],
    "gae_has_a_critic": [({"trainer.algorithm.advantage_estimator": "gae"}, "trainer.critic.model.path")],
    "kl_is_counted_once": [({"trainer.algorithm.use_kl_in_reward": True}, "trainer.algorithm.use_kl_in_reward")],
    "the_advantage_estimator_exists": [
        ({"trainer.algorithm.advantage_estimator": name}, "trainer.algorithm.advantage_estimator")
        for name in ("rloo", "grop", "my_own")
    ],
    "the_policy_loss_exists": [
        ({"trainer.algorithm.policy_loss_type": name}, "trainer.algorithm.policy_loss_type")
        for name in ("gspo", "regula", "my_own")
    ],
    "the_learner_scores_at_the_rollout_temperature": [
        ({"trainer.algorithm.temperature": 0.9}, "trainer.algorithm.temperature")
    ],
    "training_samples_are_random": [
        ({"generator.sampling_params.temperature": 0}, "generator.sampling_params.temperature")
    ],
    "the_learner_can_score_what_was_sampled": [
        ({"generator.sampling_params.repetition_penalty": 1.1}, "generator.sampling_params.repetition_penalty")
    ],
    "a_group_has_something_to_compare": [({"generator.n_samples_per_prompt": 1}, "generator.n_samples_per_prompt")],
    "a_single_turn_is_given_the_prompt": [
        ({"generator.max_input_length": 511}, "generator.max_input_length"),
        ({"generator.max_input_length": 513}, "generator.max_input_length"),
        ({"generator.max_input_length": 511, "generator.max_turns": 2}, "generator.max_input_length"),
    ],
    "a_resumed_run_has_a_path": [
        ({"trainer.resume_mode": "from_path"}, "trainer.resume_path"),
        ({"trainer.resume_path": "ckpts/global_step_1"}, "trainer.resume_path"),
    ],
    "one_process_has_one_rank": [
        ({"trainer.placement.executor": "in_process", path: 2}, path)
        for path in (
            "trainer.placement.policy_num_nodes",
            "trainer.placement.policy_num_gpus_per_node",
            "trainer.placement.ref_num_nodes",
            "trainer.placement.ref_num_gpus_per_node",
            "generator.inference_engine.num_engines",
        )
    ],
    "repeatable_runs_are_promised_on_a_cpu": [
        ({"trainer.deterministic": True, "trainer.device": "cuda"}, "trainer.deterministic")
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    # check: what is written that comes near to it
    "evaluation_has_data": {"data.val_data": [], "trainer.eval_interval": 0, "trainer.eval_before_train": False},
    "mini_batches_divide_the_batch": {"trainer.policy_mini_batch_size": 512},
    "critic_mini_batches_divide_the_batch": {"trainer.critic_mini_batch_size": 300},
    "micro_batches_divide_the_mini_batch": {"trainer.micro_train_batch_size_per_gpu": 5},
    "several_evaluation_samples_differ": {
        "generator.eval_n_samples_per_prompt": 4,
        "generator.eval_sampling_params.temperature": 0.6,
    },
    "no_source_is_named_twice": {"data.train_data": ["a.parquet"], "data.val_data": ["a.parquet"]},
    "mini_batches_in_samples_are_those_in_prompts": {
        "trainer.policy_mini_batch_size": 256,
        "generator.n_samples_per_prompt": 4,
        "trainer.policy_mini_batch_size_in_samples": 1024,
    },
    "the_schedule_needs_no_settings": {"trainer.policy.optimizer_config.scheduler": "inverse_sqrt"},
    "gae_has_a_critic": {"trainer.algorithm.advantage_estimator": "gae", "trainer.critic.model.path": "critic"},
    "kl_is_counted_once": {"trainer.algorithm.use_kl_in_reward": True, "trainer.algorithm.use_kl_loss": False},
    "the_learner_scores_at_the_rollout_temperature": {
        "trainer.algorithm.temperature": 0.9,
        "generator.sampling_params.temperature": 0.9,
    },
    "training_samples_are_random": {"generator.eval_sampling_params.temperature": 0.0},
    "the_learner_can_score_what_was_sampled": {"generator.eval_sampling_params.repetition_penalty": 1.1},
    "a_single_turn_is_given_the_prompt": {"generator.max_input_length": 2000, "generator.max_turns": 2},
    "a_resumed_run_has_a_path": {"trainer.resume_mode": "from_path", "trainer.resume_path": "ckpts/global_step_1"},
    "one_process_has_one_rank": {"trainer.placement.policy_num_nodes": 2},
    "repeatable_runs_are_promised_on_a_cpu": {"trainer.deterministic": True},
}

NAMED: dict[str, Any] = {
    each.__name__: each for each in CHECKS if not isinstance(getattr(each, "__self__", None), NotYet)
}
CASES = [(name, values, path) for name, cases in FIRES.items() for values, path in cases]
REFUSING = [entry for entry in NOT_YET if entry.runs is not None]


def resolved(values: dict[str, Any]) -> SkyRLTrainConfig:
    """A tree that runs but for these values."""
    return resolve(load([], RUNNABLE | values).config)


def other_values(entry: NotYet) -> Iterator[Any]:
    """Values of the entry's path that do not run."""
    if entry.path in PATHS - set(LEAVES):
        yield {"param_dtype": "fp32"}
        return
    value = OTHERS[entry.path]
    if value not in (entry.runs or ()):
        yield value
    if entry.path == "trainer.strategy":
        yield from ("deepspeed", "megatron")
    if entry.path == "trainer.logger":
        yield from ("wandb", ["console", "wandb"])


def test_a_run_without_mistakes_has_no_problems() -> None:
    assert check(resolved({})) == []


def test_every_check_has_a_case() -> None:
    assert FIRES.keys() == NAMED.keys()


@pytest.mark.parametrize(("name", "values", "path"), CASES)
def test_a_check_fires(name: str, values: dict[str, Any], path: str) -> None:
    [problem] = NAMED[name](resolved(values))
    assert problem.path == path
    assert problem.message


@pytest.mark.parametrize("name", NAMED)
def test_a_check_is_silent_on_a_run_without_mistakes(name: str) -> None:
    assert list(NAMED[name](resolved({}))) == []


@pytest.mark.parametrize("name", SILENT)
def test_a_check_is_silent_near_by(name: str) -> None:
    assert list(NAMED[name](resolved(SILENT[name]))) == []


@pytest.mark.parametrize(("name", "values", "path"), CASES)
def test_a_problem_is_about_a_path_that_exists_and_has_a_remedy_or_is_a_warning(
    name: str, values: dict[str, Any], path: str
) -> None:
    [problem] = NAMED[name](resolved(values))
    assert problem.path in PATHS
    assert problem.hint or problem.severity == "warning"


@pytest.mark.parametrize("name", NAMED)
def test_a_check_says_in_a_sentence_what_must_hold(name: str) -> None:
    assert NAMED[name].__doc__


def test_problems_have_the_place_of_what_they_are_about() -> None:
    given = [f"{path}={value}" for path, value in RUNNABLE.items()]
    with pytest.raises(ConfigError) as caught:
        compose([], [*given, "trainer.policy_mini_batch_size=300", "generator.max_input_length=3"])
    assert [(problem.path, problem.place) for problem in caught.value.problems] == [
        ("trainer.policy_mini_batch_size", "argument 4"),
        ("generator.max_input_length", "argument 5"),
    ]


def test_several_checks_fire_at_once() -> None:
    values = {"trainer.policy_mini_batch_size": 300, "data.train_data": [], "trainer.algorithm.temperature": 0.5}
    assert {problem.path for problem in check(resolved(values))} == values.keys()


# Numbers in the remedies


@pytest.mark.parametrize(
    ("batch", "mini", "hint"),
    [
        (1024, 300, "nearest divisors: 256 and 512"),
        (12, 5, "nearest divisors: 4 and 6"),
        (7, 3, "nearest divisors: 1 and 7"),
        (6, 100, "nearest divisors: 6"),
        (10**12, 3, "nearest divisors: 2 and 4"),
        (10**15, 3, ""),
    ],
)
def test_the_nearest_divisors_are_told(batch: int, mini: int, hint: str) -> None:
    run = resolved({"trainer.train_batch_size": batch, "trainer.policy_mini_batch_size": mini})
    [problem] = NAMED["mini_batches_divide_the_batch"](run)
    assert problem.hint == hint


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("rloo", "'rloo' is not implemented yet in this version", "available: grpo"),
        ("grop", "'grop' is unknown", "did you mean grpo?"),
        ("rlo", "'rlo' is unknown", "did you mean rloo?"),
        ("my_own", "'my_own' is unknown", "available: grpo"),
    ],
)
def test_an_unknown_estimator_is_told_from_one_that_is_to_come(name: str, message: str, hint: str) -> None:
    [problem] = NAMED["the_advantage_estimator_exists"](resolved({"trainer.algorithm.advantage_estimator": name}))
    assert (problem.message, problem.hint) == (message, hint)


# What is not implemented yet


@pytest.mark.parametrize("entry", NOT_YET, ids=lambda entry: entry.path)
def test_what_is_not_implemented_yet_is_a_path_of_the_tree(entry: NotYet) -> None:
    assert entry.path in PATHS


@pytest.mark.parametrize("entry", REFUSING, ids=lambda entry: entry.path)
def test_a_value_that_asks_for_what_is_missing_is_refused(entry: NotYet) -> None:
    for value in other_values(entry):
        run = evolve_if_possible(resolved({}), entry.path, value)
        [problem] = entry.check(run)
        assert problem.path == entry.path
        assert entry.what in problem.message
        assert problem.hint.startswith("what runs: ")
        assert "Watched" not in problem.message


@pytest.mark.parametrize("entry", REFUSING, ids=lambda entry: entry.path)
def test_a_value_that_runs_is_not_refused(entry: NotYet) -> None:
    for value in entry.runs or ():
        assert list(entry.check(evolve_if_possible(resolved({}), entry.path, value))) == []


def test_an_executor_is_not_refused_where_the_engine_is() -> None:
    problems = check(resolved({"generator.inference_engine.backend": "vllm"}))
    assert [problem.path for problem in problems] == ["generator.inference_engine.backend"]


def test_names_that_are_to_come_belong_to_fields() -> None:
    assert LATER_NAMES.keys() <= set(LEAVES)


def evolve_if_possible(run: SkyRLTrainConfig, path: str, value: Any) -> SkyRLTrainConfig:
    """The tree with this value, written as a file would write it."""
    if get_at(run, path) == value and type(get_at(run, path)) is type(value):
        return run
    if isinstance(value, dict) and path in PATHS - set(LEAVES):
        for name, item in value.items():
            run = evolve_at(run, f"{path}.{name}", item)
        return run
    return evolve_at(run, path, value if not isinstance(value, dict) else FrozenDict(value))


# Problems and warnings


def test_without_origins_written_means_other_than_the_default() -> None:
    run = resolved({"trainer.algorithm.sapo.tau_pos": 2.0})
    assert [(problem.path, problem.severity) for problem in check(run)] == [("trainer.algorithm.sapo", "warning")]


def test_what_was_derived_was_not_written() -> None:
    off = {"trainer.algorithm.use_kl_loss": False, "trainer.eval_interval": -1, "trainer.eval_before_train": False}
    assert check(resolved(off)) == []


@pytest.mark.parametrize(("name", "values", "path"), CASES)
def test_a_check_is_skipped_where_it_reads_a_broken_value(name: str, values: dict[str, Any], path: str) -> None:
    def about(broken: set[str]) -> list[Problem]:
        own = {repr(each) for each in NAMED[name](resolved(values))}
        return [each for each in check(resolved(values), {}, broken) if repr(each) in own]

    assert len(about(set())) == 1
    for broken in paths_read(NAMED[name], resolved(values)):
        assert about({broken}) == []
