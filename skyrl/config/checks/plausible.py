"""Checks of values that are valid but probably a mistake. Each warning names the suspicious number."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.checks import warning
from skyrl.config.derive.algorithm_facts import loss_facts
from skyrl.config.effects.algorithm import ALGORITHM_EFFECTS
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.errors import Problem
from skyrl.tree import get_at

HOTTEST = 2.0
"""Sampling temperature above which training samples are mostly noise."""

_CLIPPED = "0.2 is usual"
LARGEST: dict[str, tuple[float, str, str]] = {
    "eps_clip_low": (1.0, "no ratio is below 0: nothing is clipped from below", _CLIPPED),
    "eps_clip_high": (1.0, "nothing is clipped until a token is more than twice as likely as before", _CLIPPED),
    "clip_ratio_c": (100.0, "no ratio is as large: the dual clip never acts", "3.0 is usual"),
    "cispo.cispo_eps_clip_low": (1.0, "no ratio is below 0: nothing is clipped from below", "1.0 is usual"),
    "cispo.cispo_eps_clip_high": (100.0, "a single token may count that much more than the others", "4.0 is usual"),
    "dppo.delta_low": (1.0, "no two probabilities differ by more than 1: no token is left out", _CLIPPED),
    "dppo.delta_high": (1.0, "no two probabilities differ by more than 1: no token is left out", _CLIPPED),
    "gmpo.log_clip_low": (3.0, "it bounds the logarithm of a ratio, so nothing is clipped", "0.4 is usual"),
    "gmpo.log_clip_high": (3.0, "it bounds the logarithm of a ratio, so nothing is clipped", "0.4 is usual"),
    "kl_loss_coef": (1.0, "the penalty outweighs the rewards", "0.001 is usual"),
    "entropy_loss_coef": (1.0, "the bonus outweighs the rewards", "0.01 is usual"),
}
"""Field of the algorithm -> the largest value that recipes come near, the effect of a larger one, a remedy."""

_WHOLE_ANSWER = "the ratio of a whole answer, to the power of 1/length, stays nearer to 1: almost nothing is clipped"
LARGEST_OF_LOSS: dict[str, dict[str, tuple[float, str, str]]] = {
    "gspo": {
        "eps_clip_low": (0.05, _WHOLE_ANSWER, "the paper has 0.0003"),
        "eps_clip_high": (0.05, _WHOLE_ANSWER, "the paper has 0.0004"),
    },
}
"""The same for fields that one loss reads otherwise than the others. GSPO: arXiv:2507.18071, section 5.1."""

HALVES = ("float16", "fp16", "half")


def training_sampling_is_not_truncated(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The learner scores tokens under the whole distribution, not under the part that the engine draws from."""
    sampling = run.generator.sampling_params
    drawn = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
    for name in (name for name, is_cut in drawn.items() if is_cut):
        message = f"{getattr(sampling, name)} truncates a distribution that the learner scores whole, so ratios are off"
        yield warning(f"generator.sampling_params.{name}", message, "leave it out in training; evaluation may have it")


def training_temperature_is_plausible(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """High temperatures flatten the distribution of tokens until samples are mostly noise."""
    temperature = run.generator.sampling_params.temperature
    if temperature > HOTTEST:
        message = f"{temperature} makes nearly every token random"
        yield warning("generator.sampling_params.temperature", message, "1.0 is usual")


def algorithm_settings_are_plausible(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Clip ranges and weights of terms of the loss are near those of published recipes."""
    bounds = LARGEST | LARGEST_OF_LOSS.get(run.trainer.algorithm.policy_loss_type, {})
    for field, (largest, consequence, usual) in bounds.items():
        path = f"trainer.algorithm.{field}"
        value = get_at(run, path)
        covering = [effect for effect in ALGORITHM_EFFECTS if f"{path}.".startswith(f"{effect.path}.")]
        if value > largest and all(effect.condition.holds(run) for effect in covering):
            yield warning(path, f"{value}: {consequence}", usual)


def reward_scale_is_not_zero(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A factor of 0 makes all rewards the same, from which nothing is learned."""
    if run.trainer.algorithm.reward_shaping.scale == 0:
        message = "0 makes all rewards the same: nothing is learned from them"
        yield warning("trainer.algorithm.reward_shaping.scale", message, "1.0 leaves rewards as they are")


def kl_penalty_has_weight(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """With weight 0, a reference would be loaded and scored without any effect."""
    algorithm = run.trainer.algorithm
    if algorithm.use_kl_loss and algorithm.kl_loss_coef == 0 and not loss_facts(algorithm).learns_from_pairs:
        message = "the KL loss is on with weight 0, so it has no effect, but the reference is still computed"
        yield warning("trainer.algorithm.kl_loss_coef", message, "set trainer.algorithm.use_kl_loss = false")


def ratio_cap_reaches_one(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A ratio of 1 means that engine and learner agree; a cap below 1 would shrink even those tokens."""
    correction = run.trainer.algorithm.off_policy_correction
    if correction.tis_ratio_type is None:
        return
    name = f"{correction.tis_ratio_type}_tis_ratio_clip_high"
    cap = getattr(correction, name, None)
    if cap is not None and cap < 1:
        message = f"{cap} is below 1, so even samples without any mismatch are weighted down"
        yield warning(f"trainer.algorithm.off_policy_correction.{name}", message, "2.0 is usual")


def warmup_ends_within_run(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """If the number of steps is written, warm-up ends within it."""
    trainer, settings = run.trainer, run.trainer.policy.optimizer_config
    if trainer.max_training_steps is None:
        return
    in_a_step = trainer.update_epochs_per_batch * max(1, trainer.train_batch_size // trainer.policy_mini_batch_size)
    steps = trainer.max_training_steps * (in_a_step if settings.schedule_unit == "optimizer_step" else 1)
    if settings.num_warmup_steps >= steps:
        message = f"{settings.num_warmup_steps} steps of warm-up, and the run has {steps}: it never reaches lr"
        yield warning("trainer.policy.optimizer_config.num_warmup_steps", message, "take fewer")


def longest_sequence_fits_micro_batch(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A sequence longer than the token budget is a micro-batch by itself, and exceeds the memory planned for one."""
    budget, longest = run.trainer.max_tokens_per_microbatch, run.trainer.algorithm.max_seq_len
    if longest is not None and 0 < budget < longest:
        message = (
            f"{budget} is below the longest sequence, trainer.algorithm.max_seq_len = {longest}, which then gets a "
            "pass of its own"
        )
        yield warning("trainer.max_tokens_per_microbatch", message, "give at least the longest sequence")


def engine_dtype_matches_learner(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """float16 and bfloat16 round differently, so the engine's log-probabilities would differ from the learner's."""
    engine, learner = run.generator.inference_engine, run.trainer.compute_dtype
    if engine.model_dtype in HALVES and learner == "bfloat16":
        message = f"{engine.model_dtype} rounds differently from the learner's bfloat16, so ratios are off by that"
        yield warning("generator.inference_engine.model_dtype", message, "use bfloat16 on both sides")


def engines_leave_learner_memory(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """On shared GPUs the learner's process holds some memory even while the engine is awake."""
    share = run.generator.inference_engine.gpu_memory_utilization
    if run.trainer.placement.colocate_all and run.trainer.device == "cuda" and share > 0.95:
        message = f"{share} of a GPU that is shared with the learner leaves the learner no memory"
        yield warning("generator.inference_engine.gpu_memory_utilization", message, "0.8 is usual")


def evaluation_data_is_held_out(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A score on training prompts says little about new ones."""
    both = [source for source in run.data.val_data if source in set(run.data.train_data)]
    if both:
        yield warning("data.val_data", f"{', '.join(both)} is also trained on", "hold some rows out")


def checkpoint_and_export_paths_differ(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Checkpoints and exports need different folders: both write subfolders called `global_step_N`."""
    trainer = run.trainer
    if trainer.ckpt_path.rstrip("/") == trainer.export_path.rstrip("/"):
        message = f"{trainer.export_path} is also trainer.ckpt_path, and both write global_step_N into it"
        yield warning("trainer.export_path", message, "give each a folder of its own")


def run_name_is_folder_name(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Without a `run_path`, the name becomes a folder below `runs`."""
    trainer = run.trainer
    name = trainer.run_name
    is_folder = bool(name.strip()) and ".." not in name.split("/") and not name.startswith("/")
    if not is_folder and trainer.run_path == f"runs/{name}":
        message = f"{name!r} makes {trainer.run_path!r} the run's folder, which is not a folder of its own"
        yield warning("trainer.run_name", message, "use a plain name, or set trainer.run_path")
