"""`skyrl config explain PATH`: explains what a field means, where its value came from, and what depends on it."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl.config.loading.explain import Explanation, ValueOrigin


def as_text(explanation: Explanation) -> str:
    """The explanation as text for a terminal."""
    is_table = explanation.type.startswith("a table (") and isinstance(explanation.value, dict)
    kind = ", ".join(filter(None, (explanation.type, explanation.allowed)))
    lines = [explanation.path if is_table else f"{explanation.path} = {_spelled(explanation.value)}", f"  {kind}"]
    lines += textwrap.wrap(explanation.doc, 100, initial_indent="  ", subsequent_indent="  ")
    lines += ["", *(_fields(explanation.value) if is_table else _chain(explanation.chain))]
    if explanation.feeds:
        lines += ["", "What is derived from it:", *(f"  {path}  ({rule})" for path, rule in explanation.feeds)]
    if explanation.acts_when:
        verdict = "it does here" if explanation.acts else "it does not here"
        lines += ["", f"It has an effect when {explanation.acts_when}: {verdict}."]
    if explanation.checks and not is_table:
        lines += ["", "Checks that read it:"]
        for name, sentence in explanation.checks:
            lines += textwrap.wrap(f"{name}: {sentence}", 100, initial_indent="  ", subsequent_indent="      ")
    return "\n".join(lines)


def _fields(table: Mapping[str, Any]) -> list[str]:
    """The fields of a table; for nested tables, only their number of fields."""
    inner = Counter(name.partition(".")[0] for name in table if "." in name)
    rows = [f"  {name} = {_spelled(value)}" for name, value in table.items() if "." not in name]
    rows += [f"  {name}  (a table of {number} fields)" for name, number in inner.items()]
    return ["Its fields (explain one to see where its value comes from and what checks it):", *rows]


def _chain(chain: Sequence[ValueOrigin]) -> list[str]:
    width = max(len(step.place) for step in chain)
    return ["Where it came from, the last one wins:", *(line for step in chain for line in _step(step, width))]


def _step(step: ValueOrigin, width: int) -> list[str]:
    lines = [f"  {step.place:<{width}}  {_spelled(step.value)}"]
    lines += textwrap.wrap(step.because, 96, initial_indent="      ", subsequent_indent="      ")
    return [*lines, *(f"      from {path} = {_spelled(value)}  ({place})" for path, value, place in step.reads)]


def _spelled(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 400 else f"{text[:380]} ..."
