"""A value that was written and does nothing in this run is told; one that was not written is not.

That a value that acts is not told either is seen in `tests/effects/`, of every field.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from skyrl.config import SkyRLTrainConfig, load
from skyrl.config.derive.sizes import draws_rollouts
from skyrl.config.effects.rl_effects import EFFECTS
from skyrl.config.effects.rollouts import ROLLOUT_EFFECTS
from skyrl.config.loading.check import without_effect
from skyrl.config.loading.kinds import KINDS, kind_named, root_of
from skyrl.config.loading.resolve import resolve_with_origins
from skyrl.errors import Problem
from skyrl.tree.classes import leaf_paths, table_paths
from skyrl.tree.rules import Condition, Effect, paths_read
from tests.config.leaves import FIXED, LEAVES, OTHERS, RUNNABLE, each
from tests.nano_run import as_words

NO_KL = {"trainer.algorithm.use_kl_loss": False, "trainer.algorithm.use_kl_in_reward": False}
CRITIC = {"trainer.critic.model.path": "critic"}
OF_ADVANTAGES = ("advantage_estimator", "advantage_batch_normalize", "advantage_norm")
OF_REWARDS = ("reward_shaping", "use_kl_in_reward")
IMITATION = {"trainer.algorithm.policy_loss_type": "cross_entropy"}
PAIRS = {"trainer.algorithm.policy_loss_type": "online_dpo"}
OF_LOSS = ("beta", "temperature", "max_divergence", "top_k")
OF_TOP_K = ("top_k_of", "tail", "min_logprob")
TAUGHT = {"trainer.teacher.model.path": "teacher"}
NO_EVALUATION = {"trainer.eval_before_train": False, "trainer.eval_interval": 0}
NOT_SAVED = {"trainer.ckpt_interval": -1}
RECORDED = {"trainer.rollouts_from": "runs/other"}
SINGLE = {"generator.max_turns": 2}  # of gsm8k, which takes one
EVALUATION = "generator.eval_sampling_params."
ENGINE = "generator.inference_engine."
SERVERS: dict[str, Any] = {ENGINE + "backend": "http", ENGINE + "external_server_urls": ["http://10.0.0.1:8000"]}

OFF: dict[str, dict[str, Any]] = {
    # effect: what switches it off, where the run of RUNNABLE does not
    "trainer.algorithm.kl_loss_coef": NO_KL,
    "trainer.algorithm.kl_estimator_type": NO_KL,
    "trainer.ref": NO_KL,
    "trainer.update_ref_every_epoch": NO_KL,
    "trainer.run_name": {"trainer.run_path": "elsewhere"},
    **dict.fromkeys(("trainer.max_ckpts_to_keep", "trainer.async_ckpt_save"), NOT_SAVED),
    **dict.fromkeys(("trainer.ckpt_path", "trainer.resume_with_changes"), NOT_SAVED | {"trainer.resume_mode": "none"}),
    "trainer.faults.max_skipped_steps": {"trainer.faults.on_non_finite": "abort"},
    "trainer.faults.on_stall": {"trainer.faults.stall_timeout_seconds": None},
    "trainer.placement.ref_num_nodes": NO_KL,
    "trainer.placement.ref_num_gpus_per_node": NO_KL,
    **dict.fromkeys((f"trainer.algorithm.distillation.hint.{name}" for name in ("column", "template")), TAUGHT),
    "trainer.algorithm.distillation.teacher_sync_steps": TAUGHT,
    "trainer.algorithm.distillation.discount": {**TAUGHT, "trainer.algorithm.distillation.type": "loss"},
    **dict.fromkeys((f"trainer.algorithm.distillation.{name}" for name in OF_LOSS), TAUGHT),
    **{
        f"trainer.algorithm.distillation.{name}": {**TAUGHT, "trainer.algorithm.distillation.type": "loss"}
        for name in OF_TOP_K
    },
    "trainer.algorithm.grpo_norm_by_std": {"trainer.algorithm.advantage_estimator": "rloo"},
    **dict.fromkeys((f"trainer.algorithm.{name}" for name in (*OF_ADVANTAGES, *OF_REWARDS)), IMITATION),
    "trainer.algorithm.distillation.task_coef": {**TAUGHT, **IMITATION, "trainer.algorithm.distillation.type": "loss"},
    **dict.fromkeys(("trainer.algorithm.use_kl_loss", "trainer.algorithm.loss_reduction"), PAIRS),
    "trainer.algorithm.old_logprobs": {"trainer.algorithm.policy_loss_type": "dppo"},
    "trainer.algorithm.max_importance_ratio": {"trainer.algorithm.policy_loss_type": "dppo"},
    "trainer.algorithm.eps_clip_low": {"trainer.algorithm.policy_loss_type": "sapo"},
    "trainer.algorithm.eps_clip_high": {"trainer.algorithm.policy_loss_type": "sapo"},
    "trainer.micro_train_batch_size_per_gpu": {"trainer.max_tokens_per_microbatch": 4096},
    "trainer.micro_forward_batch_size_per_gpu": {"trainer.max_tokens_per_microbatch": 4096},
    "trainer.share_group_prompts": {"trainer.use_sample_packing": False},
    "trainer.eval_batch_size": NO_EVALUATION,
    "generator.eval_sampling_params": NO_EVALUATION,
    "generator.eval_n_samples_per_prompt": NO_EVALUATION,
    "environment.skyrl_gym.math_equivalence": {"environment.env_class": "multiply"},
    **{effect.path: RECORDED for effect in ROLLOUT_EFFECTS if effect.condition.holds is draws_rollouts},
    "generator.sampling_params.max_generate_length": RECORDED,
    "data.val_data": NO_EVALUATION,
    "data.shuffle": {"data.curriculum.sampler": "pools"},
    "trainer.epochs": {"data.streaming": True, "trainer.max_training_steps": 2},
    **{f"generator.{table}.max_tokens": RECORDED for table in ("sampling_params", "eval_sampling_params")},
    "trainer.attention": {"trainer.strategy": "megatron", ENGINE + "backend": "vllm"},
    "trainer.recompute_activations": {"trainer.strategy": "megatron"},
    ENGINE + "enable_prefix_caching": {ENGINE + "backend": "http"},
    ENGINE + "run_engines_locally": SERVERS | {ENGINE + "run_engines_locally": True},  # false agrees with servers
    ENGINE + "rollout_dtype": {ENGINE + "backend": "vllm"},
    ENGINE + "enable_return_routed_experts": {ENGINE + "backend": "sglang"},
    EVALUATION + "temperature": {EVALUATION + "greedy": True},
    "generator.merge_stepwise_output": SINGLE,
    "environment.skyrl_gym.reward_model.timeout": {"environment.env_class": "reward_model"},
    "environment.skyrl_gym.retried_failures": {"environment.skyrl_gym.max_attempts": 1},
    "environment.skyrl_gym.failed_samples": {"generator.n_samples_per_prompt": 1},
}

CUDA = {"trainer.device": "cuda"}
ELSEWHERE = tuple(f"trainer.{model}." for model in ("policy", "critic", "ref", "teacher"))
"""Tables whose conditions `test_effects_of_models.py` or `tests/effects/test_bounds_of_the_ratio.py` test."""

TESTED = [
    effect
    for effect in EFFECTS
    if not effect.path.startswith(ELSEWHERE) and not effect.condition.words.startswith("the ratio pi / pi_old")
]


def leaf_in(path: str) -> str:
    """A leaf at or in a path that can have another value, those apart that switch on what the path is about."""
    inside = [leaf for leaf in LEAVES if leaf == path or leaf.startswith(path + ".")]
    return next(leaf for leaf in inside if leaf not in FIXED and not leaf.endswith(("lora.rank", "self_teacher")))


def warnings(values: dict[str, Any]) -> list[Problem]:
    """What is said about a run of these values."""
    loaded = load([], RUNNABLE | values)
    config, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    return without_effect(config, origins)


def told(path: str, values: dict[str, Any]) -> list[Problem]:
    """What is said about one path."""
    return [problem for problem in warnings(values) if problem.path == path]


@each(TESTED)
def test_a_written_value_that_does_nothing_is_told(effect: Effect) -> None:
    leaf = leaf_in(effect.path)
    [problem] = told(effect.path, {leaf: OTHERS[leaf]} | OFF.get(effect.path, {}))
    assert (problem.severity, problem.location.rpartition(":")[0]) == ("warning", __file__)
    assert problem.message == f"has no effect in this run: it acts only when {effect.condition.words}"


@each(effect for effect in TESTED if not any(path.startswith(f"{effect.path}.") for path in RUNNABLE))
def test_a_value_that_was_not_written_is_not_told(effect: Effect) -> None:
    off = OFF.get(effect.path, {})
    assert told(effect.path, {path: value for path, value in off.items() if path != effect.path}) == []


NAMED = re.compile(r"[a-z]\w*(?:\.\w+)+|[a-z]+(?:_[a-z]+)+")
RUNS: tuple[dict[str, Any], ...] = (
    {},
    {"trainer.device": "cuda", "trainer.placement.executor": "ray", "trainer.placement.colocate_all": False},
    {"trainer.strategy": "megatron", "trainer.device": "cuda"},
    {"trainer.max_tokens_per_microbatch": 4096, "trainer.fully_async.enabled": True},
    {"trainer.algorithm.policy_loss_type": "dual_clip"},
    {"trainer.algorithm.policy_loss_type": "decoupled", "trainer.max_ckpts_to_keep": 3, "trainer.ckpt_keep_best": 1},
    {"environment.env_class": "reward_model", "generator.max_turns": 2, "environment.agent.command": ["python"]},
    {"environment.env_class": "code", "generator.sampling_params.max_tokens": 9, EVALUATION + "max_tokens": 9},
    {"trainer.rollouts_from": "runs/other", "environment.env_class": "multiply"},
    {"environment.env_class": "task.py:mine", "generator.max_turns": 2, "trainer.recover_mode": "auto"},
    {"trainer.policy.model.lora.rank": 2, ENGINE + "backend": "vllm", "trainer.placement.executor": "ray"},
    {ENGINE + "backend": "vllm", "trainer.device": "cuda", ENGINE + "max_engine_restarts": 1},
    SERVERS | {ENGINE + "run_engines_locally": False},
    {"data.train_data": ["some.jsonl", "more.jsonl"]},
    {"data.streaming": True, "trainer.max_training_steps": 2},
    TAUGHT | {"trainer.algorithm.distillation.type": "loss"},
)
"""Runs in which conditions read what decides."""


NOT_READ = {"transformer_config_kwargs"}
"""Fields that a sentence names as the place where something is set instead."""

PROPERTIES = {"plays": {"command", "function"}}
"""Properties of tables that conditions read, with the fields behind them."""


def names_in(words: str) -> set[str]:
    """Last names of the fields that a sentence names."""
    return {name.rpartition(".")[2] for name in NAMED.findall(words)} & {leaf.rpartition(".")[2] for leaf in LEAVES}


def test_a_condition_reads_the_fields_that_its_sentence_names() -> None:
    trees = [resolve_with_origins((loaded := load([], RUNNABLE | run)).config, loaded.origins)[0] for run in RUNS]
    unread: dict[str, set[str]] = {}
    for effect in TESTED:
        read = {path.rpartition(".")[2] for tree in trees for path in paths_read(effect.condition.holds, tree)}
        read |= {field for name in read for field in PROPERTIES.get(name, ())}
        if missing := names_in(effect.condition.words) - read - NOT_READ:
            unread[effect.path] = missing
    assert unread == {}


def test_a_sentence_that_names_another_field_than_its_predicate_reads_is_found() -> None:
    run = load([], RUNNABLE).config
    wrong = Effect("trainer.epochs", Condition("trainer.use_sample_packing is on", lambda run: run.trainer.epochs > 1))
    assert names_in(wrong.condition.words) == {"use_sample_packing"}
    assert paths_read(wrong.condition.holds, run) == {"trainer.epochs"}


UNLIKE = {
    "attention": "Megatron, which trains no supervised runs, has its own",
    "recompute_activations": "the same",
    "export_path": "evaluations of a reinforcement-learning run are stored there",
}
"""Fields that have a condition in one kind of run alone, with the reason."""


def test_a_field_of_several_kinds_has_a_condition_in_each() -> None:
    conditional = {name: conditional_fields(name) for name in KINDS}
    shared = set.intersection(*(leaves for leaves, _ in conditional.values()))
    (rl, *others) = (shared & acting for _, acting in conditional.values())
    assert all(rl ^ other == set(UNLIKE) for other in others), [sorted(rl ^ other) for other in others]


def conditional_fields(name: str) -> tuple[set[str], set[str]]:
    """Leaves of the table of a kind of run that every kind has, and those that act under a condition."""
    kind = kind_named(name)
    table = f"{kind.trainer}." if kind.trainer else ""
    leaves = {path.removeprefix(table) for path, _ in leaf_paths(root_of(name)) if path.startswith(table)}
    effects = [effect.path.removeprefix(table) for effect in kind.effects if effect.path.startswith(table)]
    return leaves, {leaf for leaf in leaves if any(f"{leaf}.".startswith(f"{path}.") for path in effects)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("values", "idle"),
    [
        ({"project_name": "mine"}, {"project_name"}),
        ({"project_name": "mine", "logger": "tensorboard"}, set()),
        ({"run_name": "mine"}, set()),  # which its folder is called
        ({"run_name": "mine", "run_path": "elsewhere"}, {"run_name"}),
        ({"run_name": "mine", "run_path": "elsewhere", "logger": ["console", "wandb"]}, set()),
        ({"project_name": "mine", "run_name": "mine", "run_path": "elsewhere"}, {"project_name", "run_name"}),
    ],
)
def test_names_that_no_tracker_and_no_folder_has_are_told(values: dict[str, Any], idle: set[str], kind: str) -> None:
    root = kind_named(kind)
    smallest: dict[str, Any] = RUNNABLE if kind == "rl" else {"kind": kind, "model.path": "m", "train_datasets": ["d"]}
    loaded = load([], smallest | {root.path(name): value for name, value in values.items()})
    config, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    messages = {problem.path: problem.message for problem in without_effect(config, origins)}
    assert set(messages) & {root.path("project_name"), root.path("run_name")} == {root.path(name) for name in idle}
    if "project_name" in idle:
        expected = "has no effect in this run: it acts only when logger names a tracker besides the console"
        assert messages[root.path("project_name")] == expected


def test_a_files_name_of_its_runs_is_no_warning_of_one_that_the_command_line_puts_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[trainer]\nrun_name = "mine"\nrun_path = "runs/here"\n')
    for arguments, idle in (([], True), (["trainer.run_path=runs/there"], False)):
        loaded = load([str(file)], [*arguments, *as_words(RUNNABLE)])
        config, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
        paths = [problem.path for problem in without_effect(config, origins)]
        assert ("trainer.run_name" in paths) == idle


def test_who_shares_the_gpu_of_one_process_is_not_told() -> None:
    assert told("trainer.placement.colocate_all", CUDA | {"trainer.placement.colocate_all": False}) == []


def test_nothing_is_told_about_the_run_that_was_not_asked_for_anything() -> None:
    assert warnings({}) == []


def test_writing_a_value_that_equals_the_default_is_writing_it() -> None:
    assert [problem.path for problem in warnings({"trainer.algorithm.lambd": 1.0})] == ["trainer.algorithm.lambd"]


def test_one_table_is_told_once() -> None:
    values = {"trainer.algorithm.sapo.tau_pos": 2.0, "trainer.algorithm.sapo.tau_neg": 2.0}
    assert [problem.path for problem in warnings(values)] == ["trainer.algorithm.sapo"]


def test_a_table_that_does_nothing_is_told_in_place_of_its_fields() -> None:
    values = NO_EVALUATION | {"generator.eval_sampling_params.top_p": 0.9}  # of which greedy evaluation reads nothing
    assert [problem.path for problem in warnings(values)] == ["generator.eval_sampling_params"]


@pytest.mark.parametrize(
    ("values", "is_told"),
    [
        ({"trainer.device": "cpu"}, True),
        ({"trainer.device": "cuda"}, False),
        ({"trainer.device": "cuda", ENGINE + "engine_init_kwargs.kv_cache_memory_bytes": 1 << 30}, True),
    ],
)
def test_the_share_of_a_gpu_is_told_where_the_cache_has_its_own_size(values: dict[str, Any], is_told: bool) -> None:
    path = ENGINE + "gpu_memory_utilization"
    assert bool(told(path, {ENGINE + "backend": "vllm", path: 0.5} | values)) is is_told


@pytest.mark.parametrize(
    ("values", "is_told"),
    [({}, True), (SERVERS, False), ({"trainer.placement.executor": "ray"}, False)],
)
def test_a_folder_for_weights_is_told_where_they_stay_in_one_process(values: dict[str, Any], is_told: bool) -> None:
    path = ENGINE + "weight_sync_path"
    assert bool(told(path, {ENGINE + "weight_sync_backend": "disk", path: "folder"} | values)) is is_told


@pytest.mark.parametrize(
    ("values", "is_told"),
    [
        ({ENGINE + "backend": "vllm"}, False),
        ({**SERVERS, ENGINE + "weight_sync_backend": "gloo"}, False),
        ({**SERVERS, ENGINE + "weight_sync_backend": "disk"}, True),
    ],
)
def test_the_size_of_engines_is_told_where_they_are_neither_started_nor_joined(
    values: dict[str, Any], is_told: bool
) -> None:
    path = ENGINE + "tensor_parallel_size"
    assert bool(told(path, {path: 2} | values)) is is_told


@pytest.mark.parametrize(("reduction", "is_told"), [("token_mean", True), ("token_mean_legacy", False)])
def test_rows_of_a_pass_are_told_where_tokens_bound_it_and_no_reduction_counts_rows(
    reduction: str, is_told: bool
) -> None:
    values = {"trainer.max_tokens_per_microbatch": 4096, "trainer.algorithm.loss_reduction": reduction}
    path = "trainer.micro_train_batch_size_per_gpu"
    assert bool(told(path, {path: 1} | values)) is is_told


def test_whether_evaluation_is_greedy_is_told_where_its_temperature_is_zero_already() -> None:
    assert told(EVALUATION + "greedy", {EVALUATION + "greedy": False, EVALUATION + "temperature": 0.5}) == []


def test_the_longest_answer_of_a_recording_is_told_unless_the_loss_divides_by_it() -> None:
    path = "generator.sampling_params.max_generate_length"
    assert len(told(path, RECORDED | {path: 8})) == 1
    assert told(path, RECORDED | {path: 8, "trainer.algorithm.loss_reduction": "seq_mean_token_sum_norm"}) == []


@pytest.mark.parametrize(("tokens", "is_told"), [(1535, False), (1536, True)])
def test_a_limit_that_the_longest_sequence_keeps_is_told(tokens: int, is_told: bool) -> None:
    path = "generator.sampling_params.max_tokens"  # beside inputs of 512 tokens and answers of 1,024
    assert bool(told(path, {path: tokens})) is is_told


def test_a_single_turn_that_a_stop_text_ends_is_closed_as_conversations_are() -> None:
    path = "generator.use_conversation_multi_turn"
    assert len(told(path, SINGLE | {path: False})) == 1
    assert told(path, SINGLE | {path: False, "generator.sampling_params.stop": ["</s>"]}) == []


def test_an_effect_that_depends_on_a_broken_value_is_not_judged() -> None:
    loaded = load([], RUNNABLE | {"trainer.algorithm.lambd": 0.5})
    config, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    assert without_effect(config, origins, {"trainer.algorithm.advantage_estimator"}) == []
    assert len(without_effect(config, origins, {"trainer.algorithm.use_kl_loss"})) == 1


def test_effects_are_about_paths_that_exist_each_once() -> None:
    paths = [effect.path for effect in EFFECTS]
    assert set(paths) <= set(LEAVES) | set(table_paths(SkyRLTrainConfig))
    assert len(paths) == len(set(paths))
