"""Tables and pages of the documentation that are made from code: `python -m tests.pages` rewrites them (`make pages`).

`tests/test_pages.py` compares; nobody edits them by hand.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import results
from benchmarks.gpu_session import page as measurements
from skyrl.config.settings.alarms import DEFAULT_ALARMS
from skyrl.tracking import metric_table
from tests import command_pages, field_pages, guarantees
from tests.effects.table import page as page_of_fields
from tests.interop import figures, settings_pages
from tests.interop.foreign_names import foreign_names
from tests.models import family_cells
from tests.sandbox import attacks

ROOT = Path(__file__).parents[1]


def with_table(page: str, table: str) -> str:
    """The page with the rows below the table's first line replaced by those of the table.

    Raises ValueError if the page has no table that begins with the same line.
    """
    before, separator, rest = page.partition(table.partition("\n")[0])
    if not separator:
        raise ValueError(f"no table begins with {table.partition(chr(10))[0]!r}")
    return before + table + rest[rest.index("\n\n") :]


def with_sections(page: str, sections: str) -> str:
    """The page with everything from its first heading of the second level on replaced."""
    return page[: page.index("\n## ") + 1] + sections


def default_alarms() -> str:
    """The table of default alarms."""
    rows = ["| alarm | metric | condition | likely cause |", "|---|---|---|---|"]
    for name, alarm in DEFAULT_ALARMS.items():
        config = alarm.config
        condition = f"{config.when} {config.threshold:g}" + (f" against `{config.against}`" if config.against else "")
        rows.append(f"| `{name}` | `{config.metric}` | {condition}, window {config.window} | {alarm.meaning} |")
    return "\n".join(rows)


def layers() -> str:
    """The packages by layer, as the import contracts of pyproject.toml have them, with the sublayers inside."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    contracts = [contract for contract in options["contracts"] if contract["type"] == "layers"]
    sublayers = {contract["containers"][0]: contract["layers"] for contract in contracts}
    rows = ["| layer | package | what it is | sublayers, from the top down |", "|---|---|---|---|"]
    for number, layer in enumerate(sublayers["skyrl"], start=1):
        for package in layer.split(" | "):
            inside = " > ".join(sublayers.get(f"skyrl.{package}", ())).replace(" | ", ", ")
            rows.append(f"| {number} | `{package}` | {_first_sentence(package)} | {inside} |")
    return "\n".join(rows)


def _first_sentence(package: str) -> str:
    folder = ROOT / "skyrl" / package
    face = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = " ".join((ast.get_docstring(ast.parse(face.read_text(encoding="utf-8"))) or "").split())
    return text.partition(". ")[0].removesuffix(".")


def main() -> None:
    fields = field_pages.pages()
    for file, render in {**PAGES, **{file: whole(text) for file, text in fields.items()}}.items():
        path = ROOT / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(path.read_text(encoding="utf-8") if path.exists() else ""), encoding="utf-8")
    for path in (ROOT / field_pages.FOLDER).rglob("*.md"):
        if str(path.relative_to(ROOT)) not in fields:
            path.unlink()


def whole(text: str) -> Callable[[str], str]:
    """A page of fields, of which nothing is written by hand."""
    return lambda page: text


PAGES: Mapping[str, Callable[[str], str]] = {
    "SECURITY.md": lambda page: with_table(page, attacks.table()),
    "docs/architecture.md": lambda page: with_table(page, layers()),
    "docs/commands.md": lambda page: with_sections(page, command_pages.page()),
    "docs/alarms.md": lambda page: with_table(page, default_alarms()),
    "docs/coming-from/README.md": lambda page: with_table(page, figures.settings_table()),
    "docs/coming-from/skyrl.md": lambda page: settings_pages.with_settings(
        with_table(page, figures.scripts_table()), "skyrl"
    ),
    "docs/coming-from/areal.md": lambda page: settings_pages.with_settings(
        with_table(page, figures.refusals_table()), "areal"
    ),
    "docs/coming-from/verl.md": lambda page: settings_pages.with_settings(page, "verl"),
    "docs/coming-from/trl.md": lambda page: settings_pages.with_settings(page, "trl"),
    "docs/gpu.md": lambda page: measurements.with_measurements(page, measurements.markdown(measurements.stored())),
    "docs/guarantees.md": lambda page: with_sections(page, "## Promises and tests\n\n" + guarantees.page()),
    "skyrl/config/foundation/foreign_names.json": lambda text: foreign_names(),
    "docs/models.md": lambda page: with_table(page, family_cells.table()),
    "docs/results.md": lambda page: with_table(with_table(page, results.table()), results.answers_table()),
    "docs/metrics.md": lambda page: with_sections(page, metric_table.page()),
    "tests/effects/fields.md": lambda page: page_of_fields(),
}
"""Each page but those of fields, and how the code makes it from what is there."""


if __name__ == "__main__":
    main()
