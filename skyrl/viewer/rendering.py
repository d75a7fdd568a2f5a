"""The templates of the pages and of the report. Jinja escapes all text, because answers are untrusted."""

from __future__ import annotations

from math import isfinite
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined

ENDED = {
    "stop": "ended by the policy (stop)",
    "length": "cut off at the longest answer (length)",
    "context": "cut off: no room for another turn (context)",
}
"""Reason why sampling ended, as it is stored -> in words."""


def environment() -> Environment:
    """The templates, with what they call."""
    env = Environment(
        loader=PackageLoader("skyrl.viewer"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    env.filters["query"] = lambda values: urlencode(values)
    env.globals |= {"meter": meter, "ended": ENDED}
    return env


def meter(value: object, least: float, most: float) -> str:
    """The class of a reward in the style sheet, from `r0` for the least to `r10` for the most; empty for no number."""
    if not isinstance(value, int | float) or not isfinite(value) or most <= least:
        return ""
    return f"r{round(10 * min(max((value - least) / (most - least), 0), 1))}"
