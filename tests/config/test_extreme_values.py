"""The largest and smallest numbers, at every leaf that holds one: accepted or refused in words, by every reader of a
tree that starts nothing.
"""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from skyrl.cli.planning.plan_table import memory_lines, table
from skyrl.config import SkyRLTrainConfig, check, load
from skyrl.config.loading.explain import explain
from skyrl.config.loading.kinds import root_of
from skyrl.config.loading.resolve import resolve_with_origins
from skyrl.errors import ConfigError, SkyRLError
from skyrl.tools.run_plan import plan_of
from skyrl.tree.classes import leaf_paths
from tests.config.leaves import RUNNABLE, each

ENGINE = "generator.inference_engine."
PLACEMENT = "trainer.placement."
GPUS: dict[str, Any] = {
    "trainer.device": "cuda",
    "trainer.logger": "console",
    "trainer.policy.model.path": "Qwen/Qwen2.5-7B",  # whose sizes are known, so that memory is estimated
    "data.train_data": ["rows.jsonl"],
    "trainer.eval_interval": -1,
    "trainer.eval_before_train": False,
    ENGINE + "num_engines": 8,
    **{f"{PLACEMENT}{name}": 8 for name in ("policy_num_gpus_per_node", "ref_num_gpus_per_node")},
    PLACEMENT + "gpu_kind": "H100-80",
}
SPREAD = {f"trainer.{model}.megatron_config.expert_model_parallel_size": 8 for model in ("policy", "ref")}
BASES: dict[str, dict[str, Any]] = {
    "one process": RUNNABLE,
    "shared GPUs": GPUS,
    "asynchronous": {
        **GPUS,
        "trainer.fully_async.enabled": True,
        PLACEMENT + "colocate_all": False,
        "generator.max_turns": 5,
        "generator.max_input_length": 8192,
        "trainer.policy.model.lora.rank": 8,
    },
    "megatron": {**GPUS, "trainer.strategy": "megatron", "trainer.policy.model.path": "Qwen/Qwen3-30B-A3B", **SPREAD},
    "deepspeed": {**GPUS, "trainer.strategy": "deepspeed"},
    "sft": {"kind": "sft", "train_datasets": ["a.jsonl"], "model.path": "Qwen/Qwen2.5-7B", "device": "cuda"},
    "reward_model": {"kind": "reward_model", "train_datasets": ["a.jsonl"], "model.path": "m", "device": "cpu"},
    "preference": {"kind": "preference", "train_datasets": ["a.jsonl"], "model.path": "m", "device": "cpu"},
}
EXTREMES = (1e300, 2**63 - 1, -1e300, 2**63, 2**31, -(2**63), -0.0, 5e-324)
FEW = EXTREMES[:2]
SWEEPS = [("asynchronous", FEW), ("sft", EXTREMES), *((base, EXTREMES) for base in BASES if base != "sft")]


def holds_a_number(kind: Any) -> bool:
    return kind in (int, float) or any(map(holds_a_number, get_args(kind)))


def read(values: dict[str, Any], path: str) -> None:
    """Everything that a command asks of a tree before it starts something. Raises errors of ours, or is wrong."""
    loaded: Any = load([], values)
    run, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    explain(path, run, origins)
    problems = check(run, origins)
    if isinstance(run, SkyRLTrainConfig) and not any(problem.severity == "error" for problem in problems):
        plan = plan_of(run)
        assert table(plan) and memory_lines(plan) is not None
        json.dumps(plan, allow_nan=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("base", "numbers"),
    [case if case in SWEEPS[:2] else pytest.param(*case, marks=pytest.mark.long) for case in SWEEPS],
)
def test_an_extreme_number_is_accepted_or_refused_in_words(
    request: pytest.FixtureRequest, base: str, numbers: tuple[float, ...]
) -> None:
    values = BASES[base]
    read(values, "kind")  # which is fine as it is
    twins = (".ref.", ".critic.")  # tables of the policy's class
    leaves = [path for path, leaf in leaf_paths(root_of(values.get("kind", "rl"))) if holds_a_number(leaf.type)]

    @each((path, number) for path in leaves if not any(twin in path for twin in twins) for number in numbers)
    def is_answered(case: tuple[str, float]) -> None:
        path, number = case
        try:
            read({**values, path: number}, path)
        except SkyRLError:  # in words
            return

    is_answered(request)


@pytest.mark.parametrize(
    ("path", "number", "message"),
    [
        (
            ENGINE + "weight_transfer_threshold_cuda_ipc_GB",
            1e300,
            "1e+300 is more than 1000000000 gigabytes, the limit",
        ),
        ("environment.skyrl_gym.user_env_memory_gb", 1e10, "10000000000.0 is more than 1000000000 gigabytes"),
        ("environment.agent.memory_gb", 2**63, "is more than 1000000000 gigabytes"),
        (PLACEMENT + "call_timeout_seconds", 1e300, "1e+300 is more than 1000000000 seconds, the limit"),
        ("trainer.faults.stall_timeout_seconds", 1e300, "is more than 1000000000 seconds"),
        ("environment.skyrl_gym.step_timeout_seconds", 1e300, "is more than 1000000000 seconds"),
        ("environment.skyrl_gym.search.timeout", 2**40, "is more than 1000000000 seconds"),
        ("trainer.fully_async.stall_timeout_seconds", 1e300, "is more than 1000000000 seconds"),
    ],
)
def test_no_clock_and_no_count_of_bytes_overflows(path: str, number: float, message: str) -> None:
    for overrides in ({path: number}, [f"{path}={number!r}"]):
        with pytest.raises(ConfigError) as refused:
            load([], overrides)
        assert message in refused.value.problems[0].message
    unit = "TB" if "gigabytes" in message else "d"
    with pytest.raises(ConfigError, match="is more than 1000000000"):
        load([], [f"{path}=90000000{unit}"])


@pytest.mark.parametrize("zero", [-0.0, "-0.0"])
def test_a_negative_zero_is_zero(zero: Any) -> None:
    path = "trainer.policy.optimizer_config.weight_decay"
    loaded = load([], [f"{path}={zero}"] if isinstance(zero, str) else {path: zero})
    assert str(loaded.config.trainer.policy.optimizer_config.weight_decay) == "0.0"


@pytest.mark.parametrize("path", ["trainer.strategy", "trainer.epochs", "trainer.logger", "data.train_data", "trainer"])
@pytest.mark.parametrize("key", [1, None, True, (1, 2), b"a"])
def test_a_table_whose_keys_are_no_text_is_refused_in_words(path: str, key: Any) -> None:
    for table_of in ({key: 2}, {key: {key: 2}}, {"a": {key: 2}}):
        with pytest.raises(ConfigError):
            load([], {path: table_of})
