"""Every metric that a run logs: its name, unit and meaning. `docs/metrics.md` is made from this table (`make pages`).

A name in angle brackets is a placeholder that the run fills: `<n>` for a number, any other for a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import starmap

from attrs import frozen


@frozen(slots=False)
class MetricSpec:
    """One metric, or a family of metrics whose names share a pattern."""

    name: str
    """Key in `metrics.jsonl`, with placeholders."""

    unit: str
    meaning: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the names of this metric."""
        parts = re.split(r"(<\w+>)", self.name)
        fills = {"<n>": r"\d+"}
        return re.compile("".join(fills.get(part, ".+") if part[:1] == "<" else re.escape(part) for part in parts))


Row = tuple[str, str, str]
"""Name, unit and meaning of a metric, in the order of `MetricSpec`."""


def _spread(name: str, unit: str, meaning: str, mean: str = "mean") -> Iterator[Row]:
    """Mean, extremes and standard deviation of one quantity, in place of `{}` in its name."""
    for kind, words in ((mean, "mean"), ("max", "largest"), ("min", "smallest"), ("std", "standard deviation")):
        yield (name.format(kind), unit, f"{meaning}: {words}.")


def _seconds(name: str, meaning: str) -> Iterator[Row]:
    for kind, words in (("mean", "mean"), ("p90", "90th percentile"), ("max", "largest")):
        yield (f"generate/trajectory_time_{name}_{kind}", "s", f"{meaning}: {words} over trajectories.")


def _bounds(name: str, meaning: str) -> Iterator[Row]:
    """Fractions clipped by a bound on ratios: on both sides together, and on each side."""
    for kind, words in (("masked", ""), ("over_high", ", above the upper bound"), ("under_low", ", below the lower")):
        yield (f"policy/{name}_{kind}_ratio", "share", f"{meaning}{words}.")


def _routers(prefix: str) -> Iterator[Row]:
    """Metrics of the routers of a mixture-of-experts model."""
    yield (
        f"{prefix}/router_max_violation",
        "1",
        "Tokens that choose the busiest expert of a layer over their mean, less 1: of the least even layer.",
    )
    yield (f"{prefix}/router_mean_violation", "1", "The same, mean over layers; 0 where loads are even.")
    yield (f"{prefix}/router_unused_experts", "share", "Experts that no token of a mini-batch chooses.")
    yield (f"{prefix}/router_entropy", "nats", "Entropy of the distribution over experts, mean of rows.")


def _updates(prefix: str, rate: str, loss: Iterable[Row]) -> Iterator[Row]:
    """Metrics that every learner reports of its optimizer steps."""
    yield from loss
    yield (f"{prefix}/grad_norm", "1", "Norm of the gradient before clipping, mean over optimizer steps.")
    yield (f"{prefix}/{rate}", "1", "Learning rate, mean over optimizer steps.")
    yield (f"{prefix}/skipped_updates", "optimizer steps", "Steps left out because loss or gradient was not finite.")
    yield (f"{prefix}/loss_scale", "1", "Factor of the loss, where gradients are in float16, mean of steps.")
    yield from _routers(prefix)


def _preferences(prefix: str) -> Iterator[Row]:
    """Metrics of preference runs besides loss, accuracy and margin."""
    for side in ("chosen", "rejected"):
        yield (f"{prefix}/{side}_reward", "score", f"Preferences: beta x log-ratio of the {side} answer, mean.")
        yield (f"{prefix}/{side}_logprob", "nats", f"Preferences: log-probability of the {side} answer, mean.")
    if prefix == "train":
        yield ("train/weight", "1", "Weight of a pair, the policy's own probability of its answers (WPO).")
    yield (f"{prefix}/baseline", "nats", "KTO: z, the KL divergence of the policy from the reference.")
    meaning = "Preferences: KL divergence of the reference from the policy, estimated on the answers, mean of pairs."
    yield (f"{prefix}/kl", "nats per token", meaning)


_REWARDS = (
    ("reward/avg_raw_reward", "reward", "Mean reward of the sampled answers, as environments gave it."),
    (
        "reward/mean_positive_reward",
        "reward",
        "Sum of the positive rewards of an answer's turns, mean over all answers.",
    ),
    ("reward/avg_pass_at_<n>", "share", "Prompts with at least one positive reward among their n answers."),
    ("reward/zero_variance_groups", "share", "Prompts whose answers all have the same reward."),
    ("reward/num_zero_variance_filtered", "prompts", "Groups of equal rewards that zero_variance_filter left out."),
    (
        "reward/component/<name>",
        "reward",
        "Part of the reward that environments report by name, mean over answers that have it.",
    ),
    ("loss/avg_final_rewards", "reward", "Mean reward of an answer as it is trained on, after shaping."),
    ("loss/pairs", "pairs", "Pairs of answers that are compared (policy_loss_type = online_dpo)."),
    ("loss/groups_without_a_pair", "groups", "Groups in which no two rewards differ, or no answer is trained."),
    ("loss/tied_answers", "pairs", "Pairs of answers to one prompt with equal rewards, which are left out."),
    ("loss/avg_raw_advantages", "1", "Mean advantage over trained tokens."),
    ("loss/avg_raw_advantages_abs", "1", "Mean absolute advantage over trained tokens."),
    (
        "loss/rows_without_advantage",
        "share",
        "Rows whose advantages are all 0: they teach nothing. Without KL loss and entropy bonus most losses skip them; "
        "in metrics of tokens a sample of them, one for 32 rows that are learned and at least one, counts for all.",
    ),
    ("loss/avg_kl", "nats per token", "KL penalty in the reward: mean over answers of the mean over tokens."),
    ("loss/avg_kl_max", "nats", "KL penalty in the reward: mean over answers of the largest token."),
    ("loss/kl_loss_coef", "1", "Weight of the KL penalty in the reward, which an adaptive controller moves."),
    ("loss/hinted", "share", "Answers before which the teacher read a hint (algorithm.distillation.hint.source)."),
    (
        "loss/teacher_kl",
        "nats",
        "Reverse KL from the teacher, estimated from the sampled tokens (algorithm.distillation.type = advantage).",
    ),
)
_POLICY_LOSS = (
    ("policy/final_loss", "1", "Loss that is minimized: policy loss, KL and entropy terms."),
    ("policy/policy_loss", "1", "Policy loss, after weights of off-policy correction."),
    ("policy/policy_kl", "nats", "KL to the reference model in the loss (use_kl_loss)."),
    ("policy/distillation_loss", "nats", "Weighted divergence from the teacher (algorithm.distillation.type = loss)."),
    ("policy/router_aux_loss", "1", "Load-balancing loss (router_aux_loss_coef): even loads make K."),
    ("policy/router_z_loss", "1", "Mean square of the log sum exp of router logits (router_z_loss_coef)."),
)
_POLICY = (
    *_updates("policy", "policy_lr", _POLICY_LOSS),
    ("policy/pairs/loss", "nats", "Loss of the pairs before the update, mean (policy_loss_type = online_dpo)."),
    ("policy/pairs/accuracy", "share", "Pairs in which the better answer has the larger reward beta a."),
    ("policy/pairs/margin", "nats", "Distance of the two rewards of a pair, mean."),
    ("policy/pairs/chosen_reward", "nats", "beta times the better answer's log-ratio to the reference."),
    ("policy/pairs/rejected_reward", "nats", "The same of the worse answer."),
    ("policy/pairs/chosen_logprob", "nats", "Log-probability of the better answer, sum over its tokens."),
    ("policy/pairs/rejected_logprob", "nats", "The same of the worse answer."),
    ("policy/mini_batches_without_a_token", "mini-batches", "Mini-batches without a token to train on."),
    ("policy/mini_batches_moved_too_far", "mini-batches", "Mini-batches left out (algorithm.max_importance_ratio)."),
    ("policy/teacher_divergence", "nats", "Divergence from the teacher's distributions, mean over tokens."),
    (
        "policy/teacher_logprobs_clamped",
        "share",
        "Compared tokens whose log-probability was raised to algorithm.distillation.min_logprob.",
    ),
    ("policy/teacher_divergence_clamped", "share", "Tokens above algorithm.distillation.max_divergence."),
    ("policy/policy_entropy", "nats", "Entropy of the policy, mean over trained tokens."),
    ("policy/response_length", "tokens", "Trained tokens of an answer, mean."),
    ("policy/clip_ratio", "share", "Tokens that the loss clips, cuts or draws, so that their gradient is changed."),
    ("policy/importance_ratio", "1", "Probability under the policy over that at sampling, mean over tokens."),
    ("policy/behave_capped_ratio", "share", "Tokens whose behavior weight the decoupled loss capped."),
    *_spread("policy/behave_weight_{}", "1", "Behavior weight of the decoupled loss"),
    *_spread("policy/cispo/ratio_{}", "1", "Importance ratio of CISPO before its bounds"),
    ("policy/cispo/ratio_clamped_mean", "1", "Importance ratio of CISPO within its bounds, mean over tokens."),
    *_spread(
        "policy/rollout_train_logprobs_abs_diff_{}", "nats", "Distance of log-probabilities of learner and engine"
    ),
    *_spread("policy/is_ratio_{}", "1", "Ratio of old to rollout probability that off_policy_correction looks at"),
    ("policy/token_mask_ratio", "share", "Tokens that token_mask leaves out."),
    ("policy/tis_token_clip_high_ratio", "share", "Tokens whose truncated importance weight is at its cap."),
    ("policy/tis_seq_clip_high_ratio", "share", "Sequences whose truncated importance weight is at its cap."),
    *_bounds("outlier_seq", "Sequences left out for a token whose ratio is an outlier"),
    *_bounds("geo_sequence_mask", "Sequences left out by the geometric mean of their ratios"),
    *_bounds("product_sequence_mask", "Sequences left out by the product of their ratios"),
)
_CRITIC = (
    *_updates("critic", "critic_lr", [("critic/critic_loss", "reward squared", "Loss of the critic.")]),
    ("critic/mini_batches_without_a_token", "mini-batches", "Mini-batches without a token to train on."),
    ("critic/values_clipfrac", "share", "Tokens whose value the loss of the critic clips."),
    ("critic/return_mean", "reward", "Running mean of returns that the critic's targets are normalized by."),
    ("critic/return_std", "reward", "Running standard deviation that its targets are normalized by."),
    *_spread("critic/critic_values_{}", "reward", "Values that the critic predicts for tokens"),
)
_GENERATE = (
    *_spread("generate/{}_num_tokens", "tokens", "Length of an answer, with observations", mean="avg"),
    *_spread("generate/{}_assistant_tokens", "tokens", "Sampled tokens of an answer", mean="avg"),
    ("generate/avg_tokens_non_zero_rewards", "tokens", "Length of answers with a reward other than 0, mean."),
    ("generate/avg_tokens_zero_rewards", "tokens", "Length of answers with reward 0, mean."),
    ("generate/avg_assistant_tokens_non_zero_rewards", "tokens", "Sampled tokens where the reward is not 0, mean."),
    ("generate/avg_assistant_tokens_zero_rewards", "tokens", "Sampled tokens where the reward is 0, mean."),
    ("generate/truncated_ratio", "share", "Trajectories that ended at a limit: a cut answer or a full context."),
    (
        "generate/repeated_ratio",
        "share",
        "Runs of four sampled tokens that the answer had before, mean over at most 64 answers.",
    ),
    ("generate/num_tokens", "tokens", "Tokens of all answers of the step."),
    ("generate/avg_num_turns", "turns", "Turns of an answer, mean."),
    ("generate/avg_num_rows", "rows", "Training rows that an answer makes, mean."),
    ("generate/tokens_per_turn_mean", "tokens", "Sampled tokens of a turn, mean."),
    ("generate/tokens_per_turn_std", "tokens", "Sampled tokens of a turn, standard deviation."),
    ("generate/tokens_per_turn_max", "tokens", "Sampled tokens of a turn, largest."),
    *_seconds("completion", "Time from the start to the end of a trajectory"),
    *_seconds("llm", "Time that a trajectory waits for the engine"),
    *_seconds("env", "Time that a trajectory waits for its environment"),
    *_seconds("env_run", "Time that the environment itself runs"),
    *_seconds("other", "Time of a trajectory that is neither the engine's nor the environment's"),
    ("generate/sampled_batches", "batches", "Batches that dynamic sampling drew for this step."),
    ("generate/groups_dropped", "prompts", "Groups that dynamic sampling drew and did not use."),
    ("generate/groups_without_signal", "prompts", "Groups that dynamic sampling left out for equal rewards."),
    ("generate/groups_outside_bands", "prompts", "Groups left out for their success rate or mean reward."),
    ("generate/groups_left_over", "prompts", "Good groups beyond the batch that dynamic sampling did not use."),
    ("generate/groups_replaced", "prompts", "Groups that dynamic sampling replaced by copies of good ones."),
    ("environment/<name>", "as measured", "What environments measure (`get_metrics`), mean over answers that have it."),
)
_FAILURES = (
    ("rollout/failures", "attempts", "Attempts at a trajectory that failed in the environment."),
    (
        "rollout/failures_<kind>",
        "attempts",
        "Those of one kind: raised, timeout, wrong_type, not_finite, too_large, close.",
    ),
    ("rollout/replaced_samples", "answers", "Answers that a later attempt gave."),
    ("rollout/skipped_samples", "answers", "Answers left out of their group after a failure."),
    ("rollout/filled_samples", "answers", "Copies that stand in for failed answers."),
    ("rollout/dropped_groups", "prompts", "Groups left out after failures."),
    ("rollout/groups_without_baseline", "prompts", "Groups left out because their greedy baseline failed (remax)."),
    ("data/rows_bad", "rows", "Streamed rows that were left out because they are no prompts (`data.bad_rows`)."),
    ("data/rows_too_long", "rows", "Streamed rows that were left out for `trainer.max_prompt_length`."),
    ("data/prompts_left_out", "prompts", "Prompts that were left out for failures since the run started."),
)
_ASYNC = (
    ("async/staleness_mean", "steps", "Steps between the start of a group and its use: mean over groups."),
    ("async/staleness_max", "steps", "The same: largest."),
    ("async/staleness_min", "steps", "The same: smallest."),
    ("async/staleness_ratio", "share", "Groups that are at least one step old."),
    ("async/groups_of_age_<n>", "prompts", "Groups that are n steps old."),
    ("async/groups_waiting", "prompts", "Finished groups that waited when the step began."),
    ("async/groups_running", "prompts", "Groups in generation after the batch was taken."),
    ("async/groups_refused", "prompts", "Groups that were refused since the last step."),
    (
        "async/groups_resampled",
        "prompts",
        "Groups discarded and sampled again since the last step: the run rolled back, or the bound became smaller.",
    ),
    ("async/room", "prompts", "Groups that may still be started within the staleness bound."),
    (
        "async/trajectories_of_several_versions",
        "answers",
        "Answers whose tokens come from several versions of the weights.",
    ),
)
_EVALUATION = (
    ("eval/<set>/avg_score", "reward", "Mean reward of a sample. `<set>` is a data source, or `all`."),
    ("eval/<set>/avg_score_stderr", "reward", "Its standard error, clustered by prompt."),
    (
        "eval/<set>/mean_positive_reward",
        "reward",
        "Sum of the positive rewards of a sample's turns, mean over samples.",
    ),
    ("eval/<set>/accuracy", "share", "Samples with reward 1; for preferences, pairs in the right order."),
    ("eval/<set>/accuracy_stderr", "share", "Its standard error, clustered by prompt."),
    ("eval/<set>/best_at_<n>", "reward", "Best reward of the n samples of a prompt, mean."),
    ("eval/<set>/pass_at_<n>", "share", "Probability that one of n samples is right (arXiv:2107.03374, eq. 1)."),
    ("eval/<set>/pass_at_<n>_stderr", "share", "Its standard error."),
    ("eval/<set>/maj_at_<n>", "share", "Share of right ones among the samples that gave the commonest answer."),
    ("eval/<set>/maj_at_<n>_stderr", "share", "Its standard error."),
    ("eval/<set>/loss", "nats per token, or nats per pair", "Supervised runs: mean loss of the set."),
    ("eval/<set>/perplexity", "1", "Supervised fine-tuning: exp of the loss."),
    (
        "eval/<set>/margin",
        "score",
        "Reward models and preferences: score of the chosen less that of the rejected, mean.",
    ),
    *_preferences("eval/<set>"),
    ("eval/failures", "attempts", "Attempts that failed in an environment, where there were any."),
    ("eval/failures_<kind>", "attempts", "Those of one kind."),
    ("eval/replaced_samples", "answers", "Samples that a later attempt gave, where there were any."),
    ("eval/skipped_samples", "answers", "Samples left out after a failure, where there were any."),
    ("eval/filled_samples", "answers", "Copies that stand in for failed samples, where there were any."),
    (
        "eval/dropped_groups",
        "prompts",
        "Prompts without a score because their environment failed, where there were any.",
    ),
)
_SUPERVISED = (
    *_updates("train", "lr", [("train/loss", "nats", "Supervised runs: loss of the batch.")]),
    ("train/distillation_loss", "nats", "Fine-tuning with a teacher: weighted divergence from it."),
    ("train/teacher_divergence", "nats", "Fine-tuning with a teacher: divergence from it, mean over tokens."),
    (
        "train/teacher_logprobs_clamped",
        "share",
        "Compared tokens whose log-probability was raised to distillation.min_logprob.",
    ),
    ("train/teacher_divergence_clamped", "share", "Tokens above distillation.max_divergence."),
    ("train/tokens", "tokens", "Tokens of the batch, padding excluded."),
    ("train/learned_tokens", "tokens", "Tokens of the batch that are learned."),
    ("train/accuracy", "share", "Reward models and preferences: pairs in the right order."),
    ("train/margin", "score", "Reward models and preferences: score of the chosen less that of the rejected, mean."),
    *_preferences("train"),
    ("train/chosen_score", "score", "Reward models: score of the chosen answer, mean."),
    ("train/rejected_score", "score", "Reward models: score of the rejected answer, mean."),
    *_spread("train/values_{}", "score", "Reward models: scores of answers"),
)
_RUN = (
    ("step", "steps", "Step of the line in `metrics.jsonl`; 0 is before training."),
    ("trainer/global_step", "steps", "Steps that the weights have behind them."),
    ("trainer/epoch", "epochs", "Epoch of the last batch, from 0."),
    ("trainer/samples_seen", "answers", "Answers that were trained on since the run began."),
    ("trainer/tokens_seen", "tokens", "Tokens of those answers."),
    ("trainer/tokens_per_second", "tokens per s", "Tokens of the step over the time of the step."),
    ("memory/process_bytes", "bytes", "Resident memory of the process of `skyrl run`, after the step; others on Ray."),
    ("alarm/<name>", "1", "1 in the step that raised the alarm of this name."),
    ("trainer/skipped_steps", "steps", "1 for a step that was left out because a number was not finite."),
    ("timing/step", "s", "The whole step, without evaluation and checkpoint."),
    ("timing/all_steps", "s", "All steps of the run so far, with those before it was resumed."),
    ("timing/generate", "s", "Waiting for samples."),
    ("timing/policy_logprobs", "s", "Old log-probabilities."),
    ("timing/ref_logprobs", "s", "Log-probabilities of the reference model."),
    ("timing/teacher", "s", "Log-probabilities or hidden states of the teachers, local or served."),
    ("timing/policy_likeliest", "s", "The policy's likeliest tokens (algorithm.distillation.top_k_of)."),
    ("timing/values", "s", "Values of the critic."),
    ("timing/policy_train", "s", "Updates of the policy."),
    ("timing/critic_train", "s", "Updates of the critic."),
    ("timing/update", "s", "Supervised runs: the update."),
    ("timing/sync_weights", "s", "Sending weights to the engines."),
    ("timing/update_ref_with_policy", "s", "Copying the policy into the reference model."),
    ("timing/update_teacher_with_policy", "s", "Mixing the policy into its moving average, the teacher."),
    ("timing/record", "s", "Writing the recording."),
    ("timing/write_samples", "s", "Waiting until the samples of the step before are written."),
    ("timing/eval", "s", "Evaluation."),
    ("timing/save_checkpoints", "s", "Saving a checkpoint, as far as the run waits for it."),
    ("weight_sync/parity_mean", "nats", "Distance of log-probabilities of learner and engines after a sync, mean."),
    ("weight_sync/parity_max", "nats", "The same: largest."),
    ("inference/engines_in_service", "engines", "Engines that sample."),
    ("inference/engines_lost", "engines", "Engines that are out of service."),
    ("inference/engine_restarts", "engines", "Engines and servers that came back into service."),
    (
        "trackers/<tracker>_steps_behind",
        "steps",
        "Steps before this one that a tracker has not got yet: see tracking.md.",
    ),
)
_CURRICULUM = (
    ("curriculum/pool_<pool>", "share", "Rows whose mean reward is in this pool (pools)."),
    ("curriculum/pool_unseen", "share", "Rows that were not drawn yet (pools)."),
    ("curriculum/target_difficulty", "unit of the column", "Difficulty next to which rows are drawn."),
    ("curriculum/share_of_source_<n>", "share", "Weight of a source in the last batch (mixture)."),
    ("curriculum/stage", "number", "Stage of the schedule that drew the last batch, counted from 0."),
    ("curriculum/rows_solved", "share", "Rows that are not drawn any more (skip_solved)."),
    ("curriculum/<name>", "as given", "A metric of a sampler of your own."),
)
_TABLES: tuple[tuple[str, tuple[Row, ...]], ...] = (
    ("Rewards and advantages", _REWARDS),
    ("Policy", _POLICY),
    ("Critic", _CRITIC),
    ("Generation", _GENERATE),
    ("Choice of rows", _CURRICULUM),
    ("Failures of environments", _FAILURES),
    ("Asynchronous runs", _ASYNC),
    ("Evaluation", _EVALUATION),
    ("Supervised runs", _SUPERVISED),
    ("The run", _RUN),
)
METRICS = tuple((heading, tuple(starmap(MetricSpec, rows))) for heading, rows in _TABLES)
"""All metrics, grouped by their heading in the documentation."""


def spec_of(name: str) -> MetricSpec | None:
    """Entry of the table for a metric's name; None if there is none. Entries without placeholders take precedence."""
    result = [spec for _, specs in METRICS for spec in specs if spec.pattern.fullmatch(name)]
    return min(result, key=lambda spec: spec.name.count("<"), default=None)


_MACHINE_UNITS = ("s", "bytes", "tokens per s", "engines")
_MACHINE_FAMILIES = ("timing/", "memory/", "trackers/", "alarm/")
"""Families of times and memory; of services that lag behind; of alarms, which follow from other metrics."""


def depends_on_machine(name: str) -> bool:
    """Whether the metric measures the machine or time passed, so that it differs between two equal runs."""
    spec = spec_of(name)
    return name.startswith(_MACHINE_FAMILIES) or (spec is not None and spec.unit in _MACHINE_UNITS)


def unknown(names: Iterable[str]) -> list[str]:
    """The names that have no entry, in order."""
    return sorted(name for name in names if spec_of(name) is None)


def page() -> str:
    """All tables, as Markdown."""
    parts = []
    for heading, specs in METRICS:
        rows = "\n".join(f"| `{spec.name}` | {spec.unit} | {spec.meaning} |" for spec in specs)
        parts.append(f"## {heading}\n\n| metric | unit | meaning |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)
