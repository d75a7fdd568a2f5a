"""Converts SkyRL's example programs with Python code of their own: their estimators and trainers become settings.

A script names its program after `-m`. The settings here reproduce the published program. The user's copy may have been
modified, so the report states this assumption.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from attrs import field, frozen

from skyrl.interop.conversions import Becomes
from skyrl.interop.skyrl import harbor as skyrl_harbor

Values = Mapping[str, Any]
Convert = Callable[[object, Values], Becomes | None]
"""Outcome of a setting's value, given all settings of the script."""

_ALGORITHM = "trainer.algorithm."
_ESTIMATOR = _ALGORITHM + "advantage_estimator"
_MODULE = re.compile(r"\s-m\s+([A-Za-z_][\w.]*)")


@frozen(kw_only=True)
class Program:
    """A known program, with settings that have a different meaning in it, or that only it reads."""

    settings: Mapping[str, Convert]
    """Setting -> function of its outcome, which returns None if the setting means the same as in every script."""

    tables: Mapping[str, Callable[[str, object, Values], Becomes]] = field(factory=dict)
    """Prefix of a table -> function of the rest of a name that returns its outcome."""

    implied: Callable[[Values], Mapping[str, object]] = lambda values: {}
    """Our paths and their values, which settings of the script override."""

    remark: str = ""
    """A sentence for the end of the report."""

    def becomes(self, key: str, value: object, values: Values) -> Becomes | None:
        """The outcome of one setting; None if the program reads it as any other does."""
        if key in self.settings:
            return self.settings[key](value, values)
        table = next((name for name in self.tables if key.startswith(name)), None)
        return None if table is None else self.tables[table](key.removeprefix(table), value, values)


def program_of(script: str) -> str:
    """Dotted name of the module that a script starts; empty if it names none."""
    found = _MODULE.findall(script)
    return str(found[-1]) if found else ""


def settings_of(program: str) -> Program | None:
    """The known program with a dotted module name; None for any other."""
    return next((known for name, known in PROGRAMS.items() if f".{program}".endswith(f".{name}")), None)


def _replaced(why: str) -> Convert:
    return lambda value, values: Becomes(needless=why)


def _where_it_distills(become: Becomes) -> Convert:
    return lambda value, values: become if _distills(values) else None


def _distills(values: Values) -> bool:
    return values.get(_ESTIMATOR) == "no_op" and values.get(_ALGORITHM + "use_kl_in_reward") is True


def _token_rewards(value: object, values: Values) -> Becomes | None:
    """Outcome of the estimator `no_op`: the advantage of each token is its own reward, a return with discount 0."""
    if value != "no_op":
        return None
    as_they_are = {_ESTIMATOR: "reinforce++", _ALGORITHM + "gamma": 0.0, _ALGORITHM + "whiten_advantages": False}
    if not _distills(values):
        return Becomes(writes=as_they_are, note="each token's advantage is its reward")
    only_the_divergence = {
        _ALGORITHM + "reward_shaping.scale": 0.0,
        _ALGORITHM + "kl_loss_coef": 1.0,
        _ALGORITHM + "kl_estimator_type": "k1",
    }
    note = "each token's advantage is the teacher's log-probability (trainer.ref) minus the policy's"
    return Becomes(writes=as_they_are | only_the_divergence, note=note)


def _own_loss(value: object, values: Values) -> Becomes | None:
    """Outcome of the loss type; the program's `importance_sampling` sums tokens itself and ignores `loss_reduction`."""
    if value != "importance_sampling":
        return None
    path = _ALGORITHM + "policy_loss_type"
    return Becomes(writes={path: value, _ALGORITHM + "loss_reduction": "seq_mean_token_sum_norm"})


def _less_the_batch_mean(value: object, values: Values) -> Becomes | None:
    """Outcome of the estimator `simple_baseline`: a token's advantage is its answer's reward minus the batch mean."""
    if value != "simple_baseline":
        return None
    if values.get("generator.max_turns", 1) != 1 or values.get(_ALGORITHM + "use_kl_in_reward") is True:
        return Becomes(
            refused=f"{value} gives every token the full reward, but here rewards before a token do not count"
        )
    writes = {
        _ESTIMATOR: "reinforce++",
        _ALGORITHM + "whiten_advantages": False,
        _ALGORITHM + "reward_shaping.norm.mean_level": "batch",
    }
    return Becomes(writes=writes, note="the advantage of a response is its reward minus the batch mean")


_AS_PUBLISHED = (
    "The script starts SkyRL's example program {}, whose published version was converted: if yours differs, set your "
    'own function instead (trainer.algorithm.advantage_estimator = "FILE.py:NAME").'
)

_ONLY_SAMPLES = " The program only samples: use `skyrl generate` with the converted file."


def _harbor(name: str, more: Mapping[str, object], remark: str = "") -> Program:
    """A program for Harbor tasks, with additional settings of its `default.yaml`."""
    return Program(
        settings=skyrl_harbor.SETTINGS,
        tables={skyrl_harbor.TABLE: skyrl_harbor.of_a_trial},
        implied=lambda values: skyrl_harbor.implied(values, more),
        remark="Tasks need Harbor (pip install harbor, under Python 3.12). Trial settings that the script omits are "
        f"those of SkyRL's published {name}.{remark}",
    )


PROGRAMS: Mapping[str, Program] = {
    "train_integrations.harbor.entrypoints.main_harbor": _harbor("main_harbor", skyrl_harbor.LATER),
    "harbor.entrypoints.main_harbor": _harbor("main_harbor", {}),
    "harbor.entrypoints.main_harbor_generate": _harbor("main_harbor_generate", {}, _ONLY_SAMPLES),
    "main_on_policy_distill": Program(
        settings={
            _ESTIMATOR: _token_rewards,
            _ALGORITHM + "policy_loss_type": _own_loss,
            _ALGORITHM + "loss_reduction": _replaced("the program's own loss always uses seq_mean_token_sum_norm"),
            **dict.fromkeys(
                (_ALGORITHM + "kl_loss_coef", _ALGORITHM + "kl_estimator_type"),
                _where_it_distills(Becomes(needless="the program uses the plain difference of log-probabilities")),
            ),
        },
        remark=_AS_PUBLISHED.format("main_on_policy_distill"),
    ),
    "main_custom_adv_est": Program(
        settings={_ESTIMATOR: _less_the_batch_mean}, remark=_AS_PUBLISHED.format("main_custom_adv_est")
    ),
}
"""Suffix of a program's dotted name, longer ones first -> the known program."""
