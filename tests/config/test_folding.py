"""A folded run is small, passes the check, and does what the large one does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from skyrl.config import SkyRLTrainConfig, check, load, resolve
from skyrl.config.derive.sizes import work_of
from skyrl.tools.scale_down import folded, folded_lines

ENGINE = "generator.inference_engine."
PLACEMENT = "trainer.placement."
NOTHING: Mapping[str, Any] = {}

LARGE: Mapping[str, Any] = {
    "trainer.device": "cuda",
    "trainer.logger": "console",
    "trainer.policy.model.path": "Qwen/Qwen2.5-7B",
    f"{PLACEMENT}policy_num_nodes": 8,
    f"{PLACEMENT}policy_num_gpus_per_node": 8,
    f"{PLACEMENT}ref_num_nodes": 8,
    f"{PLACEMENT}ref_num_gpus_per_node": 8,
    f"{ENGINE}num_engines": 32,
    f"{ENGINE}tensor_parallel_size": 2,
}

ELSEWHERE: Mapping[str, Any] = {
    f"{PLACEMENT}colocate_all": False,
    f"{ENGINE}num_engines": 1,
    f"{ENGINE}backend": "http",
}
"""Engines that run already."""


def both(changes: Mapping[str, Any]) -> tuple[SkyRLTrainConfig, SkyRLTrainConfig]:
    """A large run, and the folded one."""
    run = resolve(load([], {**LARGE, **changes}))
    assert [problem for problem in check(run) if problem.severity == "error"] == []
    return run, resolve(load([], {**LARGE, **changes, **folded(run)}))


@pytest.mark.parametrize(
    "changes",
    [
        NOTHING,
        {"trainer.strategy": "deepspeed"},
        {"trainer.policy.sequence_parallel_size": 2, "trainer.ref.sequence_parallel_size": 2},
        {"trainer.fully_async.enabled": True, f"{PLACEMENT}colocate_all": False},
        {"trainer.policy.fsdp_config.cpu_offload": True, "trainer.ref.fsdp_config.cpu_offload": True},
        {"trainer.max_tokens_per_microbatch": 32768},
        {"trainer.policy.model.lora.rank": 32},
        {f"{ENGINE}enforce_eager": True, f"{ENGINE}rollout_dtype": "bfloat16"},
        {"generator.max_turns": 8, "generator.max_input_length": 4096},
        {**ELSEWHERE, f"{ENGINE}external_server_urls": ["http://host:1"]},
        {**ELSEWHERE, f"{ENGINE}external_proxy_url": "http://host:1", f"{ENGINE}backend": "vllm"},
        {**ELSEWHERE, f"{ENGINE}remote_urls": ["host:1"], f"{ENGINE}run_engines_locally": False},
    ],
)
def test_a_folded_run_passes_the_check_in_one_process(changes: Mapping[str, Any]) -> None:
    _, small = both(changes)
    assert [problem for problem in check(small) if problem.severity == "error"] == []
    assert small.trainer.placement.executor == "in_process"
    assert small.trainer.device == "cpu"


@pytest.mark.parametrize(("batch", "mini", "updates"), [(1024, 1024, 1), (1024, 512, 2), (1024, 256, 4), (1024, 64, 4)])
def test_a_batch_keeps_its_updates_as_far_as_four_prompts_go(batch: int, mini: int, updates: int) -> None:
    _, small = both({"trainer.train_batch_size": batch, "trainer.policy_mini_batch_size": mini})
    assert work_of(small, "policy").optimizer_steps == updates


def test_the_algorithm_stays() -> None:
    run, small = both({"trainer.algorithm.advantage_estimator": "rloo", "trainer.update_epochs_per_batch": 2})
    assert small.trainer.algorithm.advantage_estimator == run.trainer.algorithm.advantage_estimator == "rloo"
    assert small.trainer.update_epochs_per_batch == 2
    assert small.data == run.data


def test_what_became_smaller_is_said() -> None:
    run, _ = both({"generator.max_turns": 8, "generator.max_input_length": 4096})
    lines = folded_lines(run, folded(run))
    assert lines == [
        "64 GPUs, fsdp2 and vllm: one process, FSDP2 and the torch engine in float32",
        "batches of 1,024 prompts with 5 answers: 4 with 4",
        "answers of up to 1,024 tokens: up to 32",
        "episodes of up to 8 turns: up to 3",
    ]
