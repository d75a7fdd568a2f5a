"""Settings that shrink a run of many GPUs to one process on a CPU without changing what it does."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from skyrl.config.derive.rl_models import has_critic
from skyrl.config.derive.sizes import draws_rollouts, models_of, on_ray, sizes_of
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.planning.layout import layout

PROMPTS, SAMPLES, ANSWER, TURNS = 4, 4, 32, 3
"""Maximum number of prompts of a batch, answers to each, tokens of an answer, and turns of an episode."""

_ENGINE = "generator.inference_engine."
_PLACEMENT = "trainer.placement."


def folded(run: SkyRLTrainConfig) -> Mapping[str, Any]:
    """Paths -> values that override a resolved run: one process, small batches, short answers.

    Algorithm, environments, data, templates and schedule stay. A batch keeps the number of its mini-batches, up to
    four of one prompt each.
    """
    trainer, generator = run.trainer, run.generator
    prompts = min(PROMPTS, trainer.train_batch_size)
    answers = min(SAMPLES, generator.n_samples_per_prompt)
    longest = min(ANSWER, generator.sampling_params.max_generate_length)
    changes: dict[str, Any] = {
        "trainer.device": "cpu",
        "trainer.compute_dtype": "float32",
        "trainer.strategy": "fsdp2",
        "trainer.train_batch_size": prompts,
        "trainer.policy_mini_batch_size": _mini(trainer.train_batch_size, trainer.policy_mini_batch_size, prompts),
        "trainer.micro_train_batch_size_per_gpu": 1,
        "trainer.micro_forward_batch_size_per_gpu": 1,
        "trainer.eval_batch_size": prompts,
        "trainer.logger": "console",
        "trainer.attention": "sdpa",
        "generator.n_samples_per_prompt": answers,
        "generator.eval_n_samples_per_prompt": 1,
        "generator.max_turns": min(TURNS, generator.max_turns),
        "generator.sampling_params.max_generate_length": longest,
        "generator.eval_sampling_params.max_generate_length": longest,
        f"{_PLACEMENT}executor": "in_process",
        f"{_PLACEMENT}allocation": None,
        f"{_PLACEMENT}gpu_kind": None,
        f"{_PLACEMENT}colocate_policy_ref": True,
        f"{_ENGINE}backend": "torch",
        f"{_ENGINE}model_dtype": "float32",
        f"{_ENGINE}run_engines_locally": True,
        f"{_ENGINE}num_engines": 1,
        f"{_ENGINE}max_num_seqs": PROMPTS * SAMPLES,
        f"{_ENGINE}enable_http_endpoint": False,
        f"{_ENGINE}remote_urls": (),
        f"{_ENGINE}external_proxy_url": None,
        f"{_ENGINE}external_server_urls": None,
        f"{_ENGINE}engine_init_kwargs": {},
    }
    if has_critic(run):
        mini = _mini(trainer.train_batch_size, trainer.critic_mini_batch_size, prompts)
        changes["trainer.critic_mini_batch_size"] = mini
    for name in ("tensor", "pipeline", "data", "expert"):
        changes[f"{_ENGINE}{name}_parallel_size"] = 1
    for model in models_of(run):
        changes |= {f"{_PLACEMENT}{model}_num_nodes": 1, f"{_PLACEMENT}{model}_num_gpus_per_node": 1}
        for name in ("tensor", "sequence", "context"):
            changes[f"trainer.{model}.{name}_parallel_size"] = 1
    return changes


def folded_lines(run: SkyRLTrainConfig, changes: Mapping[str, Any]) -> list[str]:
    """Lines that tell people what is smaller than in the run."""
    trainer, generator = run.trainer, run.generator
    lines = []
    if on_ray(run):
        gpus, engine = layout(sizes_of(run)).gpus, generator.inference_engine.backend
        lines.append(
            f"{gpus:,} GPUs, {trainer.strategy} and {engine}: one process, FSDP2 and the torch engine in float32"
        )
    lines.append(
        f"batches of {trainer.train_batch_size:,} prompts with {generator.n_samples_per_prompt} answers: "
        f"{changes['trainer.train_batch_size']} with {changes['generator.n_samples_per_prompt']}"
    )
    if draws_rollouts(run):
        longest = generator.sampling_params.max_generate_length
        short = changes["generator.sampling_params.max_generate_length"]
        lines.append(f"answers of up to {longest:,} tokens: up to {short}")
    if generator.max_turns > TURNS:
        lines.append(f"episodes of up to {generator.max_turns} turns: up to {TURNS}")
    return lines


def _mini(batch: int, mini: int, prompts: int) -> int:
    """Prompts of a mini-batch, so that the small batch has the same number of mini-batches as the large one, or nearly
    so.
    """
    return prompts // gcd(prompts, max(1, batch // mini)) if batch // mini < prompts else 1
