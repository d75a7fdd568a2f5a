"""The environment and its tools: the policy may look at a shelf before it answers. Replace both by your own."""

from collections.abc import Mapping
from typing import Any

from skyrl.envs import EnvStep
from skyrl.envs.tools import ToolEnv

SHELVES = "abcdefgh"


class Shelves(ToolEnv):
    """What lies on the shelf that the question names? 1 for the right answer, 0 otherwise."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        super().__init__(extras)
        self.tools = (self.look,)

    def look(self, shelf: str) -> str:
        """Look at a shelf.

        Args:
            shelf: the letter of the shelf, such as "a"
        """
        return str(self.extras["shelves"].get(shelf, "nothing"))

    def judge(self, answer: str) -> EnvStep:
        """A turn without a call is the answer."""
        return EnvStep(reward=float(answer.strip() == self.extras["reward_spec"]["ground_truth"]), done=True)
