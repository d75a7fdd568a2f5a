"""`resolve()`: everything that follows from what was written, derived once, in the open.

Each rule below fills one path that was left unset, says what it reads, and never changes what a person wrote. The
result is a new tree; nothing else in the program derives or changes configuration.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from skyrl.config.entry import RunConfig
from skyrl.config.generator import SamplingParams
from skyrl.config.losses import asks_for_correction
from skyrl.config.machine import has_cuda_device
from skyrl.config.root import SkyRLTrainConfig
from skyrl.config.sizes import grid_of, models_of
from skyrl.tree.origins import Origins
from skyrl.tree.rules import Rule, derive, derived_paths, rule

C = TypeVar("C", bound=RunConfig)


@rule(writes="trainer.device", reads=(), unset="auto")
def device_is_what_the_machine_has(run: SkyRLTrainConfig) -> str:
    """A CUDA device where there is one, the CPU otherwise."""
    return "cuda" if has_cuda_device() else "cpu"


@rule(
    writes="trainer.placement.executor",
    reads=(
        "trainer.placement.policy_num_nodes",
        "trainer.placement.policy_num_gpus_per_node",
        "trainer.placement.critic_num_nodes",
        "trainer.placement.critic_num_gpus_per_node",
        "trainer.placement.ref_num_nodes",
        "trainer.placement.ref_num_gpus_per_node",
        "trainer.critic.model.path",
        "trainer.algorithm.use_kl_loss",
        "trainer.algorithm.use_kl_in_reward",
        "generator.inference_engine.backend",
        "generator.inference_engine.num_engines",
    ),
    unset="auto",
)
def one_process_suffices_for_one_embedded_engine(run: SkyRLTrainConfig) -> str:
    """Ray is for what one process cannot hold: several ranks or engines, or an engine with processes of its own."""
    engine = run.generator.inference_engine
    alone = all(grid_of(run, model).ranks == 1 for model in models_of(run))
    return "in_process" if engine.backend == "torch" and alone and engine.num_engines == 1 else "ray"


@rule(writes="trainer.compute_dtype", reads=("trainer.bf16", "trainer.device"))
def bf16_is_for_accelerators(run: SkyRLTrainConfig) -> str:
    """On a CPU the product of small float32 matrices is as fast and exact, so `bf16` has an effect on CUDA only."""
    return "bfloat16" if run.trainer.bf16 and run.trainer.device == "cuda" else "float32"


@rule(writes="trainer.attention", reads=("trainer.flash_attn", "trainer.device"))
def flash_attention_needs_cuda(run: SkyRLTrainConfig) -> str:
    """FlashAttention has no CPU kernel; torch's own scaled dot-product attention serves there."""
    return "flash_attention_2" if run.trainer.flash_attn and run.trainer.device == "cuda" else "sdpa"


@rule(writes="trainer.recompute_activations", reads=("trainer.gradient_checkpointing", "trainer.device"))
def checkpointing_saves_device_memory(run: SkyRLTrainConfig) -> bool:
    """Gradient checkpointing trades time for accelerator memory; on a CPU it would only cost the time."""
    return run.trainer.gradient_checkpointing and run.trainer.device == "cuda"


@rule(writes="trainer.run_path", reads=("trainer.run_name",))
def a_run_has_a_folder_of_its_name(run: SkyRLTrainConfig) -> str:
    """Below the folder that the command runs in."""
    return f"runs/{run.trainer.run_name}"


@rule(writes="trainer.ref.model.path", reads=("trainer.policy.model.path",))
def the_reference_is_where_the_policy_started(run: SkyRLTrainConfig) -> str | None:
    """The KL penalty measures the distance from the policy's own beginning."""
    return run.trainer.policy.model.path


@rule(writes="generator.max_input_length", reads=("trainer.max_prompt_length",))
def the_first_input_is_the_prompt(run: SkyRLTrainConfig) -> int:
    """What the engine is given in a single turn is the prompt."""
    return run.trainer.max_prompt_length


@rule(writes="trainer.algorithm.temperature", reads=("generator.sampling_params.temperature",))
def policy_logits_use_the_rollout_temperature(run: SkyRLTrainConfig) -> float:
    """Log-probabilities are only comparable at the temperature the tokens were drawn at."""
    return run.generator.sampling_params.temperature


@rule(writes="generator.eval_sampling_params", reads=("generator.sampling_params.max_generate_length",))
def evaluation_is_greedy(run: SkyRLTrainConfig) -> SamplingParams:
    """Unless it is told otherwise, evaluation takes the likeliest token, as far as training samples."""
    return SamplingParams(temperature=0.0, max_generate_length=run.generator.sampling_params.max_generate_length)


@rule(
    writes="trainer.algorithm.max_seq_len",
    reads=("generator.max_input_length", "generator.sampling_params.max_generate_length"),
)
def a_sequence_is_input_and_answer(run: SkyRLTrainConfig) -> int | None:
    """In tokens: the longest input and the longest completion together."""
    longest_input = run.generator.max_input_length
    return None if longest_input is None else longest_input + run.generator.sampling_params.max_generate_length


@rule(
    writes="trainer.algorithm.reward_shaping.overlong.max_len",
    reads=("generator.sampling_params.max_generate_length",),
)
def an_answer_is_overlong_where_the_engine_stops(run: SkyRLTrainConfig) -> int:
    """In tokens: the longest completion."""
    return run.generator.sampling_params.max_generate_length


@rule(
    writes="trainer.policy_mini_batch_size_in_samples",
    reads=("trainer.policy_mini_batch_size", "generator.n_samples_per_prompt"),
)
def policy_mini_batch_counted_in_samples(run: SkyRLTrainConfig) -> int:
    """A learner cuts rows, not prompts, and need not know how many samples a prompt has."""
    return run.trainer.policy_mini_batch_size * run.generator.n_samples_per_prompt


@rule(
    writes="trainer.critic_mini_batch_size_in_samples",
    reads=("trainer.critic_mini_batch_size", "generator.n_samples_per_prompt"),
)
def critic_mini_batch_counted_in_samples(run: SkyRLTrainConfig) -> int:
    """As for the policy."""
    return run.trainer.critic_mini_batch_size * run.generator.n_samples_per_prompt


@rule(writes="trainer.algorithm.off_policy_correction.tis_ratio_type", reads=("trainer.algorithm.use_tis",))
def use_tis_means_per_token(run: SkyRLTrainConfig) -> str | None:
    """The older switch `use_tis` stands for truncated importance sampling token by token."""
    return "token" if run.trainer.algorithm.use_tis else None


@rule(
    writes="trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high",
    reads=("trainer.algorithm.use_tis", "trainer.algorithm.tis_imp_ratio_cap"),
    unset=2.0,
    placeholder=False,
)
def the_older_tis_cap_is_the_token_cap(run: SkyRLTrainConfig) -> float:
    """`tis_imp_ratio_cap`, where it is set, is the cap that came with `use_tis`."""
    cap = run.trainer.algorithm.tis_imp_ratio_cap
    return cap if run.trainer.algorithm.use_tis and cap > 0 else 2.0


@rule(
    writes="generator.sampling_params.logprobs",
    reads=(
        "trainer.algorithm.off_policy_correction.tis_ratio_type",
        "trainer.algorithm.off_policy_correction.sequence_mask_metric",
        "trainer.algorithm.off_policy_correction.outlier_token_is_threshold_low",
        "trainer.algorithm.off_policy_correction.outlier_token_is_threshold_high",
        "trainer.algorithm.off_policy_correction.token_mask_is_threshold_low",
        "trainer.algorithm.off_policy_correction.token_mask_is_threshold_high",
    ),
)
def corrections_need_the_engines_logprobs(run: SkyRLTrainConfig) -> int | None:
    """Importance ratios are against the engine's log-probabilities, so it has to return them."""
    return 1 if asks_for_correction(run.trainer.algorithm.off_policy_correction) else None


@rule(writes="generator.rope_scaling", reads=("trainer.rope_scaling",))
def the_engine_scales_rope_as_the_trainer(run: SkyRLTrainConfig) -> Any:
    """The same model on both sides."""
    return run.trainer.rope_scaling


@rule(writes="generator.rope_theta", reads=("trainer.rope_theta",))
def the_engine_uses_the_trainers_rope_base(run: SkyRLTrainConfig) -> float | None:
    """The same model on both sides."""
    return run.trainer.rope_theta


@rule(writes="generator.inference_engine.deterministic", reads=("trainer.deterministic",))
def a_deterministic_run_samples_deterministically(run: SkyRLTrainConfig) -> bool:
    """A run repeats bit for bit only if the engine does."""
    return run.trainer.deterministic


@rule(
    writes="generator.inference_engine.weight_sync_backend",
    reads=("trainer.device", "generator.inference_engine.backend"),
    unset="nccl",
    placeholder=False,
)
def nccl_is_for_vllm_on_cuda(run: SkyRLTrainConfig) -> str:
    """Between processes that compute on CPUs, and to engines without vLLM's transfers, weights travel over gloo."""
    on_gpus = run.trainer.device == "cuda" and run.generator.inference_engine.backend == "vllm"
    return "nccl" if on_gpus else "gloo"


@rule(
    writes="generator.inference_engine.logprob_parity_bound",
    reads=(
        "trainer.compute_dtype",
        "generator.inference_engine.backend",
        "generator.inference_engine.model_dtype",
    ),
)
def precision_bounds_how_far_engine_and_learner_differ(run: SkyRLTrainConfig) -> float:
    """Two float32 forward passes differ by rounding, of about 1e-5 nats; in bfloat16 it is some hundredths."""
    engine = run.generator.inference_engine
    whole = run.trainer.compute_dtype == "float32" and (
        engine.backend == "torch" or engine.model_dtype in ("float32", "fp32")
    )
    return 1e-3 if whole else 0.1


@rule(
    writes="trainer.log_path",
    reads=("trainer.run_path", "trainer.run_name"),
    unset="/tmp/skyrl-logs",
    placeholder=False,
)
def logs_lie_in_the_runs_folder(run: SkyRLTrainConfig) -> str:
    """Beside the metrics, where a person looks for them."""
    return f"{run.trainer.run_path or f'runs/{run.trainer.run_name}'}/logs"


RULES: tuple[Rule[SkyRLTrainConfig], ...] = (
    device_is_what_the_machine_has,
    one_process_suffices_for_one_embedded_engine,
    bf16_is_for_accelerators,
    flash_attention_needs_cuda,
    checkpointing_saves_device_memory,
    a_run_has_a_folder_of_its_name,
    the_reference_is_where_the_policy_started,
    the_first_input_is_the_prompt,
    policy_logits_use_the_rollout_temperature,
    evaluation_is_greedy,
    a_sequence_is_input_and_answer,
    an_answer_is_overlong_where_the_engine_stops,
    policy_mini_batch_counted_in_samples,
    critic_mini_batch_counted_in_samples,
    use_tis_means_per_token,
    the_older_tis_cap_is_the_token_cap,
    corrections_need_the_engines_logprobs,
    the_engine_scales_rope_as_the_trainer,
    the_engine_uses_the_trainers_rope_base,
    a_deterministic_run_samples_deterministically,
    nccl_is_for_vllm_on_cuda,
    precision_bounds_how_far_engine_and_learner_differ,
    logs_lie_in_the_runs_folder,
)
"""In order: a rule comes after those that write what it reads."""


def rules_of(root: type[RunConfig]) -> tuple[Rule[Any], ...]:
    """Those of this kind of run."""
    if issubclass(root, SkyRLTrainConfig):
        return RULES
    from skyrl.config.supervised_resolve import SUPERVISED_RULES

    return SUPERVISED_RULES


def resolve(config: C) -> C:
    """A new tree in which everything that can be derived is. Resolving it again changes nothing."""
    return resolve_with_origins(config, {})[0]


def derived(config: RunConfig) -> tuple[str, ...]:
    """The paths of a resolved tree that follow from the rest: `resolve` gives them again when they are left out."""
    return derived_paths(config, rules_of(type(config)))


def resolve_with_origins(config: C, origins: Origins, broken: Iterable[str] = ()) -> tuple[C, Origins, frozenset[str]]:
    """`resolve`, keeping track of which rule derived what; what cannot be derived from broken paths is broken, too."""
    return derive(config, rules_of(type(config)), origins, broken)
