"""A folder that an earlier version wrote is compared by what its configuration means now."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from skyrl.config import SkyRLTrainConfig, compose, resolve
from skyrl.errors import ResumeError
from skyrl.runs.run_lock import refuse_changed
from skyrl.tree import evolve_at, to_dict

RUN = resolve(evolve_at(SkyRLTrainConfig(), "trainer.policy.model.path", "a/b"))


def of_an_earlier_version(*, packing: bool) -> dict[str, Any]:
    """With an old name for one field, and without one that came later."""
    stored = to_dict(RUN)
    del stored["trainer"]["use_sample_packing"]
    stored["trainer"]["remove_microbatch_padding"] = packing
    del stored["trainer"]["algorithm"]["reward_shaping"]
    return stored


def test_old_names_and_fields_that_came_later_make_no_difference() -> None:
    refuse_changed(of_an_earlier_version(packing=True), RUN, "runs/mine", "trainer.run_path")


def test_a_value_under_an_old_name_is_compared_under_the_new_one() -> None:
    with pytest.raises(ResumeError, match=r"trainer.use_sample_packing: false there, true here"):
        refuse_changed(of_an_earlier_version(packing=False), RUN, "runs/mine", "trainer.run_path")


def test_what_no_version_ever_called_so_cannot_be_read() -> None:
    with pytest.raises(ResumeError, match="that this version cannot read"):
        refuse_changed(to_dict(RUN) | {"trainr": {}}, RUN, "runs/mine", "trainer.run_path")


@pytest.mark.parametrize(("loss", "counts"), [("regular", False), ("cispo", True)])
def test_a_default_that_changed_since_counts_only_where_it_acts(loss: str, counts: bool) -> None:
    run = resolve(evolve_at(SkyRLTrainConfig(), "trainer.algorithm.policy_loss_type", loss))
    stored = to_dict(evolve_at(run, "trainer.algorithm.cispo.cispo_eps_clip_high", 9.5))
    if not counts:
        refuse_changed(stored, run, "the folder", "trainer.run_path")
        return
    with pytest.raises(ResumeError, match="cispo_eps_clip_high: 9.5 there"):
        refuse_changed(stored, run, "the folder", "trainer.run_path")


@pytest.mark.parametrize(
    ("settings", "offered"),
    [
        ({}, "trainer.run_path=runs/b-2"),
        (
            {"trainer.export_path": "/exports"},
            "trainer.run_path=runs/b-2 trainer.export_path=runs/b-2/exports",
        ),
    ],
)
def test_a_new_run_is_offered_the_folders_that_do_not_follow_by_themselves(
    settings: dict[str, str], offered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/b").mkdir(parents=True)
    (tmp_path / "runs/b/config.json").touch()
    paths = {"trainer.policy.model.path": "a/b", "trainer.run_path": "runs/b", **settings}
    run = compose([], paths).config
    stored = to_dict(evolve_at(run, "trainer.seed", 7))
    with pytest.raises(ResumeError, match=re.escape(f"for example:\n  {offered}") + "$"):
        refuse_changed(stored, run, "runs/b", "trainer.run_path")
