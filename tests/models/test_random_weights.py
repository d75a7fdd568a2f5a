"""Weights that are drawn from the seed of a run, in place of stored ones: alike in learner, reference and engines."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl.config import TrainerConfig
from skyrl.errors import ModelError
from skyrl.inference.torch.engine import TorchEngine, load_torch_engine
from skyrl.learners.workers.roles import RefWorker
from skyrl.models.files.loading import load_causal_lm
from skyrl.training.objective import policy_objective
from skyrl.tree import evolve_at
from tests.learners.updating import PolicyWorker

CPU = torch.device("cpu")


@pytest.fixture
def bare(nano: Path, tmp_path: Path) -> Path:
    """The nano model's folder without its weights."""
    return Path(shutil.copytree(nano / "model", tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors")))


def drawn(folder: Path, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model = load_causal_lm(str(folder), dtype=dtype, attention="sdpa", device=CPU, init_seed=seed)
    return {name: weight.detach() for name, weight in model.named_parameters()}


def test_one_seed_draws_the_same_weights_and_leaves_other_draws_alone(bare: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    one, repeat, other = drawn(bare, 1), drawn(bare, 1), drawn(bare, 2)
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(weight, repeat[name]) for name, weight in one.items())
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(one[name], other[name])
    assert one[name].std() == pytest.approx(0.3, rel=0.1)  # initializer_range of its configuration
    assert torch.equal(drawn(bare, 1, torch.bfloat16)[name], one[name].bfloat16())


def test_a_folder_without_weights_is_refused_where_they_are_to_be_loaded(bare: Path) -> None:
    with pytest.raises(ModelError, match="contains no weights in safetensors"):
        load_causal_lm(str(bare), dtype=torch.float32, attention="sdpa", device=CPU)


def test_policy_reference_and_engine_start_from_the_same_weights(bare: Path, nano: Path) -> None:
    models: dict[str, Any] = {"path": str(bare), "init_from_scratch": True}
    trainer = TrainerConfig(device="cpu", compute_dtype="float32", attention="sdpa", seed=5)
    for path, value in models.items():
        trainer = evolve_at(evolve_at(trainer, f"policy.model.{path}", value), f"ref.model.{path}", value)
    trainer = evolve_at(trainer, "algorithm.temperature", 1.0)
    policy, reference = PolicyWorker(trainer, policy_objective(trainer.algorithm)), RefWorker(trainer)
    engine = load_torch_engine(
        str(bare), dtype="float32", attention="sdpa", device="cpu", max_num_seqs=2, init_seed=trainer.seed
    )
    assert isinstance(engine, TorchEngine)
    weights = dict(policy.weights())
    for other in (dict(reference.strategy.gather()), dict(engine._causal_lm.hf_model.named_parameters())):
        assert all(torch.equal(weight, other[name]) for name, weight in weights.items())
    stored = load_causal_lm(str(nano / "model"), dtype=torch.float32, attention="sdpa", device=CPU)
    assert not torch.equal(stored.get_parameter("lm_head.weight"), weights["model.embed_tokens.weight"])
