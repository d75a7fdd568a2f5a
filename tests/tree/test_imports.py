"""Files of the user that import what lies beside them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl.errors import UserError
from skyrl.tree.imports import import_object


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, and the modules and places that were known before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".")])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(**files: str) -> None:
    """Files by their path, in which `__` stands for a slash."""
    for name, text in files.items():
        path = Path(name.replace("__", "/")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("helper", "imported"),
    [
        ("rewards__beside_it", "from beside_it import last"),
        ("rewards__beside_it__inside", "from beside_it.inside import last"),  # a folder without __init__
        ("beside_the_command", "from beside_the_command import last"),
        ("rewards__beside_it", "def last(text):\n    import beside_it\n    return beside_it.last(text)"),
    ],
)
def test_a_file_imports_what_is_beside_it_or_in_the_working_directory(helper: str, imported: str) -> None:
    write(**{helper: "def last(text):\n    return text[-1]\n", "rewards__sums": f"{imported}\nscore = last\n"})
    assert import_object("rewards/sums.py:score")("abc") == "c"


def test_nothing_beside_a_file_shadows_an_installed_package() -> None:
    write(
        rewards__attrs="",
        rewards__json="",
        rewards__sums="import json\nimport attrs\nnames = attrs.frozen, json.dumps\n",
    )
    assert len(import_object("rewards/sums.py:names")) == 2


@pytest.mark.parametrize("imported", ["import helper", "from helper import number", "import helper as other"])
def test_two_modules_of_one_name_are_not_taken_for_each_other(imported: str) -> None:
    write(one__helper="number = 1\n", two__helper="number = 2\n")
    write(one__reward="from helper import number\n", two__reward=f"{imported}\nnumber = 2\n")
    assert import_object("one/reward.py:number") == 1
    with pytest.raises(
        UserError, match=r"two/helper\.py and .*one/helper\.py are two modules called helper: rename one"
    ):
        import_object("two/reward.py:number")


def test_a_file_that_imports_none_of_two_such_modules_is_taken() -> None:
    write(one__helper="number = 1\n", two__helper="number = 2\n")
    write(one__reward="from helper import number\n", two__reward="number = 3\n")
    assert [import_object(f"{folder}/reward.py:number") for folder in ("one", "two")] == [1, 3]


def test_what_is_found_nowhere_is_named_with_the_folders_that_were_searched(folder: Path) -> None:
    write(rewards__sums="import no_such_helper\n")
    message = (
        "rewards/sums.py:1 imports the module no_such_helper, which is neither installed nor in "
        f"{folder}/rewards or the working directory: install it, or put it there"
    )
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        import_object("rewards/sums.py:score")
