"""Checks of learners: adapters, traces, schedules, references and dropout."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.checks import warning
from skyrl.config.derive.algorithm_facts import loss_facts
from skyrl.config.derive.rl_models import (
    POLICY,
    gives_distributions,
    has_critic,
    has_reference,
    has_served_teacher,
)
from skyrl.config.derive.sizes import scores_old_logprobs, trained_models
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.config.settings.strategies import reads
from skyrl.errors import Problem
from skyrl.tree import get_at


def adapters_exclude_delta_transport(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """An adapter is sent whole, so it cannot travel by delta, which compares whole weights."""
    if run.trainer.policy.model.lora.rank and run.generator.inference_engine.weight_sync_backend == "delta":
        message = "delta sends changes of full weights, but this run trains an adapter"
        yield Problem(
            path="generator.inference_engine.weight_sync_backend", message=message, hint="set it to nccl or gloo"
        )


def adapters_receive_gradients(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Reentrant checkpointing drops gradients where the input of a layer has none, as with frozen embeddings."""
    adapted = any(getattr(run.trainer, model).model.lora.rank for model in trained_models(run))
    if adapted and run.trainer.recompute_activations and run.trainer.gradient_checkpointing_use_reentrant:
        yield Problem(
            path="trainer.gradient_checkpointing_use_reentrant",
            message="the reentrant form of gradient checkpointing gives adapters no gradient",
            hint="set it to false",
        )


def reference_matches_policy_model(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A reference loaded from the policy's path has the same configuration and initialization as the policy."""
    policy, ref = run.trainer.policy, run.trainer.ref
    if not has_reference(run) or ref.model.path not in (None, policy.model.path):
        return
    for name in ("model_config_kwargs", "model.init_from_scratch"):
        if get_at(ref, name) != get_at(policy, name):
            yield Problem(
                path=f"trainer.ref.{name}",
                message=f"differs from trainer.policy.{name}, but both models are loaded from the same path",
                hint="set it to the same value, or set trainer.ref.model.path to another model",
            )


def reference_has_policys_initial_adapter(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """If the policy starts from a stored adapter, the reference needs the same adapter for the KL to start at 0."""
    policy, ref = run.trainer.policy.model, run.trainer.ref.model
    if not has_reference(run) or not policy.lora.rank or ref.path not in (None, policy.path):
        return
    if policy.lora.path not in (None, ref.lora.path):
        yield warning(
            path="trainer.ref.model.lora.path",
            message="the policy starts from an adapter that the reference does not have: the KL begins above 0",
            hint="set trainer.ref.model.lora to the values of trainer.policy.model.lora",
        )


def distributions_exclude_megatron(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The divergence from a teacher's distributions is not computed by Megatron's pipelines yet."""
    if gives_distributions(run) and reads(run.trainer, "megatron_config"):
        yield Problem(
            path="trainer.algorithm.distillation.type",
            message="loss is not implemented under Megatron yet",
            hint="set it to advantage, or trainer.strategy = fsdp2",
        )


def sources_have_one_teacher(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A row is taught by one teacher. Megatron's groups of ranks are those of one model."""
    teacher = run.trainer.teacher
    both = sorted(teacher.sources.keys() & teacher.endpoint.sources.keys())
    if both:
        message = f"{', '.join(both)}: there is also a served teacher for the same source (trainer.teacher.endpoint)"
        yield Problem(path="trainer.teacher.sources", message=message, hint="leave one of them out")
    if len(teacher.local_paths) > 1 and reads(run.trainer, "megatron_config"):
        yield Problem(
            path="trainer.teacher.sources",
            message="megatron holds one teacher",
            hint="serve the others (trainer.teacher.endpoint.sources), or set trainer.strategy = fsdp2",
        )


def served_teachers_give_few_numbers(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A server scores the given tokens and reports the likeliest ones, at temperature 1."""
    if not has_served_teacher(run):
        return
    distillation, teacher = run.trainer.algorithm.distillation, run.trainer.teacher
    if teacher.model.path and teacher.endpoint.url:
        yield Problem(
            path="trainer.teacher.endpoint.url",
            message="there is also a local teacher (trainer.teacher.model.path)",
            hint="leave one out, or give sources of data their own teachers in trainer.teacher.endpoint.sources",
        )
    if distillation.type == "advantage" and run.generator.sampling_params.temperature != 1:
        yield Problem(
            path="generator.sampling_params.temperature",
            message="a served teacher scores tokens at temperature 1, with which the policy's are compared",
            hint="set it to 1",
        )
    if distillation.type == "loss" and distillation.top_k is None:
        yield Problem(
            path="trainer.algorithm.distillation.top_k",
            message="a served teacher reports log-probabilities of its likeliest tokens, not of all",
            hint="set it to 20, or as many as the server's --max-logprobs allows",
        )
    if distillation.type == "loss" and distillation.top_k_of in ("student", "union"):
        yield Problem(
            path="trainer.algorithm.distillation.top_k_of",
            message="a served teacher does not report log-probabilities of the policy's likeliest tokens",
            hint="set it to teacher or intersection",
        )
    if distillation.type == "loss" and distillation.temperature != 1:
        yield Problem(
            path="trainer.algorithm.distillation.temperature",
            message="a served teacher reports log-probabilities at temperature 1",
            hint="set it to 1",
        )


def missing_tail_needs_forward_divergence(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Other divergences over the chosen tokens alone are lowest where the policy leaves those tokens."""
    distillation = run.trainer.algorithm.distillation
    if gives_distributions(run) and distillation.top_k is not None and not distillation.tail and distillation.beta:
        yield Problem(
            path="trainer.algorithm.distillation.tail",
            message=f"beta = {distillation.beta:g} over the chosen tokens alone would move probability away from them",
            hint="set it to true, or trainer.algorithm.distillation.beta = 0",
        )


def dropout_makes_ratios_noisy(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Old log-probabilities and values are computed without dropout: a ratio to them would be noise."""
    algorithm, trainer = run.trainer.algorithm, run.trainer
    if trainer.policy.use_dropout and _compares_logprobs(run):
        yield Problem(
            path="trainer.policy.use_dropout",
            message="the loss compares with log-probabilities that are computed without dropout: ratios would be noisy",
            hint="set it to false, or make one update per batch (policy_mini_batch_size = train_batch_size, "
            "update_epochs_per_batch = 1) without corrections and without a KL term in the reward",
        )
    if has_critic(run) and trainer.critic.use_dropout and algorithm.value_clip is not None:
        yield Problem(
            path="trainer.critic.use_dropout",
            message="value_clip compares with values that were computed without dropout",
            hint="set it to false, or trainer.algorithm.value_clip = none",
        )


def lora_dropout_makes_ratios_noisy(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Adapter dropout acts in updates only, like the model's; it is smaller, so it is only a warning."""
    algorithm, trainer = run.trainer.algorithm, run.trainer
    compared = {
        "policy": ("log-probabilities", _compares_logprobs(run)),
        "critic": ("values", has_critic(run) and algorithm.value_clip is not None),
    }
    for model, (numbers, compares) in compared.items():
        lora = getattr(trainer, model).model.lora
        if lora.rank and lora.dropout and compares:
            yield warning(
                path=f"trainer.{model}.model.lora.dropout",
                message=f"{lora.dropout} adds noise: the loss compares with {numbers} computed without dropout",
                hint="set it to 0",
            )


def _compares_logprobs(run: SkyRLTrainConfig) -> bool:
    """Whether the policy's loss compares with log-probabilities of an earlier pass; True if unknown."""
    algorithm = run.trainer.algorithm
    scores = scores_old_logprobs(algorithm, POLICY.optimizer_steps(run))
    return scores or loss_facts(algorithm).reads_rollout_logprobs is not False


def determinism_is_tested_on_cpu(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Bit-for-bit repeatable kernels are tested on CPUs only; on CUDA they are not guaranteed yet."""
    if run.trainer.deterministic and run.trainer.device == "cuda":
        yield warning(
            path="trainer.deterministic",
            message="bit-for-bit reproducible runs are guaranteed on a CPU only",
        )
