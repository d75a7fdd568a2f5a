"""The pages of `docs/fields`: the reference that `skyrl config docs` prints, one page for each table."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from skyrl.config.derive.run_kind import RunKind
from skyrl.config.loading.kinds import KINDS, kind_named
from skyrl.config.loading.reference import CHANGES, TableReference, section, tables
from tests.effects.table import TITLES

FOLDER = "docs/fields"

_INTRODUCTION = f"""# Reference of all fields

A page for each table. A heading is the path of a field as a file or an argument has it, and can be linked. The line
below it has the type, the allowed values, the default and whether a resumed run may change it. Then come the meaning
with its unit, when the field acts, and what derives it where it is not written. `null` is `none` on a command line
and `"none"` in TOML.

{CHANGES}

`skyrl config docs PATH` prints the same for a table or a field, your own classes included. `skyrl config explain PATH
FILE` prints the value in a run and where it comes from. [What each field changes](../../tests/effects/fields.md)
lists the tests of all fields. `make pages` writes these pages."""


@cache
def pages() -> dict[str, str]:
    """Every page below the repository's root, by its path, the index included."""
    pages = {f"{FOLDER}/README.md": _index()}
    for kind in map(kind_named, KINDS):
        for name, inside in _groups(kind).items():
            pages[f"{FOLDER}/{_file(kind, name)}"] = _page(kind, inside)
    return pages


def _groups(kind: RunKind) -> dict[str, list[TableReference]]:
    """The tables of each page by the path of its first. Deep tables are sections of the page of the one they are in.

    What a trainer reads is a table itself in reinforcement learning, and the root of a supervised run.
    """
    depth, groups = 2 if kind.trainer else 1, dict[str, list[TableReference]]()
    for table in tables(kind.root()):
        groups.setdefault(".".join(table.path.split(".")[:depth]), []).append(table)
    return groups


def _file(kind: RunKind, table: str) -> str:
    """The page of a table, from the folder of all pages: those of the kind that needs no `kind` lie in it directly."""
    return f"{'' if kind.name == 'rl' else kind.name + '/'}{table or 'root'}.md"


def _page(kind: RunKind, inside: list[TableReference]) -> str:
    title = f"`{inside[0].path}`" if inside[0].path else "the root"
    index = "README.md" if kind.name == "rl" else "../README.md"
    sections = "\n".join(section(table, kind.root) for table in inside).strip()
    return f"# {TITLES[kind.name]}: {title}\n\nAll tables, and how to read this page: [index]({index}).\n\n{sections}\n"


def _index() -> str:
    return "\n".join(_lines_of_index()) + "\n"


def _lines_of_index() -> Iterator[str]:
    yield _INTRODUCTION
    for kind in map(kind_named, KINDS):
        yield ""
        yield f"## {TITLES[kind.name]}"
        yield ""
        yield "| table | fields | what it is |"
        yield "|---|---|---|"
        for name, inside in _groups(kind).items():
            for table in inside:
                anchor = f"#{table.path.replace('.', '')}" if table is not inside[0] else ""
                link = f"[{table.path or 'the root'}]({_file(kind, name)}{anchor})"
                yield f"| {link} | {len(table.fields())} | {table.meaning.partition('. ')[0].removesuffix('.')} |"
