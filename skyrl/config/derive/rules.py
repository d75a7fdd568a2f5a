"""The derivation rules of a reinforcement-learning run.

Each rule fills one path that was left unset, names the paths that it reads, and never changes a written value.
`loading/resolve.py` applies them; rules shared with supervised runs are in `every_kind.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import attrs

from skyrl.config.derive import rules_in
from skyrl.config.derive.allocation import ALLOCATION_RULES
from skyrl.config.derive.engine_backends import GROUP_TRANSPORTS, backend_of, engine_dtype
from skyrl.config.derive.engine_options import given_length
from skyrl.config.derive.every_kind import EVERY_KIND_RULES
from skyrl.config.derive.model_tables import GRID
from skyrl.config.derive.rl_models import RL_ROLES, gives_advantages
from skyrl.config.derive.sizes import draws_rollouts, grid_of, models_of, starts_engines
from skyrl.config.foundation.reasoning_tasks import TaskRows
from skyrl.config.settings.data import DataConfig
from skyrl.config.settings.generator import SamplingParams
from skyrl.config.settings.losses import asks_for_correction
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.config.settings.trackers import lacks_of
from skyrl.tree.rules import Rule, fields_in, rule

_KIND_OF_ENGINE = fields_in(
    "generator.inference_engine", "backend run_engines_locally external_proxy_url external_server_urls"
)
"""Paths that decide which engines the run samples from."""


@rule(
    writes="generator.inference_engine.weight_sync_backend",
    reads=("trainer.device", *_KIND_OF_ENGINE),
    unset="nccl",
    placeholder=False,
)
def weight_transport_follows_engine_device(run: SkyRLTrainConfig) -> str:
    """Between processes that compute on CPUs, and to engines without vLLM's transfers, weights are sent over gloo; to
    servers that run already, as files.
    """
    able = backend_of(run.generator.inference_engine)
    if not able.is_started_by_the_run:
        return "disk"
    on_gpus = run.trainer.device == "cuda"
    return next(
        transport
        for transport in ("nccl", "gloo", "disk")
        if transport in able.transports and (on_gpus or transport != "nccl")
    )


@rule(
    writes="trainer.placement.executor",
    reads=(
        *(f"{role.placement}{name}" for role in RL_ROLES.values() for name in GRID),
        *fields_in("trainer", "critic.model.path teacher.model.path teacher.sources"),
        *fields_in("trainer.algorithm", "use_kl_loss use_kl_in_reward policy_loss_type policy_loss"),
        *_KIND_OF_ENGINE,
        *fields_in("generator.inference_engine", "num_engines weight_sync_backend"),
        "trainer.rollouts_from",
    ),
    unset="auto",
)
def executor_follows_process_count(run: SkyRLTrainConfig) -> str:
    """Ray is used if one process is not enough: for several ranks or engines, or an engine with its own processes. A
    run that is fed from a recording has no engine, and engines that run already are not processes of the run; a learner
    that forms a group with them needs its own process.
    """
    engine = run.generator.inference_engine
    single_ranks = all(grid_of(run, model).ranks == 1 for model in models_of(run))
    embedded = not starts_engines(run) or (backend_of(engine).is_embedded and engine.num_engines == 1)
    grouped = draws_rollouts(run) and not starts_engines(run) and engine.weight_sync_backend in GROUP_TRANSPORTS
    return "in_process" if embedded and single_ranks and not grouped else "ray"


_REASONING = (
    "environment.env_class",
    *fields_in("environment.skyrl_gym.reasoning_gym", "tasks seed train_rows eval_rows system_prompt"),
)


@rule(writes="data.train_data", reads=_REASONING, unset=DataConfig().train_data, placeholder=False)
def training_rows_of_reasoning_tasks(run: SkyRLTrainConfig) -> tuple[str, ...]:
    """A task of reasoning-gym makes its own rows."""
    gym = run.environment.skyrl_gym.reasoning_gym
    return _reasoning_rows(run, gym.eval_rows, gym.train_rows) or DataConfig().train_data


@rule(writes="data.val_data", reads=_REASONING, unset=DataConfig().val_data, placeholder=False)
def evaluation_rows_of_reasoning_tasks(run: SkyRLTrainConfig) -> tuple[str, ...]:
    """Evaluation takes the first questions that the seed draws, and training the ones that follow."""
    return _reasoning_rows(run, 0, run.environment.skyrl_gym.reasoning_gym.eval_rows) or DataConfig().val_data


@rule(writes="data.train_weights", reads=(*_REASONING, "data.train_data"))
def weights_of_reasoning_tasks(run: SkyRLTrainConfig) -> tuple[float, ...] | None:
    """Tasks of reasoning-gym are mixed by their weights."""
    gym, tasks = run.environment.skyrl_gym.reasoning_gym, run.environment.reasoning_tasks
    if len(tasks) < 2 or run.data.train_data != _reasoning_rows(run, gym.eval_rows, gym.train_rows):
        return None
    weights = tuple(table.get("weight", 1) for table in tasks.values())
    valid = all(isinstance(weight, int | float) and 0 < weight < inf for weight in weights)
    return tuple(map(float, weights)) if valid and len({*weights}) > 1 else None


def _reasoning_rows(run: SkyRLTrainConfig, skip: int, rows: int) -> tuple[str, ...]:
    """A source of rows for each task; empty in another environment, and for tables that a check refuses."""
    gym, tasks = run.environment.skyrl_gym.reasoning_gym, run.environment.reasoning_tasks
    if not all(isinstance(table, Mapping) for table in tasks.values()):
        return ()
    stream = {"seed": gym.seed, "size": 4 * (gym.train_rows + gym.eval_rows)}
    return tuple(
        TaskRows(
            task=task,
            skip=skip,
            rows=rows,
            system_prompt=gym.system_prompt,
            names_environment=len(run.environment.names) == 1,
            settings={name: value for name, value in table.items() if name != "weight"} | stream,
        ).source()
        for task, table in tasks.items()
    )


@rule(writes="trainer.ref.model.path", reads=("trainer.policy.model.path",))
def reference_starts_as_policy(run: SkyRLTrainConfig) -> str | None:
    """The KL penalty measures the distance from the policy's initial weights."""
    return run.trainer.policy.model.path


@rule(
    writes="generator.max_input_length",
    reads=(
        "trainer.max_prompt_length",
        "environment.agent.command",
        "environment.agent.function",
        "generator.sampling_params.max_generate_length",
    ),
)
def input_length_follows_prompt_length(run: SkyRLTrainConfig) -> int:
    """The engine's input in a single turn is the prompt. An agent's conversation grows by three answers and by as many
    tokens again from its tools.
    """
    agent = run.environment.agent
    plays = bool(agent.command) or agent.function is not None
    growth = 6 * run.generator.sampling_params.max_generate_length if plays else 0
    return run.trainer.max_prompt_length + growth


@rule(writes="trainer.algorithm.temperature", reads=("generator.sampling_params.temperature",))
def learner_temperature_follows_sampling(run: SkyRLTrainConfig) -> float:
    """Log-probabilities are only comparable at the temperature the tokens were drawn at."""
    return run.generator.sampling_params.temperature


@rule(
    writes="generator.eval_sampling_params.temperature",
    reads=(),
    unset=SamplingParams().temperature,
    placeholder=False,
    table="generator.eval_sampling_params",
)
def evaluation_is_greedy(run: SkyRLTrainConfig) -> float:
    """Evaluation takes the likeliest token by default."""
    return 0.0


@rule(
    writes="generator.eval_sampling_params.max_generate_length",
    reads=("generator.sampling_params.max_generate_length",),
    unset=SamplingParams().max_generate_length,
    placeholder=False,
    table="generator.eval_sampling_params",
)
def evaluation_length_follows_training(run: SkyRLTrainConfig) -> int:
    """The policy is evaluated on the answers that it is trained to give."""
    return run.generator.sampling_params.max_generate_length


@rule(
    writes="trainer.algorithm.max_seq_len",
    reads=("generator.max_input_length", "generator.sampling_params.max_generate_length"),
)
def sequence_is_input_plus_answer(run: SkyRLTrainConfig) -> int | None:
    """The longest sequence, in tokens, is the longest input plus the longest completion. With several turns the input
    of the last one holds all before it.
    """
    longest_input = run.generator.max_input_length
    return None if longest_input is None else longest_input + run.generator.sampling_params.max_generate_length


@rule(
    writes="trainer.longest_row",
    reads=(
        "trainer.max_prompt_length",
        "generator.max_input_length",
        "generator.sampling_params.max_generate_length",
        "generator.eval_sampling_params",
        "generator.eval_sampling_params.max_generate_length",
        "generator.inference_engine.engine_init_kwargs",
        *_KIND_OF_ENGINE,
    ),
)
def longest_row_follows_engine_length(run: SkyRLTrainConfig) -> int | None:
    """A row ends at the length given to the engine, or with the longest answer to the longest input, in training or
    evaluation.
    """
    generator = run.generator
    if generator.max_input_length is None:
        return None
    sampled = (generator.sampling_params, generator.eval_sampling_params or generator.sampling_params)
    answer = max(sampling.max_generate_length for sampling in sampled)
    needed = max(run.trainer.max_prompt_length, generator.max_input_length) + answer
    return given_length(generator.inference_engine) or needed


@rule(
    writes="trainer.algorithm.reward_shaping.overlong.max_len",
    reads=("generator.sampling_params.max_generate_length",),
)
def overlong_limit_follows_generate_length(run: SkyRLTrainConfig) -> int:
    """The limit of the overlong penalty, in tokens, is the longest completion."""
    return run.generator.sampling_params.max_generate_length


@rule(
    writes="trainer.policy_mini_batch_size_in_samples",
    reads=("trainer.policy_mini_batch_size", "generator.n_samples_per_prompt"),
)
def policy_mini_batch_in_samples(run: SkyRLTrainConfig) -> int:
    """A learner splits batches by samples and need not know how many samples a prompt has."""
    return run.trainer.policy_mini_batch_size * run.generator.n_samples_per_prompt


@rule(
    writes="trainer.critic_mini_batch_size_in_samples",
    reads=("trainer.critic_mini_batch_size", "generator.n_samples_per_prompt"),
)
def critic_mini_batch_in_samples(run: SkyRLTrainConfig) -> int:
    """The critic's learner counts its mini-batches in samples, like the policy's."""
    return run.trainer.critic_mini_batch_size * run.generator.n_samples_per_prompt


@rule(writes="trainer.algorithm.off_policy_correction.tis_ratio_type", reads=("trainer.algorithm.use_tis",))
def use_tis_means_per_token(run: SkyRLTrainConfig) -> str | None:
    """The older switch `use_tis` stands for truncated importance sampling per token."""
    return "token" if run.trainer.algorithm.use_tis else None


@rule(
    writes="trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high",
    reads=("trainer.algorithm.use_tis", "trainer.algorithm.tis_imp_ratio_cap"),
    unset=2.0,
    placeholder=False,
)
def token_cap_follows_tis_cap(run: SkyRLTrainConfig) -> float:
    """`tis_imp_ratio_cap`, if set, is the cap that belongs to `use_tis`."""
    cap = run.trainer.algorithm.tis_imp_ratio_cap
    return cap if run.trainer.algorithm.use_tis and cap > 0 else 2.0


@rule(
    writes="generator.sampling_params.logprobs",
    reads=(
        *fields_in(
            "trainer.algorithm.off_policy_correction",
            "tis_ratio_type sequence_mask_metric outlier_token_is_threshold_low outlier_token_is_threshold_high "
            "token_mask_is_threshold_low token_mask_is_threshold_high",
        ),
        *fields_in("trainer.algorithm.distillation", "type self_teacher"),
        *fields_in("trainer.teacher", "model.path sources endpoint.url endpoint.sources"),
    ),
)
def comparisons_need_engine_logprobs(run: SkyRLTrainConfig) -> int | None:
    """Importance ratios, and a teacher's advantages, are against the engine's log-probabilities, so it has to return
    them.
    """
    return 1 if asks_for_correction(run.trainer.algorithm.off_policy_correction) or gives_advantages(run) else None


@rule(writes="generator.rope_scaling", reads=("trainer.rope_scaling",))
def engine_rope_scaling_follows_trainer(run: SkyRLTrainConfig) -> Mapping[str, Any] | None:
    """Engine and learner must have the same rotary embeddings."""
    return run.trainer.rope_scaling


@rule(writes="generator.rope_theta", reads=("trainer.rope_theta",))
def engine_rope_base_follows_trainer(run: SkyRLTrainConfig) -> float | None:
    """Engine and learner must have the same rotary embeddings."""
    return run.trainer.rope_theta


@rule(writes="generator.inference_engine.deterministic", reads=("trainer.deterministic",))
def engine_determinism_follows_run(run: SkyRLTrainConfig) -> bool:
    """A run repeats bit for bit only if the engine does."""
    return run.trainer.deterministic


@rule(
    writes="generator.inference_engine.enable_prefix_caching",
    reads=(
        *fields_in("trainer.fully_async", "enabled interrupt_generation clear_kv_cache_on_weight_sync"),
        *_KIND_OF_ENGINE,
    ),
    unset=True,
    placeholder=False,
)
def kept_cache_disables_prefix_caching(run: SkyRLTrainConfig) -> bool:
    """Without `clear_kv_cache_on_weight_sync`, a prefix cache would give new samples what old weights computed."""
    settings, shares = run.trainer.fully_async, backend_of(run.generator.inference_engine).keeps_prefixes_across_updates
    keeps = settings.enabled and settings.interrupt_generation and not settings.clear_kv_cache_on_weight_sync
    return not (keeps and shares)


@rule(writes="generator.inference_engine.enforce_eager", reads=("trainer.device",), unset=False, placeholder=False)
def cuda_graphs_need_cuda(run: SkyRLTrainConfig) -> bool:
    """Engines record CUDA graphs only where there is CUDA."""
    return run.trainer.device != "cuda"


@rule(
    writes="generator.inference_engine.async_engine",
    reads=(
        *fields_in("trainer", "placement.executor placement.colocate_all rollouts_from"),
        *_KIND_OF_ENGINE,
        *fields_in(
            "generator.inference_engine",
            "tensor_parallel_size pipeline_parallel_size data_parallel_size enable_ray_prometheus_stats",
        ),
    ),
    unset=True,
    placeholder=False,
)
def colocated_engine_has_one_process(run: SkyRLTrainConfig) -> bool:
    """An engine that takes turns with the learner has a process of its own on Ray: a second one for its scheduler would
    only cost its start and the way of each token between the two.
    """
    engine, placement = run.generator.inference_engine, run.trainer.placement
    parts = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    shares_gpus = placement.executor != "in_process" and placement.colocate_all and starts_engines(run)
    has_choice = "async_engine" in backend_of(engine).fields and not engine.enable_ray_prometheus_stats
    return not (has_choice and shares_gpus and parts == 1)


ROUNDING_NATS = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.2, "int8": 0.3}
"""Largest mean difference of log-probabilities, in nats, that rounding in a type explains. Measured: 1e-5 in float32,
0.04 in bfloat16 (SmolLM2-135M), which keeps three bits fewer than float16 does. Wrong weights differ by whole nats."""


@rule(
    writes="generator.inference_engine.logprob_parity_bound",
    reads=(
        "trainer.compute_dtype",
        *_KIND_OF_ENGINE,
        *fields_in("generator.inference_engine", "model_dtype rollout_dtype"),
    ),
)
def parity_bound_follows_precision(run: SkyRLTrainConfig) -> float:
    """The side that rounds more decides: what was measured of it, and room for models that round more."""
    learner = run.trainer.compute_dtype or "float32"
    return max(ROUNDING_NATS[learner], ROUNDING_NATS[engine_dtype(run.generator.inference_engine, learner)])


@rule(
    writes="trainer.logger",
    reads=("trainer.trackers.wandb.mode",),
    unset="wandb",
    placeholder=False,
    asks_machine=True,
)
def unavailable_tracker_becomes_console(run: SkyRLTrainConfig) -> str:
    """The default is W&B; where its package or a key is missing on this machine, metrics go to the console."""
    return "console" if any(lacks_of("wandb", mode=run.trainer.trackers.wandb.mode)) else "wandb"


_OLDER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ckpt_path": {"unset": "~/ckpts/", "placeholder": False},
    "export_path": {"unset": "~/exports/", "placeholder": False},
    "log_path": {"unset": "/tmp/skyrl-logs", "placeholder": False},
}
"""Field of every kind of run -> SkyRL's own default for it, which a user may also write explicitly."""

RULES: tuple[Rule[Any], ...] = (
    *(attrs.evolve(rule.below("trainer"), **_OLDER_DEFAULTS.get(rule.writes, {})) for rule in EVERY_KIND_RULES),
    *ALLOCATION_RULES,
    *rules_in(__name__),
)
"""Derivation rules in order: a rule comes after those that write what it reads."""
