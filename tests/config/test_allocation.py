"""An allocation string stands for fields, which may be written beside it as long as they agree."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.config import ConfigError, SkyRLTrainConfig, check, load, resolve
from skyrl.config.derive.allocation import ALLOCATION_RULES, PATH, fields_of
from skyrl.planning.allocation import read_allocation
from skyrl.tree import get_at

P = "trainer.placement."
ENGINE = "generator.inference_engine."


def run_of(text: str, **more: Any) -> SkyRLTrainConfig:
    return resolve(load([], {"trainer.device": "cuda", "trainer.logger": "console", PATH: text, **more}))


def problems(run: SkyRLTrainConfig, severity: str = "error") -> list[tuple[str, str]]:
    return [(problem.path, problem.message) for problem in check(run) if problem.severity == severity]


def test_engines_and_learners_get_gpus_of_their_own() -> None:
    run = run_of("vllm:d4t2+fsdp:d16")
    placement, engine = run.trainer.placement, run.generator.inference_engine
    assert (engine.num_engines, engine.tensor_parallel_size, placement.colocate_all) == (4, 2, False)
    assert (placement.policy_num_nodes, placement.policy_num_gpus_per_node) == (2, 8)
    assert (placement.ref_num_nodes, placement.ref_num_gpus_per_node, run.trainer.strategy) == (2, 8, "fsdp2")
    assert problems(run) == []


def test_a_bar_lets_them_take_turns() -> None:
    run = run_of("vllm:d2t4|fsdp:d8")
    assert run.trainer.placement.colocate_all
    assert problems(run) == []


def test_learners_share_matrices_and_sequences() -> None:
    run = run_of("vllm:d8+fsdp:d2t2c2", **{"trainer.attention": "sdpa"})
    assert (run.trainer.policy.tensor_parallel_size, run.trainer.policy.sequence_parallel_size) == (2, 2)
    assert run.trainer.placement.policy_num_gpus_per_node == 8


def test_learners_spread_experts() -> None:
    run = run_of("vllm:d8+fsdp:d8e4")
    assert (run.trainer.strategy, run.trainer.policy.expert_parallel_size) == ("fsdp2", 4)
    assert run.trainer.ref.expert_parallel_size == 4
    assert problems(run) == []


def test_named_parts_are_models() -> None:
    run = run_of("vllm[rollout]:d2+fsdp[actor]:d4+fsdp[ref]:d2")
    placement = run.trainer.placement
    assert (placement.policy_num_gpus_per_node, placement.ref_num_gpus_per_node) == (4, 2)
    assert not placement.colocate_policy_ref
    assert problems(run) == []


def test_a_field_that_disagrees_is_an_error_and_one_that_agrees_is_not() -> None:
    assert problems(run_of("vllm:d4+fsdp:d4", **{f"{ENGINE}num_engines": 4})) == []
    for other in (3, 1):  # 1 is the default, and stands where it was written
        [(path, message)] = problems(run_of("vllm:d4+fsdp:d4", **{f"{ENGINE}num_engines": other}))
        assert path == f"{ENGINE}num_engines"
        assert message == f"{other}, but trainer.placement.allocation = vllm:d4+fsdp:d4 sets it to 4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm:d8|fsdp:d4p2", "fsdp learners have no pipeline parallelism, but the pipeline degree is 2"),
        (
            "vllm:d4+fsdp:(attn:d2t2|ffn:t2e2)",
            "fsdp learners split experts by e alone, but their tensor degree is 2",
        ),
        ("vllm:d8+eval", "names only engines, but this run trains"),
        ("d8", "names only learners, but this run starts engines"),
        ("vllm[rollout]:d2+fsdp[critic]:d4", "no part is for the policy: the learners are critic"),
        ("vllm[rollout]:d2+fsdp[actor]:d4+fsdp[judge]:d4", "no model of a run is called 'judge'"),
        ("vllm[r]:d2+fsdp[actor]:d4+megatron[ref]:d4", "some learners use Megatron and some do not"),
    ],
)
def test_what_does_not_run_is_refused_by_the_check(text: str, message: str) -> None:
    assert (PATH, message) in problems(run_of(text))


def test_degrees_of_megatron_are_read_and_those_of_experts_may_differ() -> None:
    run = run_of("vllm:d8+megatron:(attn:d2p2t2|ffn:d2p2e2)")
    megatron = run.trainer.policy.megatron_config
    assert (megatron.pipeline_model_parallel_size, megatron.expert_model_parallel_size) == (2, 2)
    assert (megatron.expert_tensor_parallel_size, megatron.tensor_model_parallel_size) == (1, 2)
    paths = [path for path, _ in problems(run)]
    assert "trainer.strategy" not in paths
    assert not [path for path in paths if "expert" in path]


def test_a_string_that_cannot_be_read_says_why() -> None:
    with pytest.raises(ConfigError) as failure:
        run_of("vllm:d2d2")
    [problem] = failure.value.problems
    assert (problem.path, problem.message) == (PATH, "'vllm:d2d2' gives the data degree twice")


def test_every_field_that_a_string_may_stand_for_has_a_rule() -> None:
    strings = (
        "vllm:d2+fsdp:d2t2c2",
        "vllm:d8|megatron:(attn:d2p2t2|ffn:d2p2e2)",
        "vllm[r]:d1+fsdp[actor]:d1+fsdp[ref]:d2",
    )
    paths = {path for text in strings for path in fields_of(read_allocation(text))}
    assert paths <= {rule.writes for rule in ALLOCATION_RULES}


def test_without_a_string_no_field_changes() -> None:
    run = SkyRLTrainConfig()
    assert {rule.compute(run) == get_at(run, rule.writes) for rule in ALLOCATION_RULES} == {True}


def test_the_part_of_the_policy_says_the_strategy() -> None:
    fields = fields_of(read_allocation("vllm[rollout]:d1+megatron[actor]:d1+fsdp[ref]:d1"))
    assert fields["trainer.strategy"] == "megatron"
