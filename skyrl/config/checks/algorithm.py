"""Checks of the algorithm: its parts exist, belong together, and have what they need."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.checks import warning
from skyrl.config.derive.algorithm_facts import estimator_facts, is_peer_loss, loss_facts
from skyrl.config.derive.rl_models import distills, gives_whole_distributions, has_critic, has_teacher
from skyrl.config.foundation.foreign_names import value_elsewhere
from skyrl.config.foundation.import_paths import is_import_path
from skyrl.config.settings.losses import asks_for_correction
from skyrl.config.settings.registry import AdvantageEstimatorRegistry, PolicyLossRegistry, Registry
from skyrl.config.settings.rewards import RewardShapingConfig
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.errors import ConfigError, Problem
from skyrl.tree.imports import follows
from skyrl.tree.names import nearest

_ALGORITHM = "trainer.algorithm."
_CORRECTION = _ALGORITHM + "off_policy_correction."


def advantage_estimator_exists(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The estimator is a known name, or an import path with the settings that its class has."""
    algorithm = run.trainer.algorithm
    yield from _exists(algorithm.advantage_estimator, AdvantageEstimatorRegistry, algorithm.advantage)


def policy_loss_exists(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The loss is a known name, or an import path with the settings that its class has."""
    algorithm = run.trainer.algorithm
    yield from _exists(algorithm.policy_loss_type, PolicyLossRegistry, algorithm.policy_loss)


def gae_needs_critic(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """An estimator that reads values, such as gae, needs a critic."""
    algorithm = run.trainer.algorithm
    if estimator_facts(algorithm).reads_values and not run.trainer.critic.model.path:
        message = f"{algorithm.advantage_estimator} needs a critic"
        yield Problem(path="trainer.critic.model.path", message=message, hint="give the critic a model")


def critic_values_are_read(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A critic is only useful with an estimator that reads its values, such as gae."""
    name = run.trainer.algorithm.advantage_estimator
    if run.trainer.critic.model.path and estimator_facts(run.trainer.algorithm).reads_values is False:
        yield warning(
            path="trainer.critic.model.path",
            message=f"{name} does not use a critic's values, so training the critic would be wasted",
            hint="use advantage_estimator = gae, or leave the critic out",
        )


def kl_is_counted_once(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A KL penalty goes into the reward or into the loss, not into both."""
    yield from run.trainer.algorithm.problems_at("trainer.algorithm")


def pairs_replace_advantages(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Pairs need several answers to a prompt, and take the place of advantages and of what changes them."""
    algorithm = run.trainer.algorithm
    if not loss_facts(algorithm).learns_from_pairs:
        return
    estimator, name = estimator_facts(algorithm), algorithm.policy_loss_type
    needless = {
        "advantage_estimator": estimator.compares_with_greedy or estimator.reads_values,
        "use_kl_in_reward": algorithm.use_kl_in_reward,
        "off_policy_correction": asks_for_correction(algorithm.off_policy_correction),
    }
    for field in (field for field, is_set in needless.items() if is_set):
        yield Problem(
            path=_ALGORITHM + field,
            message=f"is set, and {name} compares answers by their probabilities under policy and reference alone",
            hint="leave it out: online_dpo.beta says how closely the policy stays to the reference",
        )
    itself = distills(run) and not has_teacher(run)
    for path, role, exists in (
        ("trainer.critic.model.path", "critic", has_critic(run)),
        ("trainer.teacher.model.path", "teacher", has_teacher(run)),
        (_ALGORITHM + "distillation.self_teacher", "teacher", itself),
    ):
        if exists:
            message = f"{name} does not use a {role}"
            yield Problem(path=path, message=message, hint="leave it out, or use another loss")
    if run.generator.n_samples_per_prompt == 1:
        yield Problem(
            path="generator.n_samples_per_prompt",
            message=f"{name} compares the answers to a prompt, and there is only one",
            hint="use 2 or more",
        )


def group_advantages_need_several_samples(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Group-relative advantages of a single sample are its bare reward, or nothing."""
    name = run.trainer.algorithm.advantage_estimator
    if distills(run) and run.trainer.algorithm.distillation.task_coef == 0:
        return
    if loss_facts(run.trainer.algorithm).learns_from_pairs:
        return
    if estimator_facts(run.trainer.algorithm).is_group_relative and run.generator.n_samples_per_prompt == 1:
        yield warning(
            path="generator.n_samples_per_prompt",
            message=f"{name} compares the samples of a prompt, and there is only one",
            hint="use 4 or more",
        )


def policy_teaches_with_hint(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A policy that is its own teacher knows nothing more without a hint, and is the only teacher."""
    settings, path = run.trainer.algorithm.distillation, _ALGORITHM + "distillation.self_teacher"
    if not settings.self_teacher:
        return
    if has_teacher(run):
        message = "the policy teaches itself, but trainer.teacher names a teacher as well"
        yield Problem(path=path, message=message, hint="leave one of them out")
    if settings.hint.source == "none":
        message = "the policy would learn what it already does: its teacher reads nothing more than it does"
        yield Problem(path=path, message=message, hint="set trainer.algorithm.distillation.hint.source")


def moving_teacher_is_the_policy(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Only weights of one model can be mixed, and the policy's ranks hold the output matrix that a teacher begins
    with.
    """
    teacher, policy = run.trainer.teacher.model.path, run.trainer.policy.model.path
    if run.trainer.algorithm.distillation.teacher_update_rate is None:
        return
    path = _ALGORITHM + "distillation.teacher_update_rate"
    if teacher != policy:
        message = f"the policy is mixed only into its own model, and the teacher is {teacher or 'not a local one'}"
        yield Problem(path=path, message=message, hint=f"set trainer.teacher.model.path = {policy}, or leave it out")
    if gives_whole_distributions(run):
        message = "the output matrix of a moving teacher is not sent to the policy's ranks"
        yield Problem(
            path=path, message=message, hint="set trainer.algorithm.distillation.top_k = 128, or type = advantage"
        )


def hints_find_prompts(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A hint is put into the prompt of a row, which the policy must have read as it stands there."""
    settings = run.trainer.algorithm.distillation.hint
    if not distills(run) or settings.source == "none":
        return
    path = _ALGORITHM + "distillation.hint.source"
    if run.environment.agent.plays:
        message = "the agent writes its own prompts, which leaves no place for a hint"
        yield Problem(path=path, message=message, hint="set it to none, or leave environment.agent out")
    if settings.source == "success" and run.generator.n_samples_per_prompt == 1:
        message = "success is another answer to the prompt, and generator.n_samples_per_prompt is 1"
        yield Problem(path=path, message=message, hint="sample 4 or more")


def hints_go_with_teachers_tokens(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The policy's likeliest tokens are those behind its own prompt, which a teacher with a hint does not read."""
    settings = run.trainer.algorithm.distillation
    of_both = settings.type == "loss" and settings.top_k is not None and settings.top_k_of != "teacher"
    if distills(run) and settings.hint.source != "none" and of_both:
        message = f"{settings.top_k_of} also looks at the policy's likeliest tokens, which hints do not support yet"
        yield Problem(path=_ALGORITHM + "distillation.top_k_of", message=message, hint="set it to teacher")


def advantages_are_normalized_once(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """`advantage_batch_normalize` is a special case of `advantage_norm`, so only one of them may be set."""
    algorithm = run.trainer.algorithm
    norm = algorithm.advantage_norm
    if algorithm.advantage_batch_normalize and (norm.mean_level or norm.std_level):
        yield Problem(
            path=_ALGORITHM + "advantage_batch_normalize",
            message="is on together with trainer.algorithm.advantage_norm, and both normalize advantages",
            hint="leave one of them out",
        )


def corrections_suit_loss(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Losses that choose tokens by covariance take no correction, and losses weighted against the engine need none."""
    algorithm = run.trainer.algorithm
    loss, correction = algorithm.policy_loss_type, algorithm.off_policy_correction
    facts = loss_facts(algorithm)
    if not facts.takes_corrections and (correction.tis_ratio_type or correction.sequence_mask_metric):
        field = "tis_ratio_type" if correction.tis_ratio_type else "sequence_mask_metric"
        message = f"{loss} selects tokens across all sequences, which corrections of single sequences distort"
        yield Problem(path=_CORRECTION + field, message=message, hint="leave the correction out, or use another loss")
    if facts.reads_rollout_logprobs and correction.tis_ratio_type:
        yield Problem(
            path=_CORRECTION + "tis_ratio_type",
            message=f"{loss} already corrects for the engine's probabilities, which would then count twice",
            hint="leave tis_ratio_type out",
        )


def reducing_losses_exclude_corrections(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A loss in SkyRL's or verl's signature gives one number, of which no token can be corrected."""
    algorithm = run.trainer.algorithm
    if asks_for_correction(algorithm.off_policy_correction) and is_peer_loss(algorithm):
        yield Problem(
            path=_ALGORITHM + "off_policy_correction",
            message=f"{algorithm.policy_loss_type} reduces its tokens to one number, which cannot be corrected",
            hint="correct in the loss, by rollout_logprobs (SkyRL's form) or rollout_log_probs (verl's)",
        )


def correction_needs_both_logprobs(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A correction for the gap between engine and learner needs log-probabilities of both."""
    algorithm = run.trainer.algorithm
    if algorithm.old_logprobs != "engine":
        return
    facts, compares = loss_facts(algorithm), asks_for_correction(algorithm.off_policy_correction)
    if compares or (facts.reads_old_logprobs and facts.reads_rollout_logprobs):
        subject = "off_policy_correction" if compares else f"the loss {algorithm.policy_loss_type}"
        yield Problem(
            path=_ALGORITHM + "old_logprobs",
            message=f"{subject} compares pi_old with the engine's probabilities, but here both are the same",
            hint="set it to learner, or leave the correction out",
        )


def loss_needs_engine_logprobs(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Losses that compare with the engine need its log-probabilities; for corrections a rule turns them on."""
    algorithm = run.trainer.algorithm
    by_engine = algorithm.old_logprobs != "learner"
    reads = by_engine or loss_facts(algorithm).reads_rollout_logprobs is not False
    if reads and run.generator.sampling_params.logprobs is None:
        reader = "old_logprobs" if by_engine else "policy_loss_type"
        yield Problem(
            path="generator.sampling_params.logprobs",
            message=f"is none, and trainer.algorithm.{reader} = {getattr(algorithm, reader)} may read the engine's "
            "log-probabilities",
            hint="leave it out, or set it to 1",
        )


def correction_bounds_are_ordered(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Each lower bound of the corrections lies below its upper bound."""
    yield from run.trainer.algorithm.off_policy_correction.problems_at("trainer.algorithm.off_policy_correction")


def sequence_loss_weighs_answers_equally(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A loss with one ratio for a whole answer should not count long answers more."""
    algorithm = run.trainer.algorithm
    if loss_facts(algorithm).expects_sequence_mean and algorithm.loss_reduction != "sequence_mean":
        yield warning(
            path=_ALGORITHM + "loss_reduction",
            message=f"{algorithm.policy_loss_type} is meant for sequence_mean, not for {algorithm.loss_reduction}",
        )


def remax_compares_raw_rewards(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """With remax, rewards are not shaped, because the greedy answer's reward is not."""
    algorithm = run.trainer.algorithm
    shaping, plain = algorithm.reward_shaping, RewardShapingConfig()
    if not estimator_facts(algorithm).compares_with_greedy:
        return
    changed = [name for name in ("bias", "scale", "clip", "norm") if getattr(shaping, name) != getattr(plain, name)]
    changed += ["overlong.buffer_len"] * (shaping.overlong.buffer_len is not None)
    for name in changed[:1]:
        estimator = algorithm.advantage_estimator
        message = f"{estimator} compares with the greedy answer's unmodified reward, so the others cannot be reshaped"
        hint = "leave it out, or use another estimator"
        yield Problem(path=f"{_ALGORITHM}reward_shaping.{name}", message=message, hint=hint)


def overlong_buffer_fits(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The overlong penalty begins after the first token."""
    overlong = run.trainer.algorithm.reward_shaping.overlong
    if overlong.buffer_len is not None and overlong.max_len is not None and overlong.buffer_len >= overlong.max_len:
        yield Problem(
            path=_ALGORITHM + "reward_shaping.overlong.buffer_len",
            message=f"{overlong.buffer_len} tokens must be fewer than the limit of {overlong.max_len}",
            hint="DAPO has a buffer of a fifth of the limit",
        )


def _exists(name: str, registry: Registry, settings: object) -> Iterator[Problem]:
    if name in registry.built_in:
        return
    known = registry.names()
    if name in known or is_import_path(name):
        if name not in known and not follows("all"):
            return  # it is listed as not checked
        try:
            registry.object(name, settings)
        except ConfigError as error:
            yield from error.problems
        return
    meant = nearest(name, known)
    hint = value_elsewhere(registry.field, name) or (
        f"did you mean {meant}?" if meant else f"available: {', '.join(known)}, or module:name, file.py:name"
    )
    yield Problem(path=registry.field, message=f"{name!r} is unknown", hint=hint)
