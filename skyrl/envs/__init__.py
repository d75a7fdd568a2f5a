"""Tasks: the environment protocol (`env.py`), the registry of names (`registry.py`), and the built-in environments."""

from skyrl.envs.env import Env, EnvStep
from skyrl.envs.group_rewards import group_reward
from skyrl.envs.registry import find_env, register, registered_names
from skyrl.errors import SkipSample

__all__ = ["Env", "EnvStep", "SkipSample", "find_env", "group_reward", "register", "registered_names"]
