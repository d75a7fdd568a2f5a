"""Episodes that agents of `agents.py` play, over an engine that says what it is told to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from attrs import evolve

from skyrl.config import GeneratorConfig, SamplingParams, SkyRLGymConfig, SkyRLLoraConfig
from skyrl.config.settings.environment import AgentConfig
from skyrl.endpoint.client_access import Address, ClientAccess
from skyrl.endpoint.http.server import serving
from skyrl.endpoint.policy import ServedPolicy
from skyrl.envs import Env, EnvStep
from skyrl.envs.registry import register
from skyrl.rollout.agent_runner import AgentRunner
from skyrl.rollout.generator import SkyRLGymGenerator
from skyrl.trajectory import Prompt, Trajectory
from tests.endpoint.serving import Script

AGENTS = Path(__file__).with_name("agents.py")
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


class Hears(Env):
    """Pays one for an answer of `3`."""

    def step(self, action: str) -> EnvStep:
        return EnvStep(reward=float(action == "3"), done=True, answer=action)


register("tests-hears", Hears)

PROMPT = Prompt(id="0", messages=({"role": "user", "content": "1+2?"},), token_ids=(1,), env_class="tests-hears")


def by(function: str, **changes: Any) -> AgentConfig:
    return AgentConfig(**{"function": f"{AGENTS}:{function}", "reward": "returned", **changes})


@asynccontextmanager
async def playing(
    engine: Any, tokenizer: Any, config: AgentConfig, gym: Mapping[str, Any] | None = None, max_model_len: int = 2000
) -> AsyncIterator[SkyRLGymGenerator]:
    """A generator whose episodes this agent plays."""
    sampling = SamplingParams(max_generate_length=6)
    served = ServedPolicy(names=("tiny",), sampling=sampling, max_model_len=max_model_len, most_samples=8)
    address = Address(access=ClientAccess(open_to_clients=False))
    async with serving(served, tokenizer, engine.generate, address) as endpoint:
        settings = SkyRLGymConfig(**{"max_failed_share": 1.0, "max_attempts": 1, **(gym or {})})
        runner = AgentRunner(config, lambda: endpoint, "tiny", settings.sandbox_tier)
        yield SkyRLGymGenerator(
            "", SkyRLLoraConfig(), GeneratorConfig(), settings, engine, tokenizer, agent=runner, seed=3
        )


async def play(
    generator: SkyRLGymGenerator, samples: int = 1, extras: Mapping[str, Any] | None = None
) -> tuple[Trajectory, ...]:
    sampling = SamplingParams(max_generate_length=6)
    prompts = [evolve(PROMPT, extras=extras or {})]
    (group,) = await generator.generate(prompts, sampling=sampling, samples_per_prompt=samples, weight_version=0)
    return group.trajectories


async def scripted(
    texts: list[str], config: AgentConfig, extras: Mapping[str, Any] | None = None, **more: Any
) -> tuple[Trajectory, Script]:
    script = Script(texts)
    async with playing(script, script.tokenizer, config, **more) as generator:
        (trajectory,) = await play(generator, extras=extras)
    return trajectory, script
