"""Tables and pages of the documentation that are made from code: `python -m tests.pages` rewrites them (`make pages`).

A test of each table compares; nobody edits them by hand.
"""

from __future__ import annotations

from pathlib import Path

from tests.effects.table import page as page_of_fields
from tests.sandbox import attacks

ROOT = Path(__file__).parents[1]


def with_table(page: str, table: str) -> str:
    """The page with the rows below the table's first line replaced by those of the table.

    Raises ValueError if the page has no table that begins with the same line.
    """
    before, found, rest = page.partition(table.partition("\n")[0])
    if not found:
        raise ValueError(f"no table begins with {table.partition(chr(10))[0]!r}")
    return before + table + rest[rest.index("\n\n") :]


def main() -> None:
    for file, table in {"SECURITY.md": attacks.table()}.items():
        path = ROOT / file
        path.write_text(with_table(path.read_text(encoding="utf-8"), table), encoding="utf-8")
    (ROOT / "docs" / "fields.md").write_text(page_of_fields(), encoding="utf-8")


if __name__ == "__main__":
    main()
