"""How a tree is shown: as text in a console, and as a table in a notebook. Secrets are masked.

Both leave out what has its default: a tree has hundreds of leaves, and a run writes a few of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Literal, TypeAlias

from skyrl.tree.classes import fields_of, table_class, written_fields
from skyrl.tree.dump import public_value, same, stored_value

How: TypeAlias = Literal["", "written", "derived"]
"""Where a value is from, as far as the tree itself knows: a tree that was made in Python does not."""

LONGEST = 120
"""Largest number of characters of a value."""


def leaves_apart_from_defaults(
    config: object, default: object = None, prefix: str = "", *, knows_written: bool = True
) -> Iterator[tuple[str, str, How]]:
    """Dotted path, value as text, and origin of each leaf that differs from the default and, with `knows_written`, of
    each that was written.
    """
    default = type(config)() if default is None else default
    written = written_fields(config) if knows_written else None
    for name, attribute in fields_of(type(config)).items():
        value, before = getattr(config, name), getattr(default, name, None)
        if table_class(attribute, value) is not None and value is not None:
            start = before if type(before) is type(value) else None
            yield from leaves_apart_from_defaults(value, start, f"{prefix}{name}.", knows_written=knows_written)
            continue
        is_written = name in (written or ())
        if is_written or not same(stored_value(value), stored_value(before)):
            origin: How = "written" if is_written else "" if written is None else "derived"
            yield prefix + name, _short(repr(public_value(value))), origin


def as_text(config: object) -> str:
    """One line for each value that differs from the default: `SkyRLTrainConfig(`, `    trainer.epochs=2,`, `)`."""
    plain = leaves_apart_from_defaults(config, knows_written=False)
    rows = [f"    {path}={value},\n" for path, value, _ in plain]
    name = type(config).__qualname__
    return f"{name}(\n{''.join(rows)})" if rows else f"{name}()"


def as_html(config: object) -> str:
    """A table of what was written and what was derived, under the name of the class."""
    rows = "".join(
        f'<tr><td style="text-align:left"><code>{escape(path)}</code></td><td style="text-align:left"><code>'
        f"{escape(value)}</code></td><td>{origin}</td></tr>"
        for path, value, origin in leaves_apart_from_defaults(config)
    )
    head = "<tr><th>field</th><th>value</th><th></th></tr>"
    return (
        f"<b>{escape(type(config).__qualname__)}</b>: all other fields have their defaults<table>{head}{rows}</table>"
    )


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 20]} ... {text[-15:]}"
