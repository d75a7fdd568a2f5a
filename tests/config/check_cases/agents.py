"""Cases of the checks in `skyrl.config.checks.agents`."""

from __future__ import annotations

from typing import Any

FUNCTION: dict[str, Any] = {"environment.agent.function": "agent.py:solve"}
COMMAND: dict[str, Any] = {"environment.agent.command": ["./agent"]}

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "the_agent_is_one_program": [
        ({**FUNCTION, **COMMAND}, "environment.agent.function"),
        ({**FUNCTION, "environment.agent.reward": "exit_code"}, "environment.agent.reward"),
    ],
    "isolation_needs_a_command_and_a_network_namespace": [
        ({**FUNCTION, "environment.agent.isolate": True}, "environment.agent.isolate"),
        (
            {**COMMAND, "environment.agent.isolate": True, "environment.skyrl_gym.sandbox_tier": "process"},
            "environment.skyrl_gym.sandbox_tier",
        ),
    ],
    "an_agent_asks_when_it_wants": [({**FUNCTION, "generator.batched": True}, "generator.batched")],
    "rows_of_agents_can_be_compared": [
        ({**COMMAND, "trainer.algorithm.advantage_estimator": "reinforce++"}, "trainer.algorithm.advantage_estimator"),
        ({**COMMAND, "trainer.algorithm.loss_reduction": "token_mean_legacy"}, "trainer.algorithm.loss_reduction"),
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    "the_agent_is_one_program": {**COMMAND, "environment.agent.reward": "exit_code"},
    "isolation_needs_a_command_and_a_network_namespace": {
        **COMMAND,
        "environment.agent.isolate": True,
        "environment.skyrl_gym.sandbox_tier": "namespace",
    },
    "an_agent_asks_when_it_wants": {"generator.batched": True},
    "rows_of_agents_can_be_compared": FUNCTION,
}
