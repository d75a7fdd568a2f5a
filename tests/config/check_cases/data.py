"""Cases of the checks in `skyrl.config.checks.data`."""

from __future__ import annotations

from typing import Any

REASONING = "environment.skyrl_gym.reasoning_gym.tasks"

CURRICULUM = "data.curriculum"
MCP = "environment.skyrl_gym.mcp"


def with_mcp(**changes: Any) -> dict[str, Any]:
    """A run with tools of an MCP server, changed."""
    settings = {"reward": "gsm8k", "servers": [{"command": ["a"]}]} | changes
    return {"environment.env_class": "mcp", "generator.max_turns": 2} | {
        f"{MCP}.{name}": value for name, value in settings.items()
    }


FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "trained_model_is_named": [
        ({"trainer.policy.model.path": None}, "trainer.policy.model.path"),
        ({"trainer.policy.model.path": ""}, "trainer.policy.model.path"),
    ],
    "training_has_data": [({"data.train_data": []}, "data.train_data")],
    "evaluation_has_data": [
        ({"data.val_data": [], "trainer.eval_interval": -1}, "data.val_data"),
        ({"data.val_data": [], "trainer.eval_before_train": False}, "data.val_data"),
    ],
    "recorded_samples_exclude_evaluation": [({"trainer.rollouts_from": "runs/other"}, "trainer.rollouts_from")],
    "training_sources_have_weights": [({"data.train_weights": [1.0, 2.0]}, "data.train_weights")],
    "streaming_has_an_end": [
        ({"data.streaming": True}, "trainer.max_training_steps"),
        (
            {"data.streaming": True, "trainer.max_training_steps": 9, f"{CURRICULUM}.sampler": "pools"},
            f"{CURRICULUM}.sampler",
        ),
        (
            {"data.streaming": True, "trainer.max_training_prompts": 99, f"{CURRICULUM}.skip_solved": 2},
            f"{CURRICULUM}.skip_solved",
        ),
    ],
    "curriculum_can_draw": [
        ({f"{CURRICULUM}.sampler": "easy"}, f"{CURRICULUM}.sampler"),
        ({f"{CURRICULUM}.sampler": "mixture"}, f"{CURRICULUM}.mixture"),
        ({f"{CURRICULUM}.sampler": "mixture", f"{CURRICULUM}.mixture": [{"weights": [0.0]}]}, f"{CURRICULUM}.mixture"),
        (
            {f"{CURRICULUM}.sampler": "mixture", f"{CURRICULUM}.mixture": [{"weights": [1.0, 1.0]}]},
            f"{CURRICULUM}.mixture",
        ),
        (
            {f"{CURRICULUM}.sampler": "mixture", f"{CURRICULUM}.mixture": [{"step": 3, "weights": [1.0]}]},
            f"{CURRICULUM}.mixture",
        ),
        ({f"{CURRICULUM}.sampler": "schedule"}, f"{CURRICULUM}.stages"),
        (
            {f"{CURRICULUM}.sampler": "schedule", f"{CURRICULUM}.stages": [{"sampler": "schedule"}]},
            f"{CURRICULUM}.stages",
        ),
        ({f"{CURRICULUM}.sampler": "pools", f"{CURRICULUM}.pools": []}, f"{CURRICULUM}.pools"),
        (
            {
                f"{CURRICULUM}.sampler": "pools",
                f"{CURRICULUM}.pools": [{"name": "a", "threshold": 0.5}, {"name": "b", "threshold": 0.2}],
            },
            f"{CURRICULUM}.pools",
        ),
        (
            {f"{CURRICULUM}.sampler": "pools", f"{CURRICULUM}.pools": [{"name": "unseen"}]},
            f"{CURRICULUM}.pools",
        ),
        (
            {
                f"{CURRICULUM}.sampler": "pools",
                f"{CURRICULUM}.pools": [{"name": "all", "weight": 0.0}],
                f"{CURRICULUM}.unseen_weight": 0.0,
            },
            f"{CURRICULUM}.pools",
        ),
        ({f"{CURRICULUM}.sampler": "pools", f"{CURRICULUM}.unseen_weight": 0.0}, f"{CURRICULUM}.unseen_weight"),
        (
            {f"{CURRICULUM}.sampler": "target_difficulty", f"{CURRICULUM}.target.initial": 200.0},
            f"{CURRICULUM}.target.initial",
        ),
    ],
    "data_sources_are_distinct": [
        ({"data.train_data": ["a.parquet", "b.parquet", "a.parquet"]}, "data.train_data"),
        ({"data.val_data": ["a.parquet", "a.parquet"]}, "data.val_data"),
    ],
    "reward_model_has_one_location": [
        ({"environment.env_class": "reward_model"}, "environment.skyrl_gym.reward_model.path"),
        (
            {
                "environment.env_class": "reward_model",
                "environment.skyrl_gym.reward_model.path": "rm",
                "environment.skyrl_gym.reward_model.url": "http://127.0.0.1:8001/score",
            },
            "environment.skyrl_gym.reward_model.url",
        ),
    ],
    "mcp_servers_are_complete": [
        (with_mcp(servers=[]), f"{MCP}.servers"),
        (with_mcp(servers=[{"scope": "run"}]), f"{MCP}.servers"),
        (with_mcp(servers=[{"command": ["a"], "url": "http://a/mcp"}]), f"{MCP}.servers"),
        (with_mcp(servers=[{"url": "a:80"}]), f"{MCP}.servers"),
        (with_mcp(servers=[{"command": ["a"], "token": "env:A"}]), f"{MCP}.servers"),
        (with_mcp(servers=[{"url": "http://a/mcp", "env": {"A": "1"}}]), f"{MCP}.servers"),
    ],
    "mcp_has_a_reward": [
        (with_mcp(reward=None), f"{MCP}.reward"),
        (with_mcp(reward="gsm8"), f"{MCP}.reward"),
        (with_mcp(reward="search"), f"{MCP}.reward"),
        (with_mcp(reward="pairwise_judge"), f"{MCP}.reward"),
    ],
    "environment_is_known": [({"environment.env_class": "rlm"}, "environment.env_class")],
    "rewards_have_weights": [
        (
            {"environment.env_class": ["a.py:a", "b.py:b"], "environment.reward_weights": [1.0]},
            "environment.reward_weights",
        ),
        ({"environment.env_class": ["gsm8k", "search"]}, "environment.env_class"),
        ({"environment.env_class": ["gsm8k", "pairwise_judge"]}, "environment.env_class"),
    ],
    "reasoning_tasks_are_valid": [
        ({"environment.env_class": "reasoning_gym:chain_sum", "data.train_data": ["a.jsonl"]}, "data.train_data"),
        ({"environment.env_class": "reasoning_gym"}, REASONING),
        (
            {"environment.env_class": "reasoning_gym:chain_sum", REASONING: {"chain_sum": {"weight": 0}}},
            f"{REASONING}.chain_sum.weight",
        ),
        ({"environment.env_class": "reasoning_gym:chain_sum", REASONING: {"chain_sum": 3}}, f"{REASONING}.chain_sum"),
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    "rewards_have_weights": {
        "environment.env_class": ["a.py:a", "b.py:b"],
        "environment.reward_weights": [1.0, 0.5],
    },
    "reasoning_tasks_are_valid": {"environment.env_class": "reasoning_gym:chain_sum"},
    "streaming_has_an_end": {"data.streaming": True, "trainer.max_training_steps": 9},
    "curriculum_can_draw": {f"{CURRICULUM}.sampler": "pools", f"{CURRICULUM}.pools": [{"name": "all"}]},
    "environment_is_known": {"environment.env_class": "mine.py:Mine"},
    "evaluation_has_data": {"data.val_data": [], "trainer.eval_interval": 0, "trainer.eval_before_train": False},
    "recorded_samples_exclude_evaluation": {
        "trainer.rollouts_from": "runs/other",
        "trainer.eval_interval": -1,
        "trainer.eval_before_train": False,
    },
    "data_sources_are_distinct": {"data.train_data": ["a.parquet"], "data.val_data": ["a.parquet"]},
}
