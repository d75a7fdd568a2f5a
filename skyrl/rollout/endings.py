"""The limits at which trajectories ended that did not stop by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from skyrl.config import GeneratorConfig
from skyrl.config.settings.environment import AgentConfig
from skyrl.planning.layout import counted


def endings(reasons: Counter[str], config: GeneratorConfig, agent: AgentConfig) -> str:
    """How many trajectories ended at which limit, from the counts of their stop reasons; empty if at none."""
    return "; ".join(_endings(reasons, config, agent))


def _endings(reasons: Counter[str], config: GeneratorConfig, agent: AgentConfig) -> Iterator[str]:
    sampling = config.sampling_params
    limits = {
        "generator.max_input_length": config.max_input_length,
        "generator.sampling_params.max_tokens": sampling.max_tokens,
        "environment.agent.max_requests": agent.max_requests if agent.command or agent.function else None,
    }
    if answers := reasons["length"]:
        cut = "was" if answers == 1 else "were"
        longest = f"generator.sampling_params.max_generate_length = {sampling.max_generate_length}"
        yield f"{counted(answers, 'answer')} {cut} cut at {longest}"
    if conversations := reasons["context"]:
        known = " or ".join(f"{path} = {limit}" for path, limit in limits.items() if limit is not None)
        yield f"{counted(conversations, 'conversation')} ended at {known or 'the longest sequence of the model'}"
