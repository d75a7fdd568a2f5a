"""SkyRL's own scripts of August 2026, loaded as they are: what is not ours is told, and the rest has its value."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from skyrl.config import ConfigError, SkyRLTrainConfig, load
from skyrl.config.loading.resolve import resolve_with_origins
from skyrl.tree.arguments import split_path
from skyrl.tree.dump import stored_value

Script = dict[str, Any]

UNFILLED = re.compile(r"\$\{|\$\(")
"""A variable or a command that the recording of the script left in an override."""

AUTHORS_OWN = (
    "trainer.algorithm.overlong_buffer", "generator.enable_child_agents", "generator.train_child_trajectories",
    "harbor_trial_config", "generator.rate_limit", "trainer.override_entrypoint",
    "trainer.arctic_rl", "generator.task", "generator.inference_engine.thunder_agent",
)  # fmt: skip
"""Fields of subclasses that the examples bring with them."""


def is_explained(path: str, ours: Any, upstream: Any) -> bool:
    """A difference that is meant.

    Text is taken as it stands, so that quotes within the shell's quotes stay, and nothing behind the sign of equality
    is empty text instead of null; `async_engine` is a field of our tree, and of a later SkyRL's no more.
    """
    is_text = ours in (f'"{upstream}"', "") and (upstream is None or isinstance(upstream, str))
    return is_text or path == "generator.inference_engine.async_engine"


@pytest.fixture(scope="module")
def scripts(reference: Path) -> list[Script]:
    """Those that train by reinforcement learning."""
    scripts = json.loads((reference / "skyrl_overrides_2026_08.json").read_text())
    return [script for script in scripts if script["family"] == "rl"]


@pytest.fixture(scope="module")
def later(reference: Path) -> set[str]:
    """Paths that SkyRL added after the tree that ours follows."""
    return set(json.loads((reference / "skyrl_later_changes.json").read_text())["added"])


def refusals(overrides: list[str]) -> dict[int, str]:
    """Position of each override that is refused -> what is said."""
    try:
        load([], overrides)
    except ConfigError as error:
        return {
            int(problem.location.removeprefix("argument ")) - 1: f"{problem.message} {problem.hint}"
            for problem in error.problems
        }
    return {}


def test_every_refused_override_is_none_of_our_tree(scripts: list[Script], later: set[str]) -> None:
    counts: Counter[str] = Counter()
    for script in scripts:
        refused = refusals(script["overrides"])
        counts["accepted"] += len(script["overrides"]) - len(refused)
        for position, message in refused.items():
            override = script["overrides"][position]
            path, _, text = override.partition("=")
            if path in later and "SkyRL added this after March 2026" in message:
                counts["added later"] += 1
            elif path.startswith(AUTHORS_OWN) and "no such field" in message:
                counts["fields of an example's own"] += 1
            elif UNFILLED.search(text) or not text:
                counts["without a value"] += 1
            else:
                pytest.fail(f"{script['script']}: {override}: {message}")
    print(dict(counts))
    assert counts["accepted"] > 0.9 * counts.total()


@pytest.mark.long
def test_what_is_accepted_has_the_value_that_skyrl_gives_it(scripts: list[Script], later: set[str]) -> None:
    different: dict[tuple[str, Any], Any] = {}
    for script in scripts:
        refused = refusals(script["overrides"])
        kept = [override for position, override in enumerate(script["overrides"]) if position not in refused]
        loaded = load([], kept)
        run = resolve_with_origins(loaded.config, loaded.origins)[0]
        written = {override.partition("=")[0] for override in kept}
        for path, value in (script.get("ref_values") or {}).items():
            renamed = path.replace("remove_microbatch_padding", "use_sample_packing")
            if path not in written or renamed in later:  # `enabled = false` of what came later is left out
                continue
            if not same(at(run, renamed), value) and not is_explained(path, at(run, renamed), value):
                different[path, at(run, renamed)] = value
    assert different == {}


def at(run: SkyRLTrainConfig, path: str) -> Any:
    value: Any = run
    for name in split_path(path):
        value = value[name] if hasattr(value, "get") else getattr(value, name)
    return stored_value(value)


def same(ours: Any, upstream: Any) -> bool:
    """Equal in value and type, once a whole number may stand for the number of a field that holds such."""
    return repr(ours) == repr(float(upstream) if type(ours) is float and type(upstream) is int else upstream)


def test_scripts_of_the_hydra_era_load_directly_with_a_warning_for_each_old_name(reference: Path) -> None:
    facts = json.loads((reference / "skyrl_overrides_hydra_era.json").read_text())
    for old, new in facts["meta"]["legacy_key_map"].items():
        values = {"generator.engine_init_kwargs": '{"a": 1}', "generator.external_server_urls": '["a:1"]'}
        texts = {"bool": "false", "int": "3", "float": "0.5"}
        for text in [values.get(old, "x"), *texts.values(), "vllm", "nccl", "auto", "float16", '["a:1"]']:
            try:
                loaded = load([], [f"{old}={text}"])
            except ConfigError:
                continue
            [warning] = loaded.warnings
            assert (warning.path, warning.location) == (old, "argument 1")
            assert f"is called {new} in skyrl" in warning.message
            assert any(path.startswith(new) for path in loaded.origins)
            break
        else:
            pytest.fail(f"{old} takes no value")
