"""The programs of SkyRL: what their runs are, and which settings their Python code stands for.

`KNOWN` says of each program whether its runs are converted. `PROGRAMS` has the programs whose code becomes settings:
asynchronous trainers, the penalty of DAPO, estimators of their own. The settings here reproduce the published program.
The user's copy may have been modified, so the report states this assumption.

The programs for Harbor tasks (`main_harbor`) run an agent's episodes with the settings of Harbor's trials, which are
`harbor_trial_config`, and `generator.rate_limit`. Trial settings that a script omits are written with the values of the
programs' `default.yaml`. Dialogues are recorded token by token here, so that nothing has to be collected or tokenized
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from attrs import field, frozen

from skyrl.interop.launches import RUNS, ProgramFacts, aside, unconverted
from skyrl.interop.translation import Translation, Values, redundant, refused

Convert = Callable[[object, Values], Translation | None]
"""Outcome of a setting's value, given all settings of the script."""

_ALGORITHM = "trainer.algorithm."
_ESTIMATOR = _ALGORITHM + "advantage_estimator"

_TRIALS = "harbor_trial_config."
_AGENT = "environment.agent."
_KWARGS = _AGENT + "kwargs."
_LIMITS = "generator.rate_limit."
_LONGEST = 32768
"""Length of a dialogue in tokens that the programs' `default.yaml` and scripts assume."""

_ENGINES = ("generator.inference_engine", "generator")
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

_LATER = {"agent.override_timeout_sec": 1200, "environment.kwargs.auto_stop_interval_mins": 30}
"""Additional settings of the `default.yaml` in `examples/train_integrations`."""

_ROWS = "an agent's call continues a row if its tokens do, and starts a new row otherwise"


def _replaced(reason: str) -> Convert:
    return lambda value, values: redundant(reason)


def _harbor_implies(values: Values, more: Mapping[str, object]) -> dict[str, object]:
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
        "generator.eval_sampling_params.temperature": values.get(_TRIALS + "agent.kwargs.temperature", 1.0),
        **{_KWARGS + name: value for name, value in {**_OFTEN_READ, **more}.items()},
    }


def _convert_trial(name: str, value: object, values: Values) -> Translation:
    """Outcome of a setting of Harbor's `TrialConfig`."""
    if name in ("agent.kwargs.store_all_messages", "agent.kwargs.collect_rollout_details"):
        return redundant("the policy's tokens are recorded as they are sampled")
    if name == "agent.kwargs.temperature":
        return Translation(writes={"generator.sampling_params.temperature": value})
    return Translation(writes={_KWARGS + name: value})


def _configuration(value: object, values: Values) -> Translation:
    """Outcome of a setting that names a file with settings of trials."""
    if value == "default":
        return redundant("the settings of the program's default.yaml are included")
    return refused(f"the settings are in another file, {value}.yaml: set them one by one")


def _limit(path: str, value: object, values: Values) -> Translation:
    """Outcome of a limit, which has an effect only if limits are enabled."""
    if values.get(_LIMITS + "enabled") is not True:
        return redundant("generator.rate_limit.enabled is off")
    return Translation(writes={path: value}) if value is not None else redundant("not set: there is no limit")


def _template(value: object, values: Values) -> Translation:
    """Outcome of a setting that names the Jinja chat template of dialogues."""
    path = "generator.chat_template."
    return Translation(writes={path + "source": "file", path + "name_or_path": value})


_HARBOR_SETTINGS: Mapping[str, Convert] = {
    "harbor_trial_config": _configuration,
    _LIMITS + "enabled": _replaced("each limit has its own setting"),
    _LIMITS + "trajectories_per_second": partial(_limit, _AGENT + "max_starts_per_second"),
    _LIMITS + "max_concurrency": partial(_limit, _AGENT + "max_concurrent"),
    **dict.fromkeys(("generator.step_wise_trajectories", "generator.merge_stepwise_output"), _replaced(_ROWS)),
    "hydra.searchpath": _replaced("only tells Hydra where to find the program's default.yaml"),
    **{f"{table}.engine_init_kwargs.chat_template": _template for table in _ENGINES},
}
"""Settings that only these programs read, or that they read differently."""


def _longest(values: Values) -> int:
    """Number of tokens of the longest dialogue."""
    names = ("trainer.algorithm.max_seq_len", *(f"{table}.engine_init_kwargs.max_model_len" for table in _ENGINES))
    lengths = (values.get(name) for name in names)
    return next((length for length in lengths if isinstance(length, int) and not isinstance(length, bool)), _LONGEST)


@frozen(kw_only=True)
class Program:
    """A known program, with settings that have a different meaning in it, or that only it reads."""

    settings: Mapping[str, Convert]
    """Setting -> function of its outcome, which returns None if the setting means the same as in every script."""

    tables: Mapping[str, Callable[[str, object, Values], Translation]] = field(factory=dict)
    """Prefix of a table -> function of the rest of a name that returns its outcome."""

    implied: Callable[[Values], Mapping[str, object]] = lambda values: {}
    """Our paths and their values, which settings of the script override."""

    remark: str = ""
    """A sentence for the end of the report."""

    def becomes(self, key: str, value: object, values: Values) -> Translation | None:
        """The outcome of one setting; None if the program reads it as any other does."""
        if key in self.settings:
            return self.settings[key](value, values)
        table = next((name for name in self.tables if key.startswith(name)), None)
        return None if table is None else self.tables[table](key.removeprefix(table), value, values)


def settings_of(program: str) -> Program | None:
    """The known program with a dotted module name; None for any other."""
    return next((known for name, known in PROGRAMS.items() if f".{program}".endswith(f".{name}")), None)


def _distills(values: Values) -> bool:
    return values.get(_ESTIMATOR) == "no_op" and values.get(_ALGORITHM + "use_kl_in_reward") is True


def _token_rewards(value: object, values: Values) -> Translation | None:
    """Outcome of the estimator `no_op`: the advantage of each token is its own reward, a return with discount 0."""
    if value != "no_op":
        return None
    as_they_are = {_ESTIMATOR: "reinforce++", _ALGORITHM + "gamma": 0.0, _ALGORITHM + "whiten_advantages": False}
    if not _distills(values):
        return Translation(writes=as_they_are, note="each token's advantage is its reward")
    only_the_divergence = {
        _ALGORITHM + "reward_shaping.scale": 0.0,
        _ALGORITHM + "kl_loss_coef": 1.0,
        _ALGORITHM + "kl_estimator_type": "k1",
    }
    note = "each token's advantage is the teacher's log-probability (trainer.ref) minus the policy's"
    return Translation(writes=as_they_are | only_the_divergence, note=note)


def _coefficient(value: object, values: Values) -> Translation | None:
    is_fixed = _distills(values)
    return redundant("the program uses the plain difference of log-probabilities") if is_fixed else None


def _convert_loss_type(value: object, values: Values) -> Translation | None:
    """Outcome of the loss type; the program's `importance_sampling` sums tokens itself and ignores `loss_reduction`."""
    if value != "importance_sampling":
        return None
    path = _ALGORITHM + "policy_loss_type"
    return Translation(writes={path: value, _ALGORITHM + "loss_reduction": "seq_mean_token_sum_norm"})


def _less_the_batch_mean(value: object, values: Values) -> Translation | None:
    """Outcome of the estimator `simple_baseline`: a token's advantage is its answer's reward minus the batch mean."""
    if value != "simple_baseline":
        return None
    if values.get("generator.max_turns", 1) != 1 or values.get(_ALGORITHM + "use_kl_in_reward") is True:
        return refused(f"{value} gives every token the full reward, but here rewards before a token do not count")
    writes = {
        _ESTIMATOR: "reinforce++",
        _ALGORITHM + "whiten_advantages": False,
        _ALGORITHM + "reward_shaping.norm.mean_level": "batch",
    }
    return Translation(writes=writes, note="the advantage of a response is its reward minus the batch mean")


_AS_PUBLISHED = (
    "The script starts SkyRL's example program {}, whose published version was converted: if yours differs, set your "
    'own function instead (trainer.algorithm.advantage_estimator = "FILE.py:NAME").'
)

_ENABLED = "trainer.fully_async.enabled"
_ASYNC: Mapping[str, object] = {_ENABLED: True}
_ONE_STEP_OFF: Mapping[str, object] = {
    _ENABLED: True,
    "trainer.fully_async.max_staleness_steps": 1,
    "trainer.fully_async.interrupt_generation": False,
}
_PENALTY: Mapping[str, object] = {
    _ALGORITHM + "reward_shaping.overlong.buffer_len": 512,
    _ALGORITHM + "reward_shaping.overlong.penalty_factor": 1.0,
}
"""Defaults of `DAPOAlgorithmConfig` in SkyRL's examples/train/algorithms/dapo/main_dapo.py."""

_ONE_STEP = (
    "main_async trains on answers of the weights one step before, which are completed before new weights arrive: this "
    "is fully_async with max_staleness_steps = 1 and interrupt_generation = false."
)
_ONLY_SAMPLES = " The program only samples: use `skyrl generate` with the converted file."


def _implies(paths: Mapping[str, object], remark: str = "") -> Program:
    """A program that does what these settings ask for."""
    one_by_one = _replaced("trainer.fully_async samples groups one by one")
    settings = {"generator.batched": one_by_one} if _ENABLED in paths else {}
    return Program(settings=settings, implied=lambda values: paths, remark=remark)


def _harbor(
    name: str, more: Mapping[str, object], remark: str = "", implied: Mapping[str, object] | None = None
) -> Program:
    """A program for Harbor tasks, with additional settings of its `default.yaml`."""
    return Program(
        settings=_HARBOR_SETTINGS,
        tables={_TRIALS: _convert_trial},
        implied=lambda values: {**_harbor_implies(values, more), **(implied or {})},
        remark="Tasks need Harbor (pip install harbor, under Python 3.12). Trial settings that the script omits are "
        f"those of SkyRL's published {name}.{remark}",
    )


PROGRAMS: Mapping[str, Program] = {
    "train_integrations.harbor.entrypoints.main_harbor": _harbor("main_harbor", _LATER),
    "harbor.entrypoints.main_harbor": _harbor("main_harbor", {}),
    "main_harbor_fully_async": _harbor("main_harbor", _LATER, implied=_ASYNC),
    "main_fully_async": _implies(_ASYNC),
    "main_async": _implies(_ONE_STEP_OFF, _ONE_STEP),
    "main_dapo": _implies(_PENALTY),
    "main_tis_dapo": _implies(_PENALTY),
    "main_dapo_fully_async": _implies({**_PENALTY, **_ASYNC}),
    "harbor.entrypoints.main_harbor_generate": _harbor("main_harbor_generate", {}, _ONLY_SAMPLES),
    "main_on_policy_distill": Program(
        settings={
            _ESTIMATOR: _token_rewards,
            _ALGORITHM + "policy_loss_type": _convert_loss_type,
            _ALGORITHM + "loss_reduction": _replaced("the program's own loss always uses seq_mean_token_sum_norm"),
            **dict.fromkeys((_ALGORITHM + "kl_loss_coef", _ALGORITHM + "kl_estimator_type"), _coefficient),
        },
        remark=_AS_PUBLISHED.format("main_on_policy_distill"),
    ),
    "main_custom_adv_est": Program(
        settings={_ESTIMATOR: _less_the_batch_mean}, remark=_AS_PUBLISHED.format("main_custom_adv_est")
    ),
}
"""Suffix of a program's dotted name, longer ones first -> the known program."""

_IMAGES = "rows with images, which skyrl does not train on yet"
_SERVER = "a server, which trains nothing"

KNOWN: Mapping[str, ProgramFacts] = {
    **dict.fromkeys(PROGRAMS, RUNS),
    **dict.fromkeys(
        ("skyrl.train.entrypoints.main_base", "skyrl_train.entrypoints.main_base", "skyrl.train.main_sft"), RUNS
    ),
    "main_dapo_flashrl": unconverted("rollouts with quantized weights, which skyrl does not have yet"),
    "main_fully_async_sim": unconverted("a trainer that only simulates its steps"),
    "verl_main_ppo": unconverted("verl's trainer: convert the script with --from verl"),
    "geometry3k_entrypoint": unconverted(_IMAGES),
    "visgym.entrypoint": unconverted(_IMAGES),
    "skyrl.train.entrypoints.main_generate": aside("it only samples: `skyrl generate` does that here"),
    "skyrl_train.entrypoints.main_generate": aside("it only samples: `skyrl generate` does that here"),
    "skyrl.train.entrypoints.serve": aside(_SERVER),
    "skyrl.tinker.api": aside(_SERVER),
    "skyrl.tx.tinker.api": aside(_SERVER),
}
"""Suffix of a program's dotted name -> whether its runs are converted."""
