"""Conditions under which the fields of `generator`, `environment` and `data` have an effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from skyrl.config.derive.engine_backends import (
    BACKENDS,
    backend_of,
    backends_that,
    external_backend,
    kind_of_engine,
    reads_remote_urls,
)
from skyrl.config.derive.every_kind import evaluates
from skyrl.config.derive.sizes import (
    draws_rollouts,
    joins_servers,
    may_change_engines,
    may_restart_engines,
    on_ray,
    sends_adapter_files,
    sends_adapters_alone,
    starts_engines,
)
from skyrl.config.effects.samplers import SAMPLER_EFFECTS, draws_by
from skyrl.config.foundation.import_paths import is_import_path
from skyrl.config.settings.environment import ENVIRONMENTS, MCP, EnvironmentFacts, built_in_name, environments_where
from skyrl.config.settings.generator import SamplingParams
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.tree import get_at
from skyrl.tree.rules import Condition, Effect, condition, effects, fields_in, is_given

_SAMPLES = Condition("the policy samples (trainer.rollouts_from is none)", draws_rollouts)
EVALUATES = Condition("evaluation is on", lambda run: evaluates(run.trainer))

# Engines.


@condition(
    "weights are sent to other processes (the run is on Ray, or the engines are already running; not adapters to vLLM)"
)
def _sends_weights(run: SkyRLTrainConfig) -> bool:
    adapter_files = sends_adapters_alone(run) and backend_of(run.generator.inference_engine).adapters == "files"
    return (on_ray(run) or not starts_engines(run)) and not adapter_files


@condition("weights are sent as files (weight_sync_backend is disk or delta, and they go to other processes)")
def _sends_files(run: SkyRLTrainConfig) -> bool:
    by_files = run.generator.inference_engine.weight_sync_backend in ("disk", "delta")
    return (on_ray(run) or not starts_engines(run)) and by_files and not sends_adapters_alone(run)


@condition("weights are sent through CUDA IPC (weight_sync_backend is nccl, and engines share the learner's GPUs)")
def _sends_by_ipc(run: SkyRLTrainConfig) -> bool:
    by_nccl = run.generator.inference_engine.weight_sync_backend == "nccl"
    return on_ray(run) and by_nccl and run.trainer.placement.colocate_all


@condition("the engines are vLLM servers that are already running, and get weights (weight_sync_backend is not none)")
def _leaves_groups(run: SkyRLTrainConfig) -> bool:
    engine = run.generator.inference_engine
    return kind_of_engine(engine) == "http" and engine.weight_sync_backend != "none"


_SERVERS = backends_that(lambda backend: not backend.is_started_by_the_run, "or")
"""Kinds of engine that always run already."""

_CHANGES_ENGINES = Condition(
    "the run is on Ray and starts engines that share no GPUs (trainer.placement.colocate_all is false)",
    may_change_engines,
)
_RESTARTS = Condition(
    "the engines are servers that are already running, or start on Ray, on GPUs of their own or on a CPU",
    may_restart_engines,
)
_WAITS_TO_RESTART = Condition(
    f"{_RESTARTS.words}, and max_engine_restarts is above 0",
    lambda run: may_restart_engines(run) and run.generator.inference_engine.max_engine_restarts > 0,
)
_SERVES = Condition(
    "the policy is served over HTTP (generator.inference_engine.enable_http_endpoint)",
    lambda run: run.generator.inference_engine.enable_http_endpoint,
)
_ENGINES_RUN_ALREADY = Condition("the engines are already running", lambda run: not starts_engines(run))
_READS_TOKEN = Condition(
    "the engines are already running (external_server_urls names them)", _ENGINES_RUN_ALREADY.holds
)
_READS_RUN_ENGINES_LOCALLY = Condition(
    f"the engine is not {_SERVERS}, and external_server_urls and external_proxy_url are not given",
    lambda run: starts_engines(run) or not run.generator.inference_engine.run_engines_locally,
)
_READS_URLS = Condition(
    f"the engines are already running (run_engines_locally = false, external_proxy_url, or the engine is {_SERVERS}), "
    "and external_server_urls does not name them",
    lambda run: reads_remote_urls(run.generator.inference_engine),
)
_SENDS_ADAPTERS = Condition(
    "adapters travel alone and as files (lora.rank is above 0, and engines are vLLM's, apart from the learner)",
    sends_adapter_files,
)
_STARTS_OR_JOINS = Condition(
    "if it is already running, it gets weights by nccl or gloo", lambda run: starts_engines(run) or joins_servers(run)
)


@condition("it takes several GPUs")
def _splits_engines(run: SkyRLTrainConfig) -> bool:
    engine = run.generator.inference_engine
    return engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size > 1


@condition("the device is cuda, without kv_cache_memory_bytes in engine_init_kwargs")
def _shares_gpu_memory(run: SkyRLTrainConfig) -> bool:
    extra = run.generator.inference_engine.engine_init_kwargs
    return run.trainer.device == "cuda" and extra.get("kv_cache_memory_bytes") is None


@condition("if it is torch, generator.inference_engine.deterministic is off and trainer.attention is not eager")
def _keeps_prefixes(run: SkyRLTrainConfig) -> bool:
    engine = run.generator.inference_engine
    return not (backend_of(engine).is_embedded and (engine.deterministic or run.trainer.attention == "eager"))


_FURTHER_CONDITIONS = {
    "enable_prefix_caching": _keeps_prefixes,
    **{f"{kind}_parallel_size": _STARTS_OR_JOINS for kind in ("tensor", "pipeline", "data")},
    "fully_sharded_loras": Condition("an adapter is trained (lora.rank is above 0)", sends_adapters_alone),
    "distributed_executor_backend": _splits_engines,
    "gpu_memory_utilization": _shares_gpu_memory,
}
"""Further conditions of fields that some engines read."""


def _engine_fields() -> Iterator[Effect]:
    for field in dict.fromkeys(name for backend in BACKENDS.values() for name in backend.fields):
        yield Effect(f"generator.inference_engine.{field}", _engine_reads(field, _FURTHER_CONDITIONS.get(field)))


def _engine_reads(field: str, also: Condition | None) -> Condition:
    readers = backends_that(lambda backend: field in backend.fields, join="or")
    if any(field in backend.fields and field not in external_backend(backend).fields for backend in BACKENDS.values()):
        readers += ", started by the run"

    def holds(run: SkyRLTrainConfig) -> bool:
        reads = field in backend_of(run.generator.inference_engine).fields
        return reads and (also is None or also.holds(run))

    return Condition(f"the engine is {readers}" + (f", and {also.words}" if also else ""), holds)


_ENGINE_EFFECTS: tuple[Effect, ...] = (
    Effect("generator.inference_engine", _SAMPLES),
    Effect("generator.inference_engine.weight_sync_backend", _sends_weights),
    Effect("generator.inference_engine.weight_sync_path", _sends_files),
    Effect("generator.inference_engine.weight_transfer_threshold_cuda_ipc_GB", _sends_by_ipc),
    *effects(_CHANGES_ENGINES, *fields_in("generator.inference_engine", "min_engines max_engines")),
    Effect("generator.inference_engine.max_engine_restarts", _RESTARTS),
    Effect("generator.inference_engine.engine_restart_backoff_seconds", _WAITS_TO_RESTART),
    *effects(_SERVES, *fields_in("generator.inference_engine", "http_endpoint_host http_endpoint_port")),
    Effect("generator.inference_engine.served_model_name", _SERVES | _ENGINES_RUN_ALREADY),
    Effect("generator.inference_engine.run_engines_locally", _READS_RUN_ENGINES_LOCALLY),
    Effect("generator.inference_engine.remote_urls", _READS_URLS),
    Effect("generator.inference_engine.external_token", _READS_TOKEN),
    Effect("generator.inference_engine.override_existing_update_group", _leaves_groups),
    Effect("trainer.policy.model.lora.lora_sync_path", _SENDS_ADAPTERS),
    *_engine_fields(),
)

# Sampling.


def _stops(sampling: SamplingParams | None) -> bool:
    """Whether something other than an end-of-sequence token can end a turn before the length limit."""
    more = sampling.additional_kwargs or {} if sampling else {}
    return bool(sampling and (sampling.stop or sampling.stop_token_ids or more.get("stop_token_ids")))


def _turns_are_stopped(run: SkyRLTrainConfig) -> bool:
    evaluation = run.generator.eval_sampling_params if evaluates(run.trainer) else None
    return _stops(run.generator.sampling_params) or _stops(evaluation)


@condition("the policy samples, and environment.env_class takes more than one turn")
def _may_have_turns(run: SkyRLTrainConfig) -> bool:
    single = built_in_name(run.environment.task or "") in environments_where(lambda facts: facts.single_turn)
    return draws_rollouts(run) and (not single or _turns_are_stopped(run))  # the mode decides how such a turn is closed


_HAS_TURNS = Condition(
    "there are several turns (generator.max_turns is above 1, and environment.env_class takes more than one)",
    lambda run: run.generator.max_turns > 1 and _may_have_turns.holds(run),
)


@condition(
    "there are several turns, messages of their own that continue each other's tokens, and a stop text or stop token "
    "can end one"
)
def _closes_turns(run: SkyRLTrainConfig) -> bool:
    generator = run.generator
    retokenized = generator.step_wise_trajectories or generator.chat_template.name_or_path is not None
    return (
        _HAS_TURNS.holds(run) and generator.use_conversation_multi_turn and not retokenized and _turns_are_stopped(run)
    )


@condition(
    "the policy samples (trainer.rollouts_from is none), or loss_reduction is seq_mean_token_sum_norm, or "
    "reward_shaping.overlong.buffer_len is given"
)
def _counts_the_longest_answer(run: SkyRLTrainConfig) -> bool:
    """Whether samples, a loss or a reward depend on the maximum length. A recording already has its answers."""
    algorithm = run.trainer.algorithm
    by_length = algorithm.loss_reduction == "seq_mean_token_sum_norm"
    return draws_rollouts(run) or by_length or algorithm.reward_shaping.overlong.buffer_len is not None


def _limits_answers(table: str) -> Condition:
    def limits(run: SkyRLTrainConfig) -> bool:
        sampling, longest = getattr(run.generator, table), run.generator.max_input_length
        if sampling is None or sampling.max_tokens is None or longest is None:
            return True
        return draws_rollouts(run) and sampling.max_tokens < longest + sampling.max_generate_length

    words = f"it is below the longest input with its answer (generator.max_input_length + {table}.max_generate_length)"
    return Condition(words, limits)


@condition("evaluation draws (temperature is above 0, and greedy is off)")
def _evaluation_draws(run: SkyRLTrainConfig) -> bool:
    sampling = run.generator.eval_sampling_params
    return sampling is not None and sampling.temperature > 0 and not sampling.greedy


_EVALUATION_IS_NOT_GREEDY = Condition(
    "evaluation is not greedy (generator.eval_sampling_params.greedy is false)",
    lambda run: run.generator.eval_sampling_params is None or not run.generator.eval_sampling_params.greedy,
)


@condition("the temperature of evaluation is above 0 (0 is greedy)")
def _evaluation_greedy_flag_matters(run: SkyRLTrainConfig) -> bool:
    sampling = run.generator.eval_sampling_params
    return sampling is not None and (sampling.temperature > 0 or not sampling.greedy)


_NAMES_A_TEMPLATE = is_given("generator.chat_template.name_or_path", "generator.chat_template.name_or_path")

_GENERATOR_EFFECTS: tuple[Effect, ...] = (
    *effects(
        _SAMPLES,
        *fields_in("generator", "max_trajectories_in_flight batched zero_reward_on_non_stop"),
        *fields_in("generator", "apply_overlong_filtering chat_template chat_template_kwargs"),
        *fields_in("generator.sampling_params", "min_new_tokens top_p min_p top_k repetition_penalty"),
        *fields_in("generator.sampling_params", "frequency_penalty stop stop_token_ids additional_kwargs"),
    ),
    Effect("generator.sampling_params.max_generate_length", _counts_the_longest_answer),
    *(
        Effect(f"generator.{table}.max_tokens", _limits_answers(table))
        for table in ("sampling_params", "eval_sampling_params")
    ),
    *effects(EVALUATES, *fields_in("generator", "eval_sampling_params eval_n_samples_per_prompt")),
    *effects(_evaluation_draws, *fields_in("generator.eval_sampling_params", "top_p min_p top_k")),
    Effect("generator.eval_sampling_params.temperature", _EVALUATION_IS_NOT_GREEDY),
    Effect("generator.eval_sampling_params.greedy", _evaluation_greedy_flag_matters),
    Effect("generator.max_turns", _may_have_turns),
    *effects(
        _HAS_TURNS, *fields_in("generator", "use_conversation_multi_turn step_wise_trajectories merge_stepwise_output")
    ),
    Effect("generator.append_eos_token_after_stop_str_in_multi_turn", _closes_turns),
    Effect("generator.chat_template.source", _NAMES_A_TEMPLATE),
)

# Environments.


def _environment_is(suits: Callable[[EnvironmentFacts], bool], words: str = "") -> Condition:
    """The environment is one that suits, or each row names its own."""
    names = environments_where(suits)
    sentence = f"environment.env_class is {' or '.join(names)}{words}"
    return Condition(
        sentence,
        lambda run: not run.environment.judges or bool({*names} & {*map(built_in_name, run.environment.judges)}),
    )


def _environment_reads(table: str) -> Condition:
    return _environment_is(lambda facts: facts.table == table)


_IS_USERS = Condition(
    "environment.env_class is an import path", lambda run: any(map(is_import_path, run.environment.judges))
)
_HAS_SEVERAL_REWARDS = Condition(
    "environment.env_class is a list", lambda run: isinstance(run.environment.env_class, tuple)
)
_IS_ISOLATED = Condition(
    "environment.env_class is an import path and isolate_user_env is true",
    lambda run: _IS_USERS.holds(run) and run.environment.skyrl_gym.isolate_user_env,
)


@condition(
    "something runs in a sandbox: environment.env_class is "
    f"{', '.join(environments_where(lambda facts: facts.sandboxed))} or each row's own, or math_equivalence, "
    "isolate_user_env or environment.agent.isolate acts"
)
def _uses_sandbox(run: SkyRLTrainConfig) -> bool:
    gym, names = run.environment.skyrl_gym, run.environment.judges
    known = [built_in_name(name) for name in names if name != MCP or gym.mcp.runs_programs]
    facts = [ENVIRONMENTS.get(name, EnvironmentFacts()) for name in known]
    return (
        not names
        or any(fact.sandboxed or (gym.math_equivalence and fact.supports_math_equivalence) for fact in facts)
        or _IS_ISOLATED.holds(run)
        or (run.environment.agent.plays and run.environment.agent.isolate)
    )


@condition(
    "environment.env_class asks a service (reward_model.url, code_url, a judge, a retriever), or is each row's own"
)
def _asks_a_service(run: SkyRLTrainConfig) -> bool:
    names = run.environment.judges
    services = [ENVIRONMENTS.get(name, EnvironmentFacts()).service for name in names]
    return not names or any(
        service == "always" or bool(service and get_at(run.environment.skyrl_gym, service)) for service in services
    )


@condition("a prompt has several samples (generator.n_samples_per_prompt)")
def _has_groups_of_several(run: SkyRLTrainConfig) -> bool:
    generator = run.generator
    return generator.n_samples_per_prompt > 1 or (evaluates(run.trainer) and generator.eval_n_samples_per_prompt > 1)


_AGENT = Condition(
    "an agent plays the episodes (environment.agent.command or environment.agent.function)",
    lambda run: run.environment.agent.plays,
)
_FUNCTION_AGENT = Condition(
    "a function is the agent (environment.agent.function)", lambda run: run.environment.agent.function is not None
)
_ISOLATED_AGENT = Condition("environment.agent.isolate is true", lambda run: run.environment.agent.isolate)
_RETRIES = Condition(
    "a sample may be drawn again (max_attempts is above 1)", lambda run: run.environment.skyrl_gym.max_attempts > 1
)
_REWARD_SERVICE = is_given("environment.skyrl_gym.reward_model.url", "environment.skyrl_gym.reward_model.url")

_ENVIRONMENT_EFFECTS: tuple[Effect, ...] = (
    Effect("environment", _SAMPLES),
    *effects(
        _AGENT,
        *fields_in("environment.agent", "reward max_requests max_concurrent max_starts_per_second"),
        *fields_in("environment.agent", "timeout_seconds isolate"),
    ),
    Effect("environment.agent.kwargs", _FUNCTION_AGENT),
    Effect("environment.reward_weights", _HAS_SEVERAL_REWARDS),
    *effects(_ISOLATED_AGENT, *fields_in("environment.agent", "readable memory_gb")),
    *(
        Effect(f"environment.skyrl_gym.{table}", _environment_reads(table))
        for table in sorted({facts.table for facts in ENVIRONMENTS.values() if facts.table})
    ),
    Effect("environment.skyrl_gym.reward_model.timeout", _REWARD_SERVICE),
    Effect("environment.skyrl_gym.code_url", _environment_is(lambda facts: facts.service == "code_url")),
    Effect("environment.skyrl_gym.service_patience_seconds", _asks_a_service),
    Effect("environment.skyrl_gym.isolate_user_env", _IS_USERS),
    Effect("environment.skyrl_gym.user_env_memory_gb", _IS_ISOLATED),
    Effect(
        "environment.skyrl_gym.math_equivalence",
        _environment_is(lambda facts: facts.supports_math_equivalence, ", or each row's own"),
    ),
    Effect("environment.skyrl_gym.sandbox_tier", _uses_sandbox),
    Effect("environment.skyrl_gym.retried_failures", _RETRIES),
    Effect("environment.skyrl_gym.failed_samples", _has_groups_of_several),
)

# Data.

_HAS_SOURCES = Condition("data.train_data has several sources", lambda run: len(run.data.train_data) > 1)
_HAS_EPOCHS = Condition(
    "there are several epochs (trainer.epochs)", lambda run: run.trainer.epochs > 1 or run.data.epoch_tail == "short"
)
_LOADS = Condition("prompts are loaded (data.streaming = false)", lambda run: not run.data.streaming)
_SHUFFLES_A_STREAM = Condition(
    "prompts are streamed and shuffled (data.streaming, data.shuffle)",
    lambda run: run.data.streaming and run.data.shuffle,
)


def _draws_by(name: str) -> Condition:
    return draws_by(name).below("data")


_DATA_EFFECTS: tuple[Effect, ...] = (
    Effect("data", _SAMPLES),
    Effect("data.val_data", EVALUATES),
    Effect("data.shuffle", _draws_by("permutation")),
    Effect("data.train_weights", _HAS_SOURCES & _draws_by("permutation")),
    Effect("data.epoch_tail", _LOADS & _HAS_EPOCHS),
    Effect("data.shuffle_buffer_size", _SHUFFLES_A_STREAM),
    Effect("trainer.epochs", _LOADS),
    *(item.below("data") for item in SAMPLER_EFFECTS),
    *effects(_draws_by("pools"), *fields_in("data.curriculum", "pools pool_memory unseen_weight")),
    Effect("data.curriculum.target", _draws_by("target_difficulty")),
    Effect("data.curriculum.solved_reward", is_given("data.curriculum.skip_solved", "data.curriculum.skip_solved")),
)

ROLLOUT_EFFECTS: tuple[Effect, ...] = (*_ENGINE_EFFECTS, *_GENERATOR_EFFECTS, *_ENVIRONMENT_EFFECTS, *_DATA_EFFECTS)
