"""Ranks that cut matrices among them: which models they take."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3Config

from skyrl.config import TrainerConfig
from skyrl.errors import ModelError
from skyrl.training.objective import policy_objective
from tests.inference.nano import nano_model
from tests.learners.pool import Pool
from tests.learners.spreading import CUTTING, changed
from tests.learners.updating import PolicyWorker
from tests.models.family_cells import store

pytestmark = pytest.mark.xdist_group("ranks")


def refused(
    pool: Pool, small: TrainerConfig, folder: Path, ranks: int, strategy: str = "fsdp2", *, without: str = ""
) -> str:
    """What the ranks say of the model in the folder, whose plan may lack a line."""
    values: dict[str, Any] = {"policy.model.path": str(folder), CUTTING: ranks, "strategy": strategy}
    trainer = changed(small, values)
    worker = partial(PolicyWorker, trainer, policy_objective(trainer.algorithm))
    with pytest.raises(ModelError) as refusal:
        pool.start(partial(with_other_plan, worker, without), ranks)
    return str(refusal.value)


def with_other_plan(make: partial[PolicyWorker], without: str, *args: Any, **options: Any) -> PolicyWorker:
    """A worker, made while transformers' plan for Qwen3 lacks a line."""
    plan = Qwen3Config.base_model_tp_plan
    with patch.dict(plan):
        plan.pop(without, None)
        return make(*args, **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "without", "fault"),
    [
        ("Gemma 3n", "", "log-probabilities of a small copy differ by "),
        pytest.param("Apertus", "", "the gradient of model.layers.0.mlp.act_fn.", marks=pytest.mark.long),
        pytest.param("Granite, windows", "", "a small copy fails: ", marks=pytest.mark.long),
        ("Qwen3", "layers.*.self_attn.q_norm", "the gradient of model.layers.0.self_attn.q_norm.weight "),
        ("Qwen3", "layers.*.mlp.down_proj", "a small copy fails: "),
    ],
)
def test_a_plan_that_does_not_give_the_whole_models_numbers_is_refused(
    family: str, without: str, fault: str, pool: Pool, small: TrainerConfig, nano: Path, tmp_path: Path
) -> None:
    message = refused(pool, small, Path(store(family, nano / "model", tmp_path)), 2, without=without)
    assert f"is not right ({fault}" in message
    assert message.endswith("set trainer.policy.tensor_parallel_size = 1")


def test_heads_that_do_not_divide_are_refused(pool: Pool, small: TrainerConfig, tmp_path: Path) -> None:
    nano_model().save_pretrained(tmp_path)
    message = refused(pool, small, tmp_path, 4)
    assert message == (
        "4 ranks cannot share the model's 2 key and value heads: set trainer.policy.tensor_parallel_size = 2"
    )


@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed"])
def test_a_model_without_a_plan_is_refused(
    strategy: str, pool: Pool, zero_pool: Pool, small: TrainerConfig, tmp_path: Path
) -> None:
    config = GPT2Config(vocab_size=258, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    message = refused(zero_pool if strategy == "deepspeed" else pool, small, tmp_path, 2, strategy)
    assert message.startswith("transformers has no tensor-parallel plan for a gpt2")
    assert message.endswith("set trainer.policy.tensor_parallel_size = 1")
