"""Tables of docs/coming-from: where each setting of another system is here, asked of the converters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import ModuleType
from unittest.mock import patch

from attrs import evolve

from skyrl.interop.areal import convert as areal
from skyrl.interop.areal import supervised as areal_supervised
from skyrl.interop.peer_trees import PeerTree, peer_trees
from skyrl.interop.skyrl.scripts import convert_overrides
from skyrl.interop.skyrl.sft import convert_settings
from skyrl.interop.systems import System
from skyrl.interop.translation import Translation, Values
from skyrl.interop.trl import convert as trl
from skyrl.interop.verl import convert as verl
from skyrl.interop.verl import supervised as verl_supervised

A_KEY, A_WORD = "a_key", "a_word"
OTHERS = (8, 0.5, A_WORD, [A_WORD], True, False, {A_KEY: 1})
"""Values that are tried of a setting whose default is no value, or has no counterpart."""


TRIED = (A_KEY, A_WORD, " 8", "'8'", " 0.5", "'0.5'", " true", " false")
"""Parts of reasons that name a value that was tried."""


class _Found(Exception):
    def __init__(self, system: System, values: Values) -> None:
        self.system, self.values = system, values


def tables_of(module: ModuleType, convert: Callable[[], object]) -> tuple[System, Values]:
    """The tables by which `module` converts in a call, and the settings as it hands them to these tables."""

    def found(system: System, values: Values, *rest: object) -> None:
        raise _Found(system, values)

    with patch.object(module, "convert_settings", found):
        try:
            convert()
        except _Found as answer:
            return evolve(answer.system, switches=()), answer.values
    raise AssertionError("it converted nothing")


def outcomes(system: System, defaults: Values) -> Iterator[tuple[str, list[tuple[object, Translation]]]]:
    """Each setting with its default and other values, each with its translation."""
    for key, default in defaults.items():
        others = [not default] if isinstance(default, bool) else OTHERS
        tried = [value for value in (default, *others) if value is not None]
        translations = ((value, system.translated(key, value, {**defaults, key: value})) for value in tried)
        yield key, [(value, translation) for value, translation in translations if translation is not None]


def table(head: str, system: System, defaults: Values) -> str:
    """One row for each setting that has a counterpart; one for each missing capability, with its settings."""
    rows: list[str] = []
    missing: dict[str, list[str]] = {}
    for key, translations in outcomes(system, defaults):
        written = [
            path.removesuffix(f".{A_KEY}").removesuffix(f".{value}")
            for value, translation in translations
            for path in [*translation.writes, *(f"cluster.toml:{cluster_path}" for cluster_path in translation.cluster)]
        ]
        reasons = (translation.unsupported for _, translation in translations)
        lacking = next((reason for reason in reasons if reason and not any(value in reason for value in TRIED)), "")
        if written:
            rows.append(f"| `{key}` | {', '.join(f'`{path}`' for path in dict.fromkeys(written))} |")
        elif lacking:
            missing.setdefault(lacking, []).append(key)
    lacks = [
        f"| {', '.join(f'`{key}`' for key in keys)} | not here: {capability} |" for capability, keys in missing.items()
    ]
    return "\n".join([f"| {head} | here |", "|---|---|", *rows, *lacks])


def newest(system: str, kind: str) -> PeerTree:
    return peer_trees(system, kind)[-1]


def _verl(kind: str) -> tuple[System, Values]:
    keys = {**newest("verl", kind).defaults, "actor_rollout_ref.model.path": "a/b"}
    return tables_of(verl, lambda: verl.convert_keys(keys))


def _areal(kind: str, module: ModuleType, **overrides: str) -> tuple[System, Values]:
    named = {key.replace("_path", ".path").replace("_type", ".type"): value for key, value in overrides.items()}
    return tables_of(module, lambda: areal.convert_keys({**newest("areal", kind).defaults, **named}))


def _trl(kind: str) -> tuple[System, Values]:
    keys = {**newest("trl", kind).defaults, "model_name_or_path": "a/b"}
    return tables_of(trl, lambda: trl.convert_keys(keys, kind=kind))


TABLES: Mapping[tuple[str, str], Callable[[], tuple[System, Values]]] = {
    ("verl", "fsdp"): partial(_verl, "fsdp"),
    ("verl", "megatron"): partial(_verl, "megatron"),
    ("verl", "fully_async"): partial(_verl, "fully_async"),
    ("verl", "one_step_off"): partial(_verl, "one_step_off"),
    ("verl", "sft"): lambda: tables_of(verl_supervised, lambda: verl.convert_keys(newest("verl", "sft").defaults)),
    ("areal", "GRPOConfig"): partial(_areal, "GRPOConfig", areal, actor_path="a/b"),
    ("areal", "SFTConfig"): partial(_areal, "SFTConfig", areal_supervised, train_dataset_type="sft"),
    ("areal", "RWConfig"): partial(_areal, "RWConfig", areal_supervised, train_dataset_type="rw"),
    **{("trl", kind): partial(_trl, kind) for kind in ("grpo", "rloo", "sft", "reward", "dpo", "kto")},
}
"""System and kind of run -> the tables that convert it, and all settings of its newest tree."""

SHOWN = {
    ("verl", "fsdp"): "a run",
    ("verl", "sft"): "`sft_trainer`",
    ("areal", "GRPOConfig"): "`GRPOConfig`",
    ("areal", "SFTConfig"): "`SFTConfig`",
    ("trl", "grpo"): "`GRPOConfig`",
    ("trl", "rloo"): "`RLOOConfig`",
    ("trl", "sft"): "`SFTConfig`",
    ("trl", "reward"): "`RewardConfig`",
    ("trl", "dpo"): "`DPOConfig`",
    ("trl", "kto"): "`KTOConfig`",
}
"""System and kind of run -> its name on the page of the system."""

NAMES = {"verl": "verl", "areal": "AReaL", "trl": "TRL"}


def settings_of(system: str) -> str:
    """The tables of a page."""
    if system == "skyrl":
        return of_skyrl()
    kinds = [kind for name, kind in SHOWN if name == system]
    heads = [f"{NAMES[system]} {newest(system, kind).version}, {SHOWN[system, kind]}" for kind in kinds]
    return "\n\n".join(table(head, *TABLES[system, kind]()) for head, kind in zip(heads, kinds, strict=True))


def with_settings(page: str, system: str) -> str:
    """The page of a system with its tables between the marks."""
    before, begin, rest = page.partition("<!-- settings:begin -->\n")
    end = rest[rest.index("<!-- settings:end -->") :]
    return f"{before}{begin}\n{settings_of(system)}\n\n{end}"


def of_skyrl() -> str:
    """The settings that have another name here: most keep theirs."""

    def one(kind: str, name: str) -> str:
        tree = newest("skyrl", kind)
        values = {key: next(filter(None, (value, *OTHERS))) for key, value in tree.defaults.items()}
        conversion = (
            convert_settings([*values.items()], "") if kind == "sft" else convert_overrides(values_as_words(values))
        )
        rows = [
            f"| `{line.source}` | {', '.join(f'`{path}`' for path in line.targets)} |"
            for line in conversion.lines
            if line.outcome == "renamed"
        ]
        return "\n".join([f"| SkyRL {tree.version}, {name} | here under another name |", "|---|---|", *rows])

    return "\n\n".join([one("rl", "a run"), one("sft", "`main_sft`")])


def values_as_words(values: Values) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]
