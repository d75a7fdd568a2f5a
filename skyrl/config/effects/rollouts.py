"""Conditions under which the fields of `generator`, `environment` and `data` have an effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from skyrl.config.derive.engine_backends import BACKENDS, backend_of, backends_that, kind_of_engine, reads_remote_urls
from skyrl.config.derive.sizes import (
    evaluates,
    joins_servers,
    may_change_engines,
    may_restart_engines,
    on_ray,
    samples,
    sends_adapter_files,
    sends_adapters_alone,
    starts_engines,
)
from skyrl.config.foundation.import_paths import is_import_path
from skyrl.config.settings.environment import (
    COMPARED_ENVIRONMENTS,
    PROGRAM_ENVIRONMENTS,
    SANDBOXED_ENVIRONMENTS,
    SINGLE_TURN_ENVIRONMENTS,
)
from skyrl.config.settings.generator import SamplingParams
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.tree.rules import Effect

Condition = Callable[[SkyRLTrainConfig], bool]

_SAMPLES = "the policy samples (trainer.rollouts_from is none)"
_TURNS = "there are several turns (generator.max_turns is above 1, and environment.env_class takes more than one)"


def _env_is(*names: str) -> Condition:
    """The environment is one of `names`, or each row names its own."""
    return lambda run: run.environment.env_class in (*names, None)


def _env_is_users(run: SkyRLTrainConfig) -> bool:
    return run.environment.env_class is not None and is_import_path(run.environment.env_class)


def _uses_sandbox(run: SkyRLTrainConfig) -> bool:
    gym = run.environment.skyrl_gym
    return (
        run.environment.env_class in (*SANDBOXED_ENVIRONMENTS, None)
        or (gym.math_equivalence and run.environment.env_class in COMPARED_ENVIRONMENTS)
        or (gym.isolate_user_env and _env_is_users(run))
        or (run.environment.agent.plays and run.environment.agent.isolate)
    )


def _asks_a_service(run: SkyRLTrainConfig) -> bool:
    gym, name = run.environment.skyrl_gym, run.environment.env_class
    scores, programs = name == "reward_model" and gym.reward_model.url, name in PROGRAM_ENVIRONMENTS and gym.code_url
    return bool(name in ("llm_as_a_judge", "search", "searchcode", None) or scores or programs)


def _has_groups_of_several(run: SkyRLTrainConfig) -> bool:
    generator = run.generator
    return generator.n_samples_per_prompt > 1 or (evaluates(run) and generator.eval_n_samples_per_prompt > 1)


def _stops(sampling: SamplingParams | None) -> bool:
    """Whether something other than an end-of-sequence token can end a turn before the length limit."""
    more = sampling.additional_kwargs or {} if sampling else {}
    return bool(sampling and (sampling.stop or sampling.stop_token_ids or more.get("stop_token_ids")))


def _turns_are_stopped(run: SkyRLTrainConfig) -> bool:
    evaluation = run.generator.eval_sampling_params if evaluates(run) else None
    return _stops(run.generator.sampling_params) or _stops(evaluation)


def _has_turns(run: SkyRLTrainConfig) -> bool:
    """Whether the conversation mode matters: it also decides how a turn that was stopped is closed."""
    return run.generator.max_turns > 1 and _may_have_turns(run)


def _may_have_turns(run: SkyRLTrainConfig) -> bool:
    single = run.environment.env_class in SINGLE_TURN_ENVIRONMENTS
    return samples(run) and (not single or _turns_are_stopped(run))


def _closes_turns(run: SkyRLTrainConfig) -> bool:
    generator = run.generator
    retokenized = generator.step_wise_trajectories or generator.chat_template.name_or_path is not None
    return _has_turns(run) and generator.use_conversation_multi_turn and not retokenized and _turns_are_stopped(run)


def _counts_the_longest_answer(run: SkyRLTrainConfig) -> bool:
    """Whether samples, a loss or a reward depend on the maximum length. A recording already has its answers."""
    algorithm = run.trainer.algorithm
    by_length = algorithm.loss_reduction == "seq_mean_token_sum_norm"
    return samples(run) or by_length or algorithm.reward_shaping.overlong.buffer_len is not None


def _limits_answers(table: str) -> Condition:
    def limits(run: SkyRLTrainConfig) -> bool:
        sampling, longest = getattr(run.generator, table), run.generator.max_input_length
        if sampling is None or sampling.max_tokens is None or longest is None:
            return True
        return samples(run) and sampling.max_tokens < longest + sampling.max_generate_length

    return limits


def _evaluation_draws(run: SkyRLTrainConfig) -> bool:
    sampling = run.generator.eval_sampling_params
    return sampling is not None and sampling.temperature > 0 and not sampling.greedy


def _evaluation_is_told_greedy(run: SkyRLTrainConfig) -> bool:
    sampling = run.generator.eval_sampling_params
    return sampling is not None and (sampling.temperature > 0 or not sampling.greedy)


def _sends_files_anyway(run: SkyRLTrainConfig) -> bool:
    return sends_adapters_alone(run) and backend_of(run.generator.inference_engine).adapters == "files"


def _hands_over_by_ipc(run: SkyRLTrainConfig) -> bool:
    by_nccl = run.generator.inference_engine.weight_sync_backend == "nccl"
    return on_ray(run) and by_nccl and run.trainer.placement.colocate_all


def _leaves_groups(run: SkyRLTrainConfig) -> bool:
    engine = run.generator.inference_engine
    return kind_of_engine(engine) == "http" and engine.weight_sync_backend != "none"


def _splits_engines(run: SkyRLTrainConfig) -> bool:
    engine = run.generator.inference_engine
    return engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size > 1


def _shares_gpu_memory(run: SkyRLTrainConfig) -> bool:
    extra = run.generator.inference_engine.engine_init_kwargs
    return run.trainer.device == "cuda" and extra.get("kv_cache_memory_bytes") is None


def _starts_or_joins(run: SkyRLTrainConfig) -> bool:
    return starts_engines(run) or joins_servers(run)


_ALSO: dict[str, tuple[str, Condition]] = {
    **{
        f"{kind}_parallel_size": ("where it runs already, it gets weights by nccl or gloo", _starts_or_joins)
        for kind in ("tensor", "pipeline", "data")
    },
    "fully_sharded_loras": ("an adapter is trained (lora.rank is above 0)", sends_adapters_alone),
    "distributed_executor_backend": ("it takes several GPUs", _splits_engines),
    "gpu_memory_utilization": (
        "the device is cuda, without kv_cache_memory_bytes in engine_init_kwargs",
        _shares_gpu_memory,
    ),
}
"""Further conditions of fields that some engines read."""


def _engine_fields() -> Iterator[Effect]:
    for field in dict.fromkeys(name for backend in BACKENDS.values() for name in backend.fields):
        when, further = _ALSO.get(field, ("", None))
        readers = backends_that(lambda backend, field=field: field in backend.fields, join="or")  # type: ignore[misc]  # bound by its default
        yield Effect(
            f"generator.inference_engine.{field}",
            f"the engine is {readers}" + (f", and {when}" if when else ""),
            lambda run, field=field, further=further: (  # type: ignore[misc]  # bound by its default
                field in backend_of(run.generator.inference_engine).fields and (further is None or further(run))
            ),
        )


_ENGINE_EFFECTS: tuple[Effect, ...] = (
    Effect("generator.inference_engine", _SAMPLES, samples),
    Effect(
        "generator.inference_engine.weight_sync_backend",
        "weights travel to other processes (the run is on Ray, or the engines run already; not adapters to vLLM)",
        lambda run: (on_ray(run) or not starts_engines(run)) and not _sends_files_anyway(run),
    ),
    Effect(
        "generator.inference_engine.weight_sync_path",
        "weights travel as files (weight_sync_backend is disk or delta, and they travel to other processes)",
        lambda run: (
            (on_ray(run) or not starts_engines(run))
            and run.generator.inference_engine.weight_sync_backend in ("disk", "delta")
            and not sends_adapters_alone(run)
        ),
    ),
    Effect(
        "generator.inference_engine.weight_transfer_threshold_cuda_ipc_GB",
        "weights travel through CUDA IPC (weight_sync_backend is nccl, and engines share the learner's GPUs)",
        _hands_over_by_ipc,
    ),
    *(
        Effect(
            f"generator.inference_engine.{name}",
            "the run is on Ray and starts engines that share no GPUs (trainer.placement.colocate_all is false)",
            may_change_engines,
        )
        for name in ("min_engines", "max_engines")
    ),
    Effect(
        "generator.inference_engine.max_engine_restarts",
        "the engines are servers that run already, or start on Ray, on GPUs of their own or on a CPU",
        may_restart_engines,
    ),
    Effect(
        "generator.inference_engine.engine_restart_backoff_seconds",
        "the engines are servers that run already, or start on Ray, on GPUs of their own or on a CPU, and "
        "max_engine_restarts is above 0",
        lambda run: may_restart_engines(run) and run.generator.inference_engine.max_engine_restarts > 0,
    ),
    *(
        Effect(
            f"generator.inference_engine.{name}",
            "the policy is served over HTTP (generator.inference_engine.enable_http_endpoint)",
            lambda run: run.generator.inference_engine.enable_http_endpoint,
        )
        for name in ("http_endpoint_host", "http_endpoint_port")
    ),
    Effect(
        "generator.inference_engine.served_model_name",
        "the policy is served over HTTP (generator.inference_engine.enable_http_endpoint), or the engines run already",
        lambda run: run.generator.inference_engine.enable_http_endpoint or not starts_engines(run),
    ),
    Effect(
        "generator.inference_engine.run_engines_locally",
        "the engine is not http, and external_server_urls and external_proxy_url are not given",
        lambda run: starts_engines(run) or not run.generator.inference_engine.run_engines_locally,
    ),
    Effect(
        "generator.inference_engine.remote_urls",
        "the engines run already (run_engines_locally = false, external_proxy_url, or the engine is http), and "
        "external_server_urls does not name them",
        lambda run: reads_remote_urls(run.generator.inference_engine),
    ),
    Effect(
        "generator.inference_engine.external_token",
        "the engines run already (external_server_urls names them)",
        lambda run: not starts_engines(run),
    ),
    Effect(
        "generator.inference_engine.override_existing_update_group",
        "the engines are vLLM servers that run already, and get weights (weight_sync_backend is not none)",
        _leaves_groups,
    ),
    Effect(
        "trainer.policy.model.lora.lora_sync_path",
        "adapters travel alone and as files (lora.rank is above 0, and engines are vLLM's, apart from the learner)",
        sends_adapter_files,
    ),
    *_engine_fields(),
)

_GENERATOR_EFFECTS: tuple[Effect, ...] = (
    *(
        Effect(f"generator.{name}", _SAMPLES, samples)
        for name in (
            *("max_trajectories_in_flight", "batched", "zero_reward_on_non_stop", "apply_overlong_filtering"),
            *("chat_template", "chat_template_kwargs"),
        )
    ),
    *(
        Effect(f"generator.sampling_params.{name}", _SAMPLES, samples)
        for name in (
            *("min_new_tokens", "top_p", "min_p", "top_k", "repetition_penalty", "frequency_penalty"),
            *("stop", "stop_token_ids", "additional_kwargs"),
        )
    ),
    Effect(
        "generator.sampling_params.max_generate_length",
        "the policy samples (trainer.rollouts_from is none), or loss_reduction is seq_mean_token_sum_norm, or "
        "reward_shaping.overlong.buffer_len is given",
        _counts_the_longest_answer,
    ),
    *(
        Effect(
            f"generator.{table}.max_tokens",
            f"it is below the longest input with its answer (generator.max_input_length + {table}.max_generate_length)",
            _limits_answers(table),
        )
        for table in ("sampling_params", "eval_sampling_params")
    ),
    Effect("generator.eval_sampling_params", "evaluation is on", evaluates),
    Effect("generator.eval_n_samples_per_prompt", "evaluation is on", evaluates),
    *(
        Effect(
            f"generator.eval_sampling_params.{name}",
            "evaluation draws (temperature is above 0, and greedy is off)",
            _evaluation_draws,
        )
        for name in ("top_p", "min_p", "top_k")
    ),
    Effect(
        "generator.eval_sampling_params.temperature",
        "evaluation is not greedy (generator.eval_sampling_params.greedy is false)",
        lambda run: run.generator.eval_sampling_params is None or not run.generator.eval_sampling_params.greedy,
    ),
    Effect(
        "generator.eval_sampling_params.greedy",
        "the temperature of evaluation is above 0 (0 is greedy)",
        _evaluation_is_told_greedy,
    ),
    Effect(
        "generator.max_turns",
        "the policy samples, and environment.env_class takes more than one turn",
        _may_have_turns,
    ),
    *(
        Effect(f"generator.{name}", _TURNS, _has_turns)
        for name in ("use_conversation_multi_turn", "step_wise_trajectories", "merge_stepwise_output")
    ),
    Effect(
        "generator.append_eos_token_after_stop_str_in_multi_turn",
        "there are several turns, messages of their own that continue each other's tokens, and a stop text or stop "
        "token can end one",
        _closes_turns,
    ),
    Effect(
        "generator.chat_template.source",
        "generator.chat_template.name_or_path is given",
        lambda run: run.generator.chat_template.name_or_path is not None,
    ),
)

_GYM = "environment.skyrl_gym."

_ENVIRONMENT_EFFECTS: tuple[Effect, ...] = (
    Effect("environment", _SAMPLES, samples),
    *(
        Effect(
            f"environment.agent.{name}",
            "an agent plays the episodes (environment.agent.command or environment.agent.function)",
            lambda run: run.environment.agent.plays,
        )
        for name in ("reward", "max_requests", "max_concurrent", "max_starts_per_second", "timeout_seconds", "isolate")
    ),
    Effect(
        "environment.agent.kwargs",
        "a function is the agent (environment.agent.function)",
        lambda run: run.environment.agent.function is not None,
    ),
    *(
        Effect(
            f"environment.agent.{name}",
            "environment.agent.isolate is true",
            lambda run: run.environment.agent.isolate,
        )
        for name in ("readable", "memory_gb")
    ),
    *(
        Effect(f"{_GYM}{name}", f"environment.env_class is {name}", _env_is(name))
        for name in ("text2sql", "reward_model", "llm_as_a_judge")
    ),
    Effect(f"{_GYM}search", "environment.env_class is search or searchcode", _env_is("search", "searchcode")),
    Effect(
        f"{_GYM}reward_model.timeout",
        "environment.skyrl_gym.reward_model.url is given",
        lambda run: run.environment.skyrl_gym.reward_model.url is not None,
    ),
    Effect(f"{_GYM}code_url", "environment.env_class is code or lcb", _env_is(*PROGRAM_ENVIRONMENTS)),
    Effect(
        f"{_GYM}service_patience_seconds",
        "environment.env_class asks a service (reward_model.url, code_url, a judge, a retriever), or is each row's own",
        _asks_a_service,
    ),
    Effect(f"{_GYM}isolate_user_env", "environment.env_class is an import path", _env_is_users),
    Effect(
        f"{_GYM}user_env_memory_gb",
        "environment.env_class is an import path and isolate_user_env is true",
        lambda run: _env_is_users(run) and run.environment.skyrl_gym.isolate_user_env,
    ),
    Effect(
        f"{_GYM}math_equivalence",
        f"environment.env_class is {' or '.join(COMPARED_ENVIRONMENTS)}, or each row's own",
        _env_is(*COMPARED_ENVIRONMENTS),
    ),
    Effect(
        f"{_GYM}sandbox_tier",
        f"something runs in a sandbox: environment.env_class is {', '.join(SANDBOXED_ENVIRONMENTS)} or each row's own, "
        "or math_equivalence, isolate_user_env or environment.agent.isolate acts",
        _uses_sandbox,
    ),
    Effect(
        f"{_GYM}retried_failures",
        "a sample may be drawn again (max_attempts is above 1)",
        lambda run: run.environment.skyrl_gym.max_attempts > 1,
    ),
    Effect(
        f"{_GYM}failed_samples",
        "a prompt has several samples (generator.n_samples_per_prompt)",
        _has_groups_of_several,
    ),
)

_DATA_EFFECTS: tuple[Effect, ...] = (
    Effect("data", _SAMPLES, samples),
    Effect("data.val_data", "evaluation is on", evaluates),
    Effect("data.train_weights", "data.train_data has several sources", lambda run: len(run.data.train_data) > 1),
    Effect(
        "data.epoch_tail",
        "there are several epochs (trainer.epochs)",
        lambda run: run.trainer.epochs > 1 or run.data.epoch_tail == "short",
    ),
)

ROLLOUT_EFFECTS: tuple[Effect, ...] = (*_ENGINE_EFFECTS, *_GENERATOR_EFFECTS, *_ENVIRONMENT_EFFECTS, *_DATA_EFFECTS)
