"""The programs of SkyRL: what their runs are, and which settings their Python code stands for.

`KNOWN` says of each program whether its runs are converted. `PROGRAMS` has the programs whose code becomes settings:
asynchronous trainers, the penalty of DAPO, estimators of their own. The settings here reproduce the published program.
The user's copy may have been modified, so the report states this assumption.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import field, frozen

from skyrl.interop.launches import RUNS, ProgramFacts, aside, unconverted
from skyrl.interop.skyrl import harbor as skyrl_harbor
from skyrl.interop.translation import Translation, Values, redundant, refused

Convert = Callable[[object, Values], Translation | None]
"""Outcome of a setting's value, given all settings of the script."""

_ALGORITHM = "trainer.algorithm."
_ESTIMATOR = _ALGORITHM + "advantage_estimator"


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


def _replaced(reason: str) -> Convert:
    return lambda value, values: redundant(reason)


def _when_distilling(become: Translation) -> Convert:
    return lambda value, values: become if _distills(values) else None


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
_ONE_BY_ONE = "trainer.fully_async samples groups one by one"
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
    settings: Mapping[str, Convert] = {"generator.batched": _replaced(_ONE_BY_ONE)} if _ENABLED in paths else {}
    return Program(settings=settings, implied=lambda values: paths, remark=remark)


def _harbor(
    name: str, more: Mapping[str, object], remark: str = "", implied: Mapping[str, object] | None = None
) -> Program:
    """A program for Harbor tasks, with additional settings of its `default.yaml`."""
    return Program(
        settings=skyrl_harbor.SETTINGS,
        tables={skyrl_harbor.TABLE: skyrl_harbor.of_a_trial},
        implied=lambda values: {**skyrl_harbor.implied(values, more), **(implied or {})},
        remark="Tasks need Harbor (pip install harbor, under Python 3.12). Trial settings that the script omits are "
        f"those of SkyRL's published {name}.{remark}",
    )


PROGRAMS: Mapping[str, Program] = {
    "train_integrations.harbor.entrypoints.main_harbor": _harbor("main_harbor", skyrl_harbor.LATER),
    "harbor.entrypoints.main_harbor": _harbor("main_harbor", {}),
    "main_harbor_fully_async": _harbor("main_harbor", skyrl_harbor.LATER, implied=_ASYNC),
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
            **dict.fromkeys(
                (_ALGORITHM + "kl_loss_coef", _ALGORITHM + "kl_estimator_type"),
                _when_distilling(redundant("the program uses the plain difference of log-probabilities")),
            ),
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
    "skyrl.train.entrypoints.main_base": RUNS,
    "skyrl_train.entrypoints.main_base": RUNS,
    "skyrl.train.main_sft": RUNS,
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
