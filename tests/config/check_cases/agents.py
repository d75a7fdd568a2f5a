"""Cases of the checks in `skyrl.config.checks.agents`."""

from __future__ import annotations

from typing import Any

FUNCTION: dict[str, Any] = {"environment.agent.function": "agent.py:solve"}
COMMAND: dict[str, Any] = {"environment.agent.command": ["./agent"]}

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "agent_is_command_or_function": [
        ({**FUNCTION, **COMMAND}, "environment.agent.function"),
        ({**FUNCTION, "environment.agent.reward": "exit_code"}, "environment.agent.reward"),
    ],
    "isolation_needs_command_and_namespace": [
        ({**FUNCTION, "environment.agent.isolate": True}, "environment.agent.isolate"),
        (
            {**COMMAND, "environment.agent.isolate": True, "environment.skyrl_gym.sandbox_tier": "process"},
            "environment.skyrl_gym.sandbox_tier",
        ),
    ],
    "agents_exclude_batched_sampling": [({**FUNCTION, "generator.batched": True}, "generator.batched")],
    "agent_rows_share_one_advantage": [
        ({**COMMAND, "trainer.algorithm.advantage_estimator": "reinforce++"}, "trainer.algorithm.advantage_estimator"),
        ({**COMMAND, "trainer.algorithm.loss_reduction": "token_mean_legacy"}, "trainer.algorithm.loss_reduction"),
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    "agent_is_command_or_function": {**COMMAND, "environment.agent.reward": "exit_code"},
    "isolation_needs_command_and_namespace": {
        **COMMAND,
        "environment.agent.isolate": True,
        "environment.skyrl_gym.sandbox_tier": "namespace",
    },
    "agents_exclude_batched_sampling": {"generator.batched": True},
    "agent_rows_share_one_advantage": FUNCTION,
}
