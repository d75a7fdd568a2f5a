"""A small mixture of experts learns the quick start's task on Ray, its experts spread over two ranks."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from skyrl.config import compose
from skyrl.experiments.ppo import BasePPOExp
from tests.nano_run import metrics

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("mixtures")]

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
ENGINE = "generator.inference_engine."
ENGINES: dict[str, dict[str, Any]] = {
    "torch": {
        ENGINE + "backend": "torch",
        ENGINE + "enable_return_routed_experts": True,
        "trainer.policy.moe_enable_routing_replay": True,
    },
    "vllm": {ENGINE + "backend": "vllm", ENGINE + "model_dtype": "float32"},
}


def small_mixture(tokenizer: Any, hidden_size: int, layers: int) -> Any:
    """Fresh weights: 4 experts in each layer, of which a token meets 2, heads of a size that vLLM has on a CPU."""
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes: dict[str, Any] = {"head_dim": 32}  # which transformers' class takes without saying so
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size * 3 // 4,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=hidden_size * 3 // 4,
        norm_topk_prob=True,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=None,
        **sizes,
        **special,
    )
    model = Qwen3MoeForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **special)
    return model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick start's data, and a mixture with its wrong habit."""
    folder = tmp_path_factory.mktemp("mixture")
    sys.path.insert(0, str(QUICKSTART))
    try:
        prepare = runpy.run_path(str(QUICKSTART / "prepare.py"))["prepare"]
    finally:
        sys.path.remove(str(QUICKSTART))
    prepare.__globals__["small_qwen2"] = small_mixture
    prepare(folder, 0)
    return folder


@pytest.mark.parametrize("engine", list(ENGINES))
def test_a_small_mixture_learns_with_spread_experts(engine: str, base: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "data.train_data": [str(base / "train.parquet")],
        "data.val_data": [str(base / "validation.parquet")],
        "environment.env_class": f"{QUICKSTART / 'reward.py'}:sorted_exactly",
        "trainer.policy.model.path": str(base / "model"),
        "trainer.policy.expert_parallel_size": 2,
        "trainer.policy.router_aux_loss_coef": 0.001,
        "trainer.run_path": str(tmp_path / "run"),
        "trainer.placement.executor": "ray",
        "trainer.placement.colocate_all": False,
        "trainer.placement.policy_num_gpus_per_node": 2,
        "trainer.placement.heartbeat_timeout_seconds": 600,
        **ENGINES[engine],
    }
    BasePPOExp(compose([str(QUICKSTART / "grpo.toml")], values).config).run()
    rows = metrics(tmp_path)
    scores = [row["eval/all/avg_score"] for row in rows if "eval/all/avg_score" in row]
    assert scores[-1] >= 0.8, scores
    assert max(row["policy/router_unused_experts"] for row in rows if "policy/router_unused_experts" in row) < 0.5
