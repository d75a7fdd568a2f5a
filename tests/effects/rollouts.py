"""Probes of `generator` and of what happens to samples whose environment fails: what a batch of samples becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.effects.probe import Probe, Scene, observable
from tests.effects.stage import SimulatedRun, staged

G = "generator."
GYM = "environment.skyrl_gym."
SAMPLING = f"{G}sampling_params."
TURNS: Mapping[str, Any] = {"environment.env_class": "multiply", f"{G}max_turns": 2, f"{G}max_input_length": 60}
STOPPED = {**TURNS, f"{SAMPLING}stop": ["</s>"]}


async def _samples(stage: SimulatedRun) -> object:
    return [group.trajectories for group in await stage.rollouts.next_batch(0)]


@observable("the samples of a batch, and the order in which they are asked for and judged")
def batch(scene: Scene) -> object:
    return staged(SimulatedRun(scene), _samples)


@observable("what becomes of samples whose environment fails")
def failures(scene: Scene) -> object:
    return staged(SimulatedRun(scene, failing=True), _samples)


@observable("what an evaluation asks the engine for, and its scores")
def evaluation(scene: Scene) -> object:
    async def evaluated(stage: SimulatedRun) -> object:
        evaluation = stage.get_evaluation()
        return evaluation and await evaluation.run(0)

    return staged(SimulatedRun(scene), evaluated)


PROBES: tuple[Probe, ...] = (
    Probe(f"{G}n_samples_per_prompt", 2, batch),
    Probe(f"{G}eval_n_samples_per_prompt", 3, evaluation),
    Probe(f"{G}max_turns", 3, batch, TURNS),
    Probe(f"{G}max_input_length", 17, batch, TURNS),
    Probe(f"{G}max_trajectories_in_flight", 3, batch),
    Probe(f"{G}batched", True, batch),
    Probe(f"{G}use_conversation_multi_turn", False, batch, TURNS),
    Probe(f"{G}append_eos_token_after_stop_str_in_multi_turn", False, batch, STOPPED),
    Probe(f"{G}step_wise_trajectories", True, batch, TURNS),
    Probe(f"{G}merge_stepwise_output", True, batch, {**TURNS, f"{G}step_wise_trajectories": True}),
    Probe(f"{G}zero_reward_on_non_stop", True, batch),
    Probe(f"{G}apply_overlong_filtering", True, batch),
    Probe(f"{G}inference_engine.deterministic", False, batch),
    Probe(f"{G}inference_engine.max_num_seqs", 3, batch),
    Probe("environment.env_class", "gsm8k", batch),
    Probe(f"{GYM}max_env_workers", 2, batch),
    Probe(f"{GYM}step_timeout_seconds", 0.25, batch),
    Probe(f"{GYM}trajectory_timeout_seconds", 2.0, batch),
    Probe(f"{GYM}max_attempts", 1, failures),
    Probe(f"{GYM}retried_failures", ["timeout"], failures),
    Probe(f"{GYM}failed_samples", "fill", failures),
    Probe(f"{GYM}max_failed_share", 0.0, failures),
)
