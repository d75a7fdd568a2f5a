"""Random configurations of every kind of run, and every door that writes one for a later reader.

What a door writes, read again, is the same run: `resolve(load(text_of(load(x)))) == resolve(load(x))`. Every second
leaf of a tree has its class's default, since a value that a rule would replace can only be lost there.
"""

from __future__ import annotations

import json
import os
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest import mock

import attrs
import cattrs
from attrs import Factory, define, frozen
from click.testing import CliRunner

from property_tests.trees import SIMPLE, as_arguments, as_tables, default_of
from skyrl.checkpoint.manifest import Manifest
from skyrl.cli.preparing.config import config
from skyrl.config import AlgorithmConfig, BaseConfig, OptimizerConfig, load, resolve
from skyrl.config.cluster import ClusterConfig, SlurmConfig
from skyrl.config.loading.kinds import KINDS, kind_of, root_of
from skyrl.config.loading.resolve import derived
from skyrl.config.loading.standalone_file import kept_text
from skyrl.config.loading.stored import stored_tree
from skyrl.errors import ConfigError, UserError
from skyrl.launchers.prepared import Prepared
from skyrl.processes.redaction import redacted_configuration
from skyrl.runs.run_lock import RunLock, config_text
from skyrl.sweeps.sweep_file import SweepConfig
from skyrl.sweeps.trials import trials_of
from skyrl.tree import FrozenDict, Secret, differences, field, fingerprint, thaw
from skyrl.tree.access import default_at
from skyrl.tree.classes import fields_of, fit_field, is_config, leaf_paths
from skyrl.tree.dump import flatten, stored_value
from skyrl.tree.types import bare, is_list, is_mapping, is_union

MOSTLY = 0.5
"""Share of leaves that are written with their default."""


class OwnOptimizer(OptimizerConfig):
    """A user's class, in place of one whose default instance differs from the defaults of its class."""

    warmup_key: str = "steps"
    token: Secret | None = None


class OwnAlgorithm(AlgorithmConfig):
    """A user's class with a table that may be absent, and one that is free."""

    judge_key: str = "judge"
    extra: Mapping[str, Any] = FrozenDict()
    second: OwnOptimizer | None = field(default=None)


OWN: Mapping[str, type[BaseConfig]] = {
    "trainer.critic.optimizer_config": OwnOptimizer,
    "trainer.algorithm": OwnAlgorithm,
    "optimizer_config": OwnOptimizer,
}
"""Tables of a tree, each with a class that a file may name in its place."""

TEXTS = (
    "a",
    "a.b:C",
    "1e5",
    "007",
    "true",
    "none",
    "",
    "x = 1",
    '"',
    "'''",
    "\\",
    "***",
    "hf_data",
    "é",
    "a\nb",
    "env",
)
FREE: tuple[Any, ...] = (
    {}, {"a": 1}, {"a.b": {"c": [1, {"d": "e"}]}, "f": "1e5"}, {"answer_key": "x", "think_end_token": "</t>"},
    {"a": {}},
    {"max_token": "many", "secretary": "Ann", "b": [[], {}]},
)  # fmt: skip
ALLOCATIONS = ("vllm:d2t2p3+fsdp:d8t2c3e2", "vllm:d24+megatron:(attn:d2p2t2c3|ffn:p2t3e2)", "vllm:d1|fsdp:d1")
PATIENT = ClusterConfig(slurm=SlurmConfig(signal_before=1e9))
FOLDERS = ("~/ckpts/", "runs/mine", "/here/", "s3://bucket/run")


@define
class Handed:
    """What came of a number of trees."""

    trees: Counter[str] = Factory(Counter)
    """Trees of each kind of run that load and resolve."""
    unusable: int = 0
    """Drawn values that are no run, most of them absurd in combination."""
    same: Counter[str] = Factory(Counter)
    """Trees that came back from each door."""
    refused: Counter[str] = Factory(Counter)
    """Trees that a door refused in a sentence: TOML has no null in free tables."""
    different: list[str] = Factory(list)
    """Door, kind, differences, and what was written."""


@frozen
class Given:
    """A configuration as a user gives it."""

    kind: str
    file: str
    words: tuple[str, ...]
    environ: Mapping[str, str]

    @property
    def arguments(self) -> list[str]:
        return [self.file, *self.words]


def hand_on(count: int, seed: int, folder: Path, routes: Sequence[Mapping[str, Door]]) -> Handed:
    """Draw trees until `count` of them are runs, and give each to a door of each group."""
    chance, handed = random.Random(seed), Handed()
    with mock.patch("skyrl.config.loading.load.check", return_value=[]):  # a tree that no check refuses is rare
        while handed.trees.total() < count:
            case = drawn(chance, folder)
            with mock.patch.dict(os.environ, case.environ):
                _hand_on(case, folder, dict(chance.choice([*group.items()]) for group in routes), handed)
    return handed


def _hand_on(case: Given, folder: Path, routes: Mapping[str, Door], handed: Handed) -> None:
    try:
        loaded = load([case.file], case.words, environ=case.environ)
        run: Any = resolve(loaded)
    except ConfigError:
        handed.unusable += 1
        return
    handed.trees[case.kind] += 1
    plain = _plain(run)
    for name, route in routes.items():
        try:
            before, after = route(case, loaded, run, folder)
        except (ConfigError, UserError) as error:
            reasons = getattr(error, "problems", ())
            if not reasons or any("TOML cannot express" not in problem.message for problem in reasons):
                handed.different.append(f"{name}, {case.kind}: {error}\n{_source(case)}")
            handed.refused[name] += 1
            continue
        except Exception as error:
            error.add_note(f"door {name}: {_source(case)}")
            raise
        same = before == after and (plain if before is run else _plain(before)) == _plain(after)
        if same:
            handed.same[name] += 1
        else:
            handed.different.append(f"{name}, {case.kind}: {differences(before, after)}\n{_source(case)}")


def _plain(run: Any) -> str:
    """Every leaf, where 1, 1.0 and true are three values."""
    return json.dumps(flatten(run), sort_keys=True)


def _source(case: Given) -> str:
    return f"{Path(case.file).read_text(encoding='utf-8')} {case.words} {dict(case.environ)}"


def drawn(chance: random.Random, folder: Path) -> Given:
    """A file, arguments after it, and variables that they name."""
    kind = chance.choice(sorted(KINDS))
    values: dict[str, Any] = {"kind": kind}
    environ: dict[str, str] = {}
    for path in paths_drawn(kind, chance):
        value = value_drawn(kind, path, chance)
        if chance.random() < 0.05 and value is not None and not isinstance(value, list | dict):
            environ[f"V{len(environ)}"] = str(value)
            value = f"env:V{len(environ) - 1}"
        values[path] = value
    for table in OWN:
        if table.partition(".")[0] in fields_of(root_of(kind)) and chance.random() < 0.1:
            values |= own_drawn(table, chance)
    if kind == "rl" and chance.random() < 0.1:
        values = {
            path: value for path, value in values.items() if not path.startswith("generator.eval_sampling_params.")
        }
        values["generator.eval_sampling_params"] = {}
    later = chance.sample(sorted(values.keys() - {"kind"}), k=min(len(values) - 1, chance.randrange(3)))
    words = as_arguments({path: value_drawn(kind, path, chance) for path in later if path in leaves(kind)})
    file = folder / "given.json"
    tables: dict[str, Any] = as_tables(values)
    if chance.random() < 0.1:
        tables["extends"] = "preset:cuda" if kind != "rl" else chance.choice(["preset:dapo", "preset:cuda"])
    file.write_text(json.dumps(tables), encoding="utf-8")
    return Given(kind, str(file), tuple(words), environ)


def paths_drawn(kind: str, chance: random.Random) -> list[str]:
    """Leaves to write: some of any, and some of those that a rule writes or reads."""
    rules = kind_of(root_of(kind)).rules
    ruled = sorted({path for rule in rules for path in (rule.writes, *rule.reads)} & leaves(kind).keys())
    count = chance.choice((1, 3, 10, 40))
    some = chance.sample(ruled, k=min(len(ruled), chance.randrange(1, count + 1)))
    return list(dict.fromkeys([*some, *chance.sample(sorted(leaves(kind)), k=count)]))


def value_drawn(kind: str, path: str, chance: random.Random) -> Any:
    """The default of the leaf, or another value that it takes."""
    if chance.random() < MOSTLY:
        return thaw(stored_value(default_at(root_of(kind), path)))
    return deepcopy(chance.choice(values_of(kind, path)))


def own_drawn(table: str, chance: random.Random) -> dict[str, Any]:
    """A user's class in place of a table, with some of its own fields."""
    cls = OWN[table]
    values: dict[str, Any] = {f"{table}.class": f"{cls.__module__}:{cls.__qualname__}"}
    if cls is OwnOptimizer:
        values |= {f"{table}.lr": chance.choice([1e-6, 5e-6, 2e-5, 1e-3]), f"{table}.token": "env:A_TOKEN"}
        values[f"{table}.warmup_key"] = chance.choice(["steps", "other"])
    else:
        values |= {f"{table}.judge_key": chance.choice(["judge", "x"]), f"{table}.extra": deepcopy(chance.choice(FREE))}
        values[f"{table}.second"] = chance.choice([None, {}, {"lr": 1e-6}, {"warmup_key": "steps"}])
    return values


@cache
def leaves(kind: str) -> dict[str, attrs.Attribute[Any]]:
    """The leaves of a kind of run."""
    return {path: attribute for path, attribute in leaf_paths(root_of(kind)) if path != "kind"}


@cache
def values_of(kind: str, path: str) -> tuple[Any, ...]:
    """Values that the leaf takes, one of each type at least."""
    attribute = leaves(kind)[path]
    candidates = [*_of_type(attribute.type), *SIMPLE]
    if path == "trainer.placement.allocation":
        candidates = [*ALLOCATIONS, None]
    elif path.endswith("_path"):
        candidates += FOLDERS
    return tuple(value for value in candidates if _takes(attribute, value)) or (default_of(attribute),)


def _takes(attribute: attrs.Attribute[Any], value: Any) -> bool:
    try:
        stored = fit_field(attribute, value)
        if attribute.validator is not None:
            attribute.validator(None, attribute, stored)
    except ValueError:
        return False
    return True


def _of_type(kind: Any) -> Iterator[Any]:
    kind = bare(kind)
    if is_union(kind):
        for arm in get_args(kind):
            yield from _of_type(arm)
    elif get_origin(kind) is Literal:
        yield from get_args(kind)
    elif is_list(kind):
        yield from ([], *([item] for item in _of_type(get_args(kind)[0])))
    elif is_mapping(kind):
        yield from FREE
        yield {"a": None}
    elif is_config(kind):
        yield {"metric": "eval/all/avg_score"}
    else:
        yield from {
            bool: (True, False), int: (0, 1, 2, 8, 64), float: (0.0, 0.25, 1, 1.5, 2.0), str: TEXTS,
            Secret: ("env:A_TOKEN",),
        }.get(kind, (None,))  # fmt: skip


# ClientAccess: what was there before, and what is read again.

Pair = tuple[Any, Any]
Door = Callable[[Given, Any, Any, Path], Pair]


def _read(file: Path | str, environ: Mapping[str, str]) -> Any:
    return resolve(load([str(file)], environ=environ))


def _written(text: str, suffix: str, folder: Path, case: Given) -> Any:
    file = folder / f"again.{suffix}"
    file.write_text(text, encoding="utf-8")
    return _read(file, case.environ)


def by_kept_text(case: Given, loaded: Any, run: Any, folder: Path) -> Pair:
    return run, _written(kept_text(loaded.config, loaded.origins), "toml", folder, case)


def by_resolving_again(case: Given, loaded: Any, run: Any, folder: Path) -> Pair:
    return run, resolve(run)


def by_resolving_the_tree_alone(case: Given, loaded: Any, run: Any, folder: Path) -> Pair:
    return run, resolve(loaded.config)


def by_copies(case: Given, loaded: Any, run: Any, folder: Path) -> Pair:
    return run, resolve(deepcopy(pickle.loads(pickle.dumps(loaded.config))))


def by_cattrs(case: Given, loaded: Any, run: Any, folder: Path) -> Pair:
    """The resolved tree as plain data, which is resolved once more."""
    data = json.loads(json.dumps(cattrs.unstructure(run)))
    return run, resolve(cattrs.structure(data, type(run)))


def by_showing(*options: str, language: str) -> Door:
    def by_config_show(case: Given, loaded: Any, run: Any, folder: Path) -> Pair:
        words = ["show", *case.arguments, *options, "--format", language]
        result = CliRunner().invoke(config, words)
        if isinstance(result.exception, ConfigError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return run, _written(result.stdout, language, folder, case)

    return by_config_show


def by_run_folder(case: Given, loaded: Any, run: Any, folder: Path) -> Pair:
    """`config.json`, as a run writes it."""
    (folder / "run").mkdir(exist_ok=True)
    RunLock(folder / "run", "run_path", run).write_config(config_text(run, {}))
    return run, _read(folder / "run", case.environ)


def by_checkpoint(case: Given, loaded: Any, run: Any, folder: Path) -> Pair:
    """The manifest of a checkpoint."""
    (folder / "checkpoint").mkdir(exist_ok=True)
    manifest = Manifest(
        step=1,
        files=(),
        config=redacted_configuration(stored_tree(run)),
        fingerprint=fingerprint(run),
        derived=derived(run),
    )
    (folder / "checkpoint" / "manifest.json").write_bytes(manifest.content())
    return run, _read(folder / "checkpoint", case.environ)


def by_launch(target: Literal["local", "slurm", "ray"]) -> Door:
    def by_prepared_launch(case: Given, loaded: Any, run: Any, folder: Path) -> Pair:
        with mock.patch("skyrl.launchers.prepared.machines_of"):  # sizes are absurd
            launch = Prepared(target, [case.file], case.words, PATIENT, environ=case.environ)
        return launch.run, _written(launch.text, "toml", folder, case)

    return by_prepared_launch


def by_sweep(case: Given, loaded: Any, run: Any, folder: Path) -> Pair:
    """One training of a sweep of one. A sweep has no arguments, and reads files alone."""
    sweep = SweepConfig(run=(case.file,), folder=str(folder / "sweep"), seeds=(run_seed(run),))
    [trial] = trials_of(sweep, case.environ).trials
    return trial.run, _written(trial.text, "toml", folder, case)


def run_seed(run: Any) -> int:
    seed: int = run.trainer.seed if run.kind == "rl" else run.seed
    return seed


def by_rehearsal(case: Given, loaded: Any, run: Any, folder: Path) -> Pair:
    """The file of a rehearsal without changes to the run, of reinforcement learning only."""
    from skyrl.tools.rehearsal import Rehearsal  # which imports torch

    if case.kind != "rl":
        return run, run
    file, _ = Rehearsal(files=[case.file], words=case.words, run=run, folder=folder)._folded_file({})
    return run, _read(file, case.environ)


LANGUAGES = ("json", "yaml", "toml")
DOORS: tuple[dict[str, Door], ...] = (
    {"kept text": by_kept_text},
    {"resolve() again": by_resolving_again},
    {"resolve() of the tree alone": by_resolving_the_tree_alone},
    {"pickle and deepcopy": by_copies},
    {"cattrs": by_cattrs},
    {f"show --sparse, {language}": by_showing("--sparse", language=language) for language in LANGUAGES},
    {f"show, {language}": by_showing(language=language) for language in LANGUAGES},
    {f"show --written, {language}": by_showing("--written", language=language) for language in LANGUAGES},
    {"run folder": by_run_folder},
    {"checkpoint": by_checkpoint},
    {"launch local": by_launch("local"), "launch slurm": by_launch("slurm"), "launch ray": by_launch("ray")},
    {"sweep": by_sweep},
)
"""Each tree is given to one door of each group."""

WITH_TORCH: tuple[dict[str, Door], ...] = ({"rehearse": by_rehearsal},)
"""ClientAccess whose import takes seconds."""
