"""Ranks, batches and processes of supervised runs, and a supervised run that does not say so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from skyrl.config import compose
from skyrl.errors import ConfigError, Problem

SFT: dict[str, Any] = {"kind": "sft", "model.path": "m", "train_datasets": ["rows"], "device": "cpu"}


def problems(**values: Any) -> dict[str, str]:
    """Path -> message and hint."""
    try:
        compose([], SFT | {name.replace("__", "."): value for name, value in values.items()})
    except ConfigError as error:
        return {problem.path: f"{problem.message}; {problem.hint}" for problem in error.problems}
    return {}


@pytest.mark.parametrize(("nodes", "gpus", "executor"), [(1, 1, "in_process"), (1, 2, "ray"), (2, 1, "ray")])
def test_one_rank_runs_in_the_process_and_several_run_on_ray(nodes: int, gpus: int, executor: str) -> None:
    ranks = {"placement.num_nodes": nodes, "placement.num_gpus_per_node": gpus, "batch_size": 2}
    run: Any = compose([], SFT | ranks).config
    assert run.placement.executor == executor


@pytest.mark.parametrize(("gpus", "refused"), [(1, False), (2, True)])
def test_a_process_has_room_for_one_rank(gpus: int, refused: bool) -> None:
    messages = problems(placement__executor="in_process", placement__num_gpus_per_node=gpus, batch_size=2)
    assert ("placement.executor" in messages) == refused
    if refused:
        assert "this run has 2" in messages["placement.executor"]


@pytest.mark.parametrize(
    ("rows", "ranks", "nearest"), [(8, 4, None), (10, 4, "8 and 12"), (3, 4, "4"), (7, 3, "6 and 9")]
)
def test_rows_are_dealt_out_evenly_and_the_nearest_sizes_are_named(rows: int, ranks: int, nearest: str | None) -> None:
    message = problems(batch_size=rows, placement__num_gpus_per_node=ranks).get("batch_size")
    assert message == (
        nearest and f"{rows} cannot be split evenly across {ranks} ranks; nearest sizes that can: {nearest}"
    )


@pytest.mark.parametrize(("rows", "nearest"), [(8, None), (7, "6 and 8")])
def test_rows_are_dealt_out_to_groups_of_ranks_that_share_them(rows: int, nearest: str | None) -> None:
    message = problems(batch_size=rows, placement__num_gpus_per_node=4, sequence_parallel_size=2).get("batch_size")
    assert message == (
        nearest and f"{rows} cannot be split evenly across 2 groups of 2 ranks; nearest sizes that can: {nearest}"
    )


@pytest.mark.parametrize(
    ("curriculum", "path", "message"),
    [
        (
            {"sampler": "pools"},
            "curriculum.sampler",
            "pools depends on rewards, which rows of a supervised run do not have",
        ),
        ({"sampler": "random"}, "curriculum.sampler", "there is no sampler 'random' here"),
        ({"sampler": "mixture"}, "curriculum.mixture", "the list is empty"),
        (
            {"sampler": "mixture", "mixture": [{"weights": [1.0, 2.0]}]},
            "curriculum.mixture",
            "stage 0 has 2 weights, and the number of sources is 1",
        ),
    ],
)
def test_a_sampler_needs_no_rewards_and_can_draw(curriculum: dict[str, Any], path: str, message: str) -> None:
    assert message in problems(curriculum=curriculum)[path]


SHARED: dict[str, Any] = {"placement__num_gpus_per_node": 4, "batch_size": 4}


@pytest.mark.parametrize(
    ("values", "path", "message"),
    [
        (
            {"sequence_parallel_size": 3, "tensor_parallel_size": 2},
            "sequence_parallel_size",
            "4 ranks cannot be divided into groups of 6 (sequence_parallel_size = 3, tensor_parallel_size = 2); sizes "
            "whose product is one of 1, 2, 4",
        ),
        (
            {"context_parallel_size": 2, "use_sequence_packing": False},
            "context_parallel_size",
            "2 ranks can share a sequence only if rows are packed; set use_sequence_packing = true",
        ),
        (
            {"sequence_parallel_size": 2, "attention": "eager"},
            "sequence_parallel_size",
            "2 ranks cannot share a sequence while attention is eager; set attention = sdpa, which uses torch's "
            "FlashAttention kernels on CUDA",
        ),
        (
            {"context_parallel_size": 2, "use_dropout": True},
            "use_dropout",
            "attention dropout does not work with context_parallel_size = 2; set it to false, or use "
            "sequence_parallel_size instead",
        ),
        (
            {"expert_parallel_size": 2, "strategy": "deepspeed"},
            "expert_parallel_size",
            "2: strategy = deepspeed does not read it; set it to 1, or strategy = fsdp2",
        ),
        (
            {"expert_parallel_size": 2, "tensor_parallel_size": 2},
            "expert_parallel_size",
            "experts cannot be spread over 2 ranks while tensor_parallel_size = 2; set one of them to 1",
        ),
        (
            {"expert_parallel_size": 2, "fsdp_config.fsdp_size": 2},
            "expert_parallel_size",
            "experts cannot be spread over 2 ranks while a copy is sharded over only some of the ranks; set "
            "fsdp_config.fsdp_size = -1",
        ),
        (
            {"expert_parallel_size": 3},
            "expert_parallel_size",
            "3 does not divide the 4 ranks of the model; nearest divisors: 2 and 4",
        ),
    ],
)
def test_a_layout_that_cannot_run_is_refused(values: dict[str, Any], path: str, message: str) -> None:
    assert problems(**SHARED, **values) == {path: message}


def test_layouts_that_fit_their_ranks_are_taken() -> None:
    assert problems(**SHARED, sequence_parallel_size=2, tensor_parallel_size=2) == {}
    assert problems(**SHARED, context_parallel_size=2, strategy="deepspeed") == {}
    assert problems(**SHARED, tensor_parallel_size=2, strategy="deepspeed") == {}
    assert problems(**SHARED, context_parallel_size=2, expert_parallel_size=4) == {}


def test_a_supervised_run_without_its_kind_is_recognized_by_fields_that_reinforcement_learning_lacks() -> None:
    with pytest.raises(ConfigError) as refused:
        compose([], {"train_datasets": ["rows"], "eval_datasets": ["others"]})
    (message,) = [problem.message for problem in refused.value.problems if problem.path == "kind"]
    assert message.endswith("reinforcement-learning run, which has no train_datasets, eval_datasets")


def test_a_kind_in_place_of_another_is_checked_as_if_it_stood_alone() -> None:
    def reads_kind(run: Any) -> Iterator[Problem]:
        yield Problem(path="kind", message=f"is {run.kind}")

    words = ["kind=reward_model", "kind=sft", "model.path=m", 'train_datasets=["rows"]', "device=cpu"]
    with pytest.raises(ConfigError) as refused:
        compose([], words, also=lambda kind: [reads_kind])
    assert [problem.message for problem in refused.value.problems] == ["is sft"]


def test_names_that_no_kind_of_run_has_say_nothing_about_the_kind() -> None:
    with pytest.raises(ConfigError) as refused:
        compose([], {"no_such_field": 1, "train_datasets": ["rows"]})
    assert "kind" not in {problem.path for problem in refused.value.problems}


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({}, False),
        ({"eval_before_train": True}, True),
        ({"eval_interval": 2}, True),
        ({"eval_interval": 2, "eval_datasets": ["others"]}, False),
    ],
)
def test_an_evaluation_that_is_asked_for_has_rows(values: dict[str, Any], refused: bool) -> None:
    assert ("eval_datasets" in problems(**{"eval_before_train": False, "eval_interval": 0} | values)) == refused


def test_sets_of_one_name_are_refused_where_they_were_named() -> None:
    twice = ["a/rows.jsonl", "b/rows.jsonl"]
    assert "several sets are called rows in metrics" in problems(eval_datasets=twice, eval_interval=1)["eval_datasets"]
    messages = problems(eval_datasets=twice, eval_dataset_names=["x", "x"], eval_interval=1)
    assert "several sets are called x" in messages["eval_dataset_names"] and "eval_datasets" not in messages


@pytest.mark.parametrize(
    ("resume", "mode", "path"), [("", "none", None), ("latest", "latest", None), ("runs/a", "from_path", "runs/a")]
)
def test_a_supervised_run_resumes_from_nothing_the_newest_or_a_path(resume: str, mode: str, path: str | None) -> None:
    run: Any = compose([], SFT | {"resume_from": resume}).config
    assert (run.trainer.resume_mode, run.trainer.resume_path) == (mode, path)


@pytest.mark.parametrize(
    ("faults", "changes", "refused"),
    [("shrink", False, True), ("shrink", True, False), ("wait", False, False), ("stop", False, False)],
)
def test_a_supervised_run_on_fewer_ranks_needs_resume_with_changes(faults: str, changes: bool, refused: bool) -> None:
    ranks = {"placement__num_gpus_per_node": 2, "batch_size": 2}
    messages = problems(faults__on_lost_rank=faults, resume_with_changes=changes, **ranks)
    assert ("faults.on_lost_rank" in messages) == refused


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("optimizer_config.lr", 1.5, "each step changes every weight by about 1.5"),
        ("optimizer_config.lr", 0.0, "0 changes no weight: nothing is learned"),
        ("optimizer_config.weight_decay", 20.0, "each step shrinks every weight by 20.0 times the learning rate"),
        ("optimizer_config.adam_eps", 1.0, "1.0 is above most gradients"),
        ("optimizer_config.adam_betas", [0.99, 0.9], "the second moment decays faster (0.9) than the first (0.99)"),
    ],
)
def test_a_setting_of_the_optimizer_that_can_only_be_a_slip_is_warned_of(path: str, value: Any, message: str) -> None:
    [warning] = [candidate for candidate in compose([], SFT | {path: value}).warnings if candidate.path == path]
    assert message in warning.message
    assert warning.hint.endswith("is usual")


def test_attention_kernels_of_cuda_are_refused_on_a_cpu() -> None:
    assert problems(attention="flash_attention_2")["attention"].startswith("flash_attention_2 needs the device cuda")
    assert "attention" not in problems(attention="flash_attention_2", device="cuda")


@pytest.mark.parametrize("name", ["num_nodes", "num_gpus_per_node"])
def test_a_run_that_no_cluster_holds_is_refused(name: str) -> None:
    messages = problems(batch_size=2**40, **{f"placement__{name}": 2**40})
    assert "ask for 1099511627776 GPUs, but at most 131072" in messages["placement"]


@pytest.mark.parametrize(
    ("values", "path", "message"),
    [
        ({}, "num_steps", "the number of streamed rows is not known in advance"),
        ({"num_steps": 3, "train_dataset_weights": (1.0,)}, "train_dataset_weights", "one after the other"),
        (
            {"max_training_samples": 8, "curriculum.sampler": "schedule", "curriculum.stages": [{}]},
            "curriculum.sampler",
            "in the order in which they are read",
        ),
        ({"num_steps": 3}, None, ""),
    ],
)
def test_streamed_rows_need_an_end_and_are_drawn_in_turn(
    values: dict[str, Any], path: str | None, message: str
) -> None:
    messages = problems(streaming=True, **values)
    assert (not messages) if path is None else (message in messages[path])
