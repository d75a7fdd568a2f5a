"""Every leaf of every kind of run is changed alone, and something that people can see becomes another."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from skyrl.config.loading.kinds import KINDS, root_of
from skyrl.config.settings.strategies import STRATEGIES
from skyrl.tree.classes import leaf_paths
from tests.config.leaves import each, other_values
from tests.effects.never import NEVER
from tests.effects.probe import Observable, Probe
from tests.effects.scenes import Sight, problems_of
from tests.effects.table import PROBES, WITHOUT_EFFECT, page
from tests.megatron_shim import ON_ANY_DEVICE

pytestmark = pytest.mark.xdist_group("effects")

LEAVES = [(kind, path) for kind in KINDS for path, _ in leaf_paths(root_of(kind))]
PROBED = {(probe.kind, probe.path) for probe in PROBES}


@pytest.fixture(scope="session")
def sight(nano: Path) -> Sight:
    """What observables show of runs of the nano model."""
    return Sight(nano)


@pytest.fixture(autouse=True)
def flash_attn_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, its fields act only in so far as nothing is reported."""
    monkeypatch.setattr("skyrl.config.derive.every_kind.has_flash_attention", lambda: True)


@pytest.fixture(autouse=True)
def megatron_computes_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Megatron-core gets is looked at without a GPU."""
    monkeypatch.setitem(STRATEGIES, "megatron", ON_ANY_DEVICE)


def marked(probes: Iterable[Probe]) -> list[Any]:
    """The probes as parameters; by default one runs of each kind of run and observable, the others under --long."""
    seen: set[tuple[str, Observable]] = set()
    params = []
    for probe in probes:
        scene = (probe.kind, probe.seen_in)
        is_long = probe.is_long or (scene in seen and not probe.quick)
        seen |= set() if probe.is_long else {scene}
        params.append(pytest.param(probe, marks=[pytest.mark.long] * is_long, id=str(probe)))
    return params


@pytest.mark.sampled(2)
@pytest.mark.parametrize("probe", marked(PROBES))
def test_a_field_that_is_changed_alone_changes_what_it_promises(probe: Probe, sight: Sight) -> None:
    assert sight.changes(probe, probe.context), f"{probe.seen_in.shows}: the same with {probe.path} = {probe.value}"


@pytest.mark.long
@each(PROBES)
def test_a_field_that_is_seen_to_act_is_not_reported_as_one_that_does_not(probe: Probe, nano: Path) -> None:
    values = {**probe.context, probe.path: probe.value}
    messages = [
        problem.message for problem in problems_of(probe.kind, values, nano) if covers(problem.path, probe.path)
    ]
    assert not [message for message in messages if "no effect" in message]


def test_every_leaf_is_probed_or_never_acts() -> None:
    known = PROBED | set(NEVER)
    missing = [leaf for leaf in LEAVES if leaf not in known and leaf[1] not in WITHOUT_EFFECT]
    assert missing == []


def test_no_leaf_is_both_probed_and_listed_as_one_without_effect() -> None:
    assert not PROBED & {(kind, path) for kind in KINDS for path in WITHOUT_EFFECT}
    assert PROBED <= set(LEAVES)


@each(NEVER)
def test_a_leaf_that_never_acts_is_reported_wherever_it_is_written(leaf: tuple[str, str], nano: Path) -> None:
    kind, path = leaf
    assert leaf in LEAVES and leaf not in PROBED
    for value in list(other_values(root_of(kind), path)) or [0.5]:  # the latter for a field that stays empty
        assert any(covers(problem.path, path) for problem in problems_of(kind, {path: value}, nano)), value


@pytest.mark.sampled(2)
@pytest.mark.parametrize("probe", marked(probe for probe in PROBES if probe.context))
def test_no_value_is_taken_in_silence_by_the_smallest_run(probe: Probe, sight: Sight) -> None:
    """The probes' own contexts are shown to act above; here each leaf alone is warned about, refused or acts."""
    before = problems_of(probe.kind, {}, sight.nano)
    reported = set(problems_of(probe.kind, {probe.path: probe.value}, sight.nano)) - set(before)
    assert reported or sight.changes(probe, {}), f"{probe.path} = {probe.value} is taken in silence and does nothing"


def test_the_page_of_fields_is_what_the_probes_print() -> None:
    printed = (Path(__file__).parent / "fields.md").read_text(encoding="utf-8")
    assert printed == page(), "make pages"


def covers(reported: str, path: str) -> bool:
    """Is the problem about this leaf, or about a table that it is in?"""
    return f"{path}.".startswith(f"{reported}.")
