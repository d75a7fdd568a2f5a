"""Question answering with a search tool and programs, over several turns.

    <tool><search>query</search></tool>     -> the best documents, and another turn
    <tool><python>program</python></tool>   -> what the program printed, and another turn
    <solution>... #### 42</solution>        -> the reward: 1 if the first `#### number` is the ground truth, else 0

Protocol and reward rule of SkyRL-Gym's searchcode, with one difference: the answer is looked for only in the policy's
own text, not in retrieved documents or program output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.envs.builtin.gsm8k import extracted, reference, score
from skyrl.envs.env import Env, EnvStep
from skyrl.envs.rows import first_between, ground_truth, max_turns, tokenizable
from skyrl.envs.search import Retrieve
from skyrl.envs.tool_groups import python_tool
from skyrl.sandbox.sandbox import Sandbox

TOOLS = ("search", "python")
NO_CALL = "Call a tool: <tool><search>query</search></tool> or <tool><python>program</python></tool>."
SHOWN_CHARACTERS = 8000


class SearchCodeEnv(Env):
    """`reward_spec.ground_truth` is the number as text. Each program runs in a new process in a sandbox."""

    def __init__(self, extras: Mapping[str, Any], retrieve: Retrieve, sandbox: Sandbox) -> None:
        super().__init__(extras)
        self._ground_truth: str = reference(ground_truth(extras, "searchcode"))
        self._retrieve = retrieve
        self._python = python_tool(sandbox)
        self._max_turns = max_turns(extras, default=2)
        self._turns = 0
        self._said: list[str] = []
        self._counts = {"searches": 0.0, "programs": 0.0}

    def step(self, action: str) -> EnvStep:
        self._turns += 1
        self._said.append(action)
        if ("<solution>" in action and "</solution>" in action) or self._turns >= self._max_turns:
            conversation = "\n".join(self._said)
            return EnvStep(reward=score(conversation, self._ground_truth), done=True, answer=extracted(conversation))
        output = tokenizable(self._use(action))[:SHOWN_CHARACTERS] or "The program printed nothing."
        return EnvStep(reward=0.0, done=False, observations=({"role": "user", "content": output},))

    def get_metrics(self) -> dict[str, float]:
        return {**self._counts, "turns": float(self._turns)}

    def _use(self, action: str) -> str:
        """Output of the tool that the first call of the turn names."""
        call = first_between(action, "<tool>", "</tool>") or ""
        name = min((item for item in TOOLS if f"<{item}>" in call), key=lambda tool: call.find(f"<{tool}>"), default="")
        argument = first_between(call, f"<{name}>", f"</{name}>")
        if not name or argument is None:
            return NO_CALL
        if name == "python":
            self._counts["programs"] += 1
            return str(self._python.run(argument.strip())).strip()
        self._counts["searches"] += 1
        return self._retrieve(argument.strip()).value
