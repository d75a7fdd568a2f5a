"""Converts SkyRL's programs for Harbor tasks (`main_harbor`): an agent's episodes with the settings of Harbor's trials.

Their own settings are `harbor_trial_config`, which Harbor reads, and `generator.rate_limit`. Settings that a script
omits are written with the values of the programs' `default.yaml`. Dialogues are recorded token by token here, so that
nothing has to be collected or tokenized again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from skyrl.interop.translation import Translation, Values, redundant, refused

TABLE = "harbor_trial_config."

_AGENT = "environment.agent."
_KWARGS = _AGENT + "kwargs."
_LIMITS = "generator.rate_limit."
_LONGEST = 32768
"""Length of a dialogue in tokens that the programs' `default.yaml` and scripts assume."""

_DAY = 86400.0
"""Limit in seconds that is never reached, since a trial ends earlier by itself."""

_OFTEN_READ = {
    "trials_dir": "~/trials",
    "timeout_multiplier": 1.0,
    "agent.name": "terminus-2",
    "agent.kwargs.max_turns": 32,
    "agent.kwargs.suppress_max_turns_warning": True,
    "agent.kwargs.enable_summarize": False,
    "agent.kwargs.model_info.max_input_tokens": _LONGEST,
    "agent.kwargs.model_info.max_output_tokens": _LONGEST,
    "agent.kwargs.model_info.input_cost_per_token": 0.0,
    "agent.kwargs.model_info.output_cost_per_token": 0.0,
    "agent.kwargs.llm_kwargs.timeout": 900,
    "agent.kwargs.llm_kwargs.max_retries": 0,
    "environment.type": "daytona",
    "environment.override_cpus": 1,
    "environment.override_memory_mb": 1024,
    "environment.override_storage_mb": 1024,
    "environment.suppress_override_warnings": True,
    "verifier.disable": False,
}
"""Settings of the programs' `default.yaml`, without sampling parameters, which are the run's."""

LATER = {"agent.override_timeout_sec": 1200, "environment.kwargs.auto_stop_interval_mins": 30}
"""Additional settings of the `default.yaml` in `examples/train_integrations`."""

_COLLECTED = ("agent.kwargs.store_all_messages", "agent.kwargs.collect_rollout_details")
_RECORDED = "the policy's tokens are recorded as they are sampled"
_ROWS = "an agent's call continues a row if its tokens do, and starts a new row otherwise"


def implied(values: Values, more: Mapping[str, object] | None = None) -> dict[str, object]:
    """Paths and values that the programs set themselves. `more` is added to their `default.yaml`."""
    longest = _longest(values)
    return {
        _AGENT + "function": "skyrl.rollout.harbor:play",
        _AGENT + "reward": "returned",
        _AGENT + "timeout_seconds": _DAY,
        "environment.skyrl_gym.max_attempts": 2,
        "environment.skyrl_gym.max_failed_share": 1.0,
        "trainer.max_prompt_length": longest - 1,
        "generator.max_input_length": longest,
        "generator.sampling_params.max_generate_length": longest,
        "generator.sampling_params.max_tokens": longest,
        "generator.eval_sampling_params.max_tokens": longest,
        "generator.eval_sampling_params.temperature": values.get(TABLE + "agent.kwargs.temperature", 1.0),
        **{_KWARGS + name: value for name, value in (_OFTEN_READ | dict(more or {})).items()},
    }


def of_a_trial(name: str, value: object, values: Values) -> Translation:
    """Outcome of a setting of Harbor's `TrialConfig`."""
    if name in _COLLECTED:
        return redundant(_RECORDED)
    if name == "agent.kwargs.temperature":
        return Translation(writes={"generator.sampling_params.temperature": value})
    return Translation(writes={_KWARGS + name: value})


def configuration(value: object, values: Values) -> Translation:
    """Outcome of a setting that names a file with settings of trials."""
    if value == "default":
        return redundant("the settings of the program's default.yaml are included")
    return refused(f"the settings are in another file, {value}.yaml: set them one by one")


def limit(path: str) -> Callable[[object, Values], Translation]:
    """Outcome of a limit, which has an effect only if limits are enabled."""

    def become(value: object, values: Values) -> Translation:
        if values.get(_LIMITS + "enabled") is not True:
            return redundant("generator.rate_limit.enabled is off")
        return Translation(writes={path: value}) if value is not None else redundant("not set: there is no limit")

    return become


def template(value: object, values: Values) -> Translation:
    """Outcome of a setting that names the Jinja chat template of dialogues."""
    path = "generator.chat_template."
    return Translation(writes={path + "source": "file", path + "name_or_path": value})


SETTINGS = {
    "harbor_trial_config": configuration,
    _LIMITS + "enabled": lambda value, values: redundant("each limit has its own setting"),
    _LIMITS + "trajectories_per_second": limit(_AGENT + "max_starts_per_second"),
    _LIMITS + "max_concurrency": limit(_AGENT + "max_concurrent"),
    "generator.step_wise_trajectories": lambda value, values: redundant(_ROWS),
    "generator.merge_stepwise_output": lambda value, values: redundant(_ROWS),
    "hydra.searchpath": lambda value, values: redundant("only tells Hydra where to find the program's default.yaml"),
    **dict.fromkeys(
        (
            "generator.engine_init_kwargs.chat_template",
            "generator.inference_engine.engine_init_kwargs.chat_template",
        ),
        template,
    ),
}
"""Settings that only these programs read, or that they read differently."""


def _longest(values: Values) -> int:
    """Number of tokens of the longest dialogue."""
    names = ("trainer.algorithm.max_seq_len", *(f"{table}.engine_init_kwargs.max_model_len" for table in _ENGINES))
    lengths = (values.get(name) for name in names)
    return next((length for length in lengths if isinstance(length, int) and not isinstance(length, bool)), _LONGEST)


_ENGINES = ("generator.inference_engine", "generator")
