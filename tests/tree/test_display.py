"""How consoles and notebooks show a tree."""

from __future__ import annotations

import re
from html import unescape

import pytest

from skyrl.config import SFTConfig, SkyRLTrainConfig, TrainerConfig, compose, load
from skyrl.tree import evolve_at, frozen
from skyrl.tree.access import get_at
from skyrl.tree.display import LONGEST
from tests.config.leaves import RUNNABLE

GIVEN = {**RUNNABLE, "trainer.seed": 42, "trainer.epochs": 3}


def rows(html: str) -> dict[str, tuple[str, str]]:
    """Path -> (value, origin) of a table."""
    cells = re.findall(r"<code>(.*?)</code></td><td[^>]*><code>(.*?)</code></td><td>(.*?)</td>", html)
    return {path: (unescape(value), origin) for path, value, origin in cells}


def test_a_tree_prints_a_line_for_each_value_that_is_not_its_default() -> None:
    assert repr(evolve_at(SkyRLTrainConfig(), "trainer.epochs", 3)) == "SkyRLTrainConfig(\n    trainer.epochs=3,\n)"
    assert repr(SFTConfig()) == "SFTConfig()"


def test_a_written_default_is_no_part_of_the_printed_value() -> None:
    assert repr(load([], {"trainer.seed": 42}).config) == "SkyRLTrainConfig()"


@pytest.mark.parametrize(
    ("path", "origin"),
    [
        ("trainer.epochs", "written"),
        ("trainer.seed", "written"),
        ("trainer.compute_dtype", "derived"),
        ("trainer.run_path", "derived"),
        ("generator.inference_engine.backend", "written"),
    ],
)
def test_a_notebook_is_shown_what_was_written_and_what_was_derived(path: str, origin: str) -> None:
    config = compose([], GIVEN).config
    assert rows(config._repr_html_())[path] == (repr(get_at(config, path)), origin)


def test_a_field_with_its_default_is_left_out() -> None:
    assert "trainer.update_epochs_per_batch" not in rows(compose([], GIVEN).config._repr_html_())


def test_a_tree_that_was_made_in_python_does_not_know_what_was_written() -> None:
    config = SkyRLTrainConfig(trainer=TrainerConfig(epochs=3))
    assert rows(config._repr_html_()) == {"trainer.epochs": ("3", "")}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("<script>", "'<script>'"),
        ("a" * 500, "'" + "a" * (LONGEST - 21) + " ... " + "a" * 14 + "'"),
        ("hf_" + "a" * 34, "'hf_***'"),
    ],
)
def test_values_are_escaped_shortened_and_without_secrets(value: str, expected: str) -> None:
    config = evolve_at(SkyRLTrainConfig(), "trainer.run_name", value)
    assert rows(config._repr_html_())["trainer.run_name"][0] == expected
    assert "<script>" not in config._repr_html_()


def test_a_root_of_the_users_own_is_shown_in_the_same_way() -> None:
    @frozen
    class Mine(SkyRLTrainConfig):
        extra: int = 1

    assert repr(Mine(extra=2)).endswith("Mine(\n    extra=2,\n)")
