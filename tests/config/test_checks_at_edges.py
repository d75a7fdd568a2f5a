"""Checks of reinforcement learning at the edge of their conditions, and what their hints name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl.config import compose, load
from skyrl.config.loading.check import without_effect
from skyrl.config.loading.resolve import resolve_with_origins
from skyrl.errors import ConfigError
from skyrl.tree.rules import join_choices
from tests.config.leaves import RUNNABLE

PLACEMENT = "trainer.placement."
ENGINE = "generator.inference_engine."
RAY: dict[str, Any] = {PLACEMENT + "executor": "ray"}
VLLM: dict[str, Any] = {**RAY, ENGINE + "backend": "vllm"}
TWO = {
    PLACEMENT + "colocate_all": False,
    PLACEMENT + "policy_num_gpus_per_node": 2,
    PLACEMENT + "ref_num_gpus_per_node": 2,
}
ZERO = "trainer.policy.deepspeed_config.zero_optimization."
DEEPSPEED: dict[str, Any] = {"trainer.strategy": "deepspeed"}
JUDGE = "environment.skyrl_gym.reward_model."
POSITIONS = ENGINE + "engine_init_kwargs.hf_overrides.rope_parameters"


def said(values: dict[str, Any]) -> dict[str, str]:
    """Path -> message and hint of what is refused."""
    try:
        compose([], RUNNABLE | values)
    except ConfigError as error:
        return {problem.path: f"{problem.message}; {problem.hint}" for problem in error.problems}
    return {}


@pytest.mark.parametrize(("name", "fits"), [("", False), ("a", True), ("-" + "a" * 63, True), ("a" * 65, False)])
def test_an_id_at_a_tracker_has_up_to_64_letters(name: str, fits: bool) -> None:
    path = "trainer.trackers.wandb.id"
    assert (path not in said({path: name})) == fits


def test_experts_that_are_not_spread_may_lie_on_several_gpus() -> None:
    assert ENGINE + "expert_parallel_size" not in said({**VLLM, ENGINE + "tensor_parallel_size": 2})


@pytest.mark.parametrize(("tensor", "fix"), [(2, "set it to 2"), (3, "give the policy a multiple of 3 GPUs")])
def test_engines_are_told_how_many_fill_the_gpus_of_the_policy(tensor: int, fix: str) -> None:
    values = {**VLLM, PLACEMENT + "policy_num_gpus_per_node": 4, ENGINE + "tensor_parallel_size": tensor}
    assert fix in said(values)[ENGINE + "num_engines"]


@pytest.mark.parametrize(("together", "switch"), [(True, "colocate_all"), (False, "colocate_policy_ref")])
def test_models_that_share_gpus_are_told_by_which_switch(together: bool, switch: str) -> None:
    values = {**RAY, PLACEMENT + "colocate_all": together, PLACEMENT + "ref_num_gpus_per_node": 2}
    assert f"(trainer.placement.{switch})" in said(values)[PLACEMENT + "ref_num_gpus_per_node"]


@pytest.mark.parametrize(("name", "value"), [("path", "folder"), ("url", "http://127.0.0.1:8001/score")])
def test_a_reward_model_is_here_or_elsewhere(name: str, value: str) -> None:
    messages = said({"environment.env_class": "reward_model", JUDGE + name: value})
    assert not {JUDGE + "path", JUDGE + "url"} & messages.keys()


def test_positions_that_only_the_learner_sets_are_another_model() -> None:
    assert POSITIONS in said({"trainer.policy.model_config_kwargs": {"rope_parameters": {"factor": 2.0}}})


def test_optimizer_state_at_stage_1_needs_its_folder_on_the_drive() -> None:
    messages = said({**DEEPSPEED, ZERO + "stage": 1, ZERO + "offload_optimizer.device": "nvme"})
    assert ZERO + "offload_optimizer.nvme_path" in messages


def test_three_ranks_do_not_hold_the_weights_of_two() -> None:
    messages = said({**RAY, **DEEPSPEED, **TWO, ZERO + "zero_hpz_partition_size": 3})
    assert "3 does not divide the policy's 2 ranks" in messages[ZERO + "zero_hpz_partition_size"]


def test_ranks_that_hold_no_whole_copy_are_counted_in_groups_only_where_they_cut_matrices() -> None:
    path, sizes = "trainer.policy.fsdp_config.fsdp_size", {f"{PLACEMENT}policy_num_gpus_per_node": 8}
    messages = said({**RAY, **TWO, **sizes, path: 3})
    cut = said({**RAY, **TWO, **sizes, path: 3, "trainer.policy.tensor_parallel_size": 2})
    assert messages[path].startswith("3 does not divide the policy's 8 ranks; ")
    assert cut[path].startswith("3 does not divide the policy's 4 groups of 2 ranks that cut matrices; ")


def test_groups_of_deepspeed_are_switched_off_by_one() -> None:
    path, cuts = ZERO + "zero_hpz_partition_size", {"trainer.policy.tensor_parallel_size": 2}
    message = said({**RAY, **DEEPSPEED, **TWO, **cuts, path: 2})[path]
    assert message.endswith("; set it to 1, or trainer.policy.tensor_parallel_size = 1")


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        (
            {**RAY, ENGINE + "backend": "sglang", ENGINE + "weight_sync_backend": "delta"},
            "delta does not reach engines of the kind sglang",
            "possible values: disk, nccl, gloo, none",
        ),
        (
            {
                PLACEMENT + "executor": "in_process",
                ENGINE + "backend": "http",
                ENGINE + "external_server_urls": ["http://10.0.0.1:8000"],
                ENGINE + "weight_sync_backend": "gloo",
            },
            "gloo does not reach engines that are already running from a learner that is not on Ray",
            "possible values: disk, delta, none, or set trainer.placement.executor = ray",
        ),
    ],
)
def test_a_road_that_ends_before_the_engines_says_which_engines_and_where_it_would_begin(
    values: dict[str, Any], message: str, hint: str
) -> None:
    assert said(values)[ENGINE + "weight_sync_backend"] == f"{message}; leave it out: it is derived; {hint}"


def test_reentrant_checkpointing_is_for_models_without_router_losses_and_for_megatron() -> None:
    path = "trainer.gradient_checkpointing_use_reentrant"
    reentrant = {"trainer.recompute_activations": True, path: True}
    costs = {"trainer.policy.router_z_loss_coef": 0.01}
    assert path not in said(reentrant)
    assert path in said({**reentrant, **costs})
    assert path not in said({**VLLM, "trainer.strategy": "megatron", **reentrant, **costs})


def test_how_adapters_start_matters_where_there_are_some() -> None:
    lora = "trainer.policy.model.lora."
    assert lora + "init_method" in said({lora + "rank": 4, lora + "init_method": "pissa"})
    assert lora + "init_method" not in said({lora + "rank": 0, lora + "init_method": "pissa"})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"generator.n_samples_per_prompt": 1}, True),
        ({"generator.n_samples_per_prompt": 2}, False),
        (
            {
                "generator.n_samples_per_prompt": 1,
                "generator.eval_n_samples_per_prompt": 2,
                "trainer.eval_interval": 5,
            },
            False,
        ),
    ],
)
def test_failed_samples_have_neighbours_in_training_or_in_evaluation(values: dict[str, Any], expected: bool) -> None:
    path = "environment.skyrl_gym.failed_samples"
    data = {"data.val_data": ["rows"], "trainer.eval_before_train": False, "trainer.eval_interval": 0}
    loaded: Any = load([], RUNNABLE | data | values | {path: "drop_group"})
    run, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    assert (path in {problem.path for problem in without_effect(run, origins)}) == expected


def test_overrides_have_a_number_and_a_text_is_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys.modules["skyrl.config.loading.load"], "MOST_OVERRIDES", 2
    )  # the package has a function `load`
    text: Any = load([], "trainer.epochs=3").config
    texts: Any = load([], ["trainer.epochs=3", "trainer.epochs=4"]).config
    assert (text.trainer.epochs, texts.trainer.epochs) == (3, 4)
    with pytest.raises(ConfigError, match="3 overrides, but at most 2"):
        load([], ["trainer.epochs=3"] * 3)


def test_what_extends_a_file_is_no_field_of_the_command_line() -> None:
    with pytest.raises(ConfigError, match="it belongs in a file; here, name the file or the preset itself"):
        load([], ["extends=preset:cuda"])


def test_a_name_of_another_kind_of_run_is_told_apart_from_one_that_no_kind_has() -> None:
    with pytest.raises(ConfigError) as refused:
        load([], {"kind": "sft", "generator.n_samples_per_prompt": 2, "zzzzz": 1})
    hints = {problem.path: problem.hint for problem in refused.value.problems}
    assert hints["generator.n_samples_per_prompt"] == "generator belongs to kind = rl, and this is kind = sft"
    assert "belongs to kind" not in hints["zzzzz"]


def test_a_kind_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError) as refused:
        load([], {"kind": "sftt", "train_datasets": ["rows"]})
    assert {problem.message for problem in refused.value.problems} == {
        "'sftt' is not one of: rl, sft, reward_model, preference"
    }


def test_the_last_kind_counts_whatever_a_file_says(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('kind = "reward_model"\n', encoding="utf-8")
    loaded: Any = load([tmp_path / "run.toml"], {"kind": "sft", "train_datasets": ["rows"]})
    assert loaded.config.kind == "sft"


@pytest.mark.parametrize(
    ("words", "text"), [(["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c", "d"], "a, b, c and d")]
)
def test_conditions_are_listed_as_in_a_sentence(words: list[str], text: str) -> None:
    assert join_choices(words, "and") == text


@pytest.mark.parametrize(("scheduler", "expected"), [("cosine_with_min_lr", False), ("constant", True)])
def test_the_lowest_learning_rate_is_read_by_schedules_that_decay(scheduler: str, expected: bool) -> None:
    path = "trainer.policy.optimizer_config."
    loaded: Any = load([], RUNNABLE | {path + "scheduler": scheduler, path + "min_lr_ratio": 0.1})
    run, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    assert (path + "min_lr_ratio" in {problem.path for problem in without_effect(run, origins)}) == expected
