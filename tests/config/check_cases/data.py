"""Cases of the checks in `skyrl.config.checks.data`."""

from __future__ import annotations

from typing import Any

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "the_policy_has_a_model": [
        ({"trainer.policy.model.path": None}, "trainer.policy.model.path"),
        ({"trainer.policy.model.path": ""}, "trainer.policy.model.path"),
    ],
    "there_is_data_to_train_on": [({"data.train_data": []}, "data.train_data")],
    "evaluation_has_data": [
        ({"data.val_data": [], "trainer.eval_interval": -1}, "data.val_data"),
        ({"data.val_data": [], "trainer.eval_before_train": False}, "data.val_data"),
    ],
    "recorded_samples_evaluate_nothing": [({"trainer.rollouts_from": "runs/other"}, "trainer.rollouts_from")],
    "every_training_source_has_a_weight": [({"data.train_weights": [1.0, 2.0]}, "data.train_weights")],
    "no_source_is_named_twice": [
        ({"data.train_data": ["a.parquet", "b.parquet", "a.parquet"]}, "data.train_data"),
        ({"data.val_data": ["a.parquet", "a.parquet"]}, "data.val_data"),
    ],
    "a_reward_model_is_somewhere": [
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
    "the_environment_is_known": [({"environment.env_class": "rlm"}, "environment.env_class")],
}

SILENT: dict[str, dict[str, Any]] = {
    "the_environment_is_known": {"environment.env_class": "mine.py:Mine"},
    "evaluation_has_data": {"data.val_data": [], "trainer.eval_interval": 0, "trainer.eval_before_train": False},
    "recorded_samples_evaluate_nothing": {
        "trainer.rollouts_from": "runs/other",
        "trainer.eval_interval": -1,
        "trainer.eval_before_train": False,
    },
    "no_source_is_named_twice": {"data.train_data": ["a.parquet"], "data.val_data": ["a.parquet"]},
}
