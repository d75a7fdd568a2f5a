"""Every probe, and the page that prints them: `make pages` writes `tests/effects/fields.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from skyrl.config.loading.kinds import KINDS, root_of
from skyrl.tree.classes import leaf_paths
from skyrl.tree.frozen import thaw
from tests.effects import (
    agents,
    algorithm,
    data,
    engines,
    environments,
    megatron,
    models,
    placement,
    rollouts,
    sampling,
    supervised,
    trainer,
    training_service,
)
from tests.effects.never import NEVER
from tests.effects.probe import Probe

PROBES: tuple[Probe, ...] = (
    *algorithm.PROBES,
    *trainer.PROBES,
    *rollouts.PROBES,
    *sampling.PROBES,
    *agents.PROBES,
    *engines.PROBES,
    *environments.PROBES,
    *data.PROBES,
    *models.PROBES,
    *megatron.PROBES,
    *placement.PROBES,
    *supervised.PROBES,
    *training_service.PROBES,
)
"""In the order in which the page prints them."""

WITHOUT_EFFECT: dict[str, str] = {
    "kind": "selects the tree, and has one value in each",
    "trainer.sequence_parallel_backend": "has one value",
}
"""Leaves that change nothing by nature, with the reason."""

TITLES = {
    "rl": "Reinforcement learning",
    "sft": "Supervised fine-tuning",
    "reward_model": "Reward models",
    "preference": "Preferences",
}


def page() -> str:
    """The page `tests/effects/fields.md`."""
    return "\n".join(line for kind in ("", *KINDS) for line in (_section(kind) if kind else _head())) + "\n"


def _head() -> Iterator[str]:
    yield "# What each field changes"
    yield ""
    yield "Each row is a test: the field alone is set to the value, in the smallest run with the settings under"
    yield '"where", and what stands under "what changes" has to become another. `skyrl config check` reports a field'
    yield "that has no effect in a run. `make pages` writes this page from `tests/effects/`."
    yield ""
    yield "| kind | " + " | ".join(counts("rl")) + " |"
    yield "|---|---|---|---|---|"
    for kind in KINDS:
        yield f"| `{kind}` | " + " | ".join(map(str, counts(kind).values())) + " |"


def counts(kind: str) -> dict[str, int]:
    """Leaves of a kind of run: all, and those that are probed, never act, or are constant."""
    leaves = [path for path, _ in leaf_paths(root_of(kind))]
    return {
        "fields": len(leaves),
        "probed": len({probe.path for probe in PROBES if probe.kind == kind}),
        "never act": sum(of == kind for of, _ in NEVER),
        "constant": sum(path in WITHOUT_EFFECT for path in leaves),
    }


def _section(kind: str) -> Iterator[str]:
    yield ""
    yield f"## {TITLES[kind]}"
    probes = [probe for probe in PROBES if probe.kind == kind]
    if probes:
        yield ""
        yield "| field | value | where | what changes |"
        yield "|---|---|---|---|"
        yield from map(_row, probes)
    yield ""
    yield from _never(kind)


def _never(kind: str) -> Iterator[str]:
    yield "| field | never acts, and is reported |"
    yield "|---|---|"
    yield from (f"| `{path}` | {reason} |" for (of, path), reason in NEVER.items() if of == kind)


def _row(probe: Probe) -> str:
    where = "<br>".join(f"`{path} = {_spelled(value)}`" for path, value in probe.context.items())
    return f"| `{probe.path}` | `{_spelled(probe.value)}` | {where} | {probe.seen_in.shows} |"


def _spelled(value: Any) -> str:
    """As an argument of the command has it, cut short where it is long."""
    plain = thaw(value)
    text = plain if isinstance(plain, str) and plain else json.dumps(plain)
    text = text.replace("{nano}/", "").replace("|", "\\|").replace("\n", "\\n")
    return text if len(text) <= 60 else f"{text[:45]} ... {text[-10:]}"
