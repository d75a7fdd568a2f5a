"""An environment with two tools: what does the order cost, in all?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.envs import EnvStep
from skyrl.envs.tool_groups import python_tool
from skyrl.envs.tools import ToolEnv
from skyrl.sandbox.sandbox import Sandbox

SANDBOX = Sandbox()


class ShopEnv(ToolEnv):
    """1 for the right sum, else 0. The row's `prices` are what `price` looks up; `python` may add them."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        super().__init__(extras)
        self.tools = (self.price, python_tool(SANDBOX))

    def price(self, item: str) -> int:
        """The price of one piece.

        Args:
            item: what is sold, such as "apple"
        """
        return int(self.extras["prices"][item])

    def judge(self, answer: str) -> EnvStep:
        return EnvStep(reward=float(answer.strip() == self.extras["reward_spec"]["ground_truth"]), done=True)
