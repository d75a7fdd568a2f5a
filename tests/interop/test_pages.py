"""Published scripts of SkyRL, converted and checked; the figures of docs/coming-from are in `figures.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w

from skyrl.config import ConfigError
from skyrl.config.loading.load import compose
from skyrl.errors import Problem
from skyrl.tree.sparse import as_toml_has_it
from tests.interop.corpora import RECORDED, Converted, hydra_scripts, scripts_of_2026
from tests.interop.figures import reasons


@pytest.fixture(scope="module")
def scripts() -> tuple[Converted, ...]:
    """SkyRL's 75 scripts of the Hydra era and its 59 of August 2026."""
    return (*hydra_scripts(RECORDED), *scripts_of_2026(RECORDED, "rl"))


@pytest.mark.long
def test_check_and_conversion_report_the_same_problems(scripts: tuple[Converted, ...], tmp_path: Path) -> None:
    one_each = {reasons(script.conversion): script.conversion for script in scripts}
    for conversion in one_each.values():
        file = tmp_path / "converted.toml"
        file.write_text(tomli_w.dumps(as_toml_has_it(conversion.tables, conversion.root)))
        assert paths(errors_of(file)) == paths(conversion.problems)


def errors_of(file: Path) -> tuple[Problem, ...]:
    try:
        compose([file], environ={})
    except ConfigError as error:
        return error.problems
    return ()


def paths(problems: tuple[Problem, ...]) -> set[str]:
    return {problem.path for problem in problems if problem.severity == "error"}


@pytest.mark.long
def test_no_device_or_tracker_of_this_machine_is_looked_for(scripts: tuple[Converted, ...]) -> None:
    for script in scripts:
        assert script.conversion.tables["trainer"]["device"] == "cuda"
        assert not paths(script.conversion.problems) & {"trainer.logger", "trainer.device"}


@pytest.mark.long
def test_of_skyrls_134_scripts_at_least_120_are_accepted(scripts: tuple[Converted, ...]) -> None:
    assert len(scripts) == 134
    assert sum(not reasons(script.conversion) for script in scripts) >= 120
