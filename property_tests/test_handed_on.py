"""A configuration that is handed on is the configuration that was written, whichever door it leaves by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from property_tests.handed_on import DOORS, WITH_TORCH, Door, hand_on
from skyrl.config.loading.kinds import KINDS


def come_back(count: int, seed: int, folder: Path, routes: Sequence[Mapping[str, Door]]) -> None:
    handed = hand_on(count, seed, folder, routes)
    assert handed.different == []
    assert handed.same.keys() == {name for group in routes for name in group}
    assert handed.trees.keys() == {*KINDS}
    assert handed.refused.total() < handed.same.total() / 20


@pytest.mark.long
def test_twenty_four_trees_come_back_from_every_door(tmp_path: Path) -> None:
    come_back(24, seed=1, folder=tmp_path, routes=DOORS)


@pytest.mark.long
def test_five_thousand_trees_come_back_from_every_door(tmp_path: Path) -> None:
    come_back(5_000, seed=2, folder=tmp_path, routes=(*DOORS, *WITH_TORCH))
