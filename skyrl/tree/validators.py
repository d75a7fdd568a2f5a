"""Rules for single fields, as attrs validators: `field(default=1e-6, validator=non_negative)`.

Each raises `ConfigError` with one problem. None passes every rule: the type decides whether a field may be empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from attrs import Attribute

from skyrl.errors import ConfigError, Problem
from skyrl.tree.types import display_value

Validator = Callable[[Any, "Attribute[Any]", Any], None]


def rule_of_one_field(
    holds: Callable[[Any], bool], requirement: str, *, refusal: str = "", **bounds: float | str
) -> Validator:
    """A validator from a predicate on the value and the words for what is allowed (`a positive number`). `refusal` is
    the message for any other value, by default that it is not what is allowed.

    `bounds` express the same with JSON Schema's keywords, as far as possible: `minimum`, `exclusiveMinimum`, ... for
    numbers, `pattern` for text.
    """

    def validate(instance: object, attribute: Attribute[Any], value: object) -> None:
        if value is not None and not holds(value):
            owner = type(instance).__name__ if instance is not None else "value"
            message = refusal or f"{display_value(value)} is not {requirement}"
            problem = Problem(path=attribute.name, message=message)
            raise ConfigError([problem], title=f"{owner} cannot be built")

    _SAID[validate] = (requirement, bounds)
    return validate


_SAID: dict[Any, tuple[str, dict[str, float | str]]] = {}


def requirement_of(validator: object) -> str:
    """The validator's description of what it allows; empty for a validator from elsewhere, or for None."""
    return _SAID[validator][0] if validator in _SAID else ""


def bounds_of(validator: object) -> dict[str, float | str]:
    """The numbers or texts that a validator allows, as JSON Schema keywords."""
    return _SAID[validator][1] if validator in _SAID else {}


positive = rule_of_one_field(lambda value: value > 0, "positive", exclusiveMinimum=0)
negative = rule_of_one_field(lambda value: value < 0, "negative", exclusiveMaximum=0)
non_negative = rule_of_one_field(lambda value: value >= 0, "zero or positive", minimum=0)
fraction = rule_of_one_field(lambda value: 0 <= value <= 1, "between 0 and 1", minimum=0, maximum=1)
positive_fraction = rule_of_one_field(
    lambda value: 0 < value <= 1, "above 0 and at most 1", exclusiveMinimum=0, maximum=1
)
not_empty = rule_of_one_field(
    lambda value: len(value) > 0, "a non-empty value", refusal="is empty: give it a value, or leave it out"
)
port = rule_of_one_field(lambda value: 0 < value < 65536, "a port (1 to 65535)", minimum=1, maximum=65535)
port_or_free = rule_of_one_field(
    lambda value: 0 <= value < 65536, "a port (0 to 65535, where 0 is a free one)", minimum=0, maximum=65535
)
positive_or_off = rule_of_one_field(lambda value: value > 0 or value == -1, "positive, or -1 for off", minimum=-1)
fraction_below_one = rule_of_one_field(
    lambda value: 0 <= value < 1, "at least 0 and below 1", minimum=0, exclusiveMaximum=1
)


def at_least(bound: float) -> Validator:
    """Validator of numbers not below `bound`."""
    return rule_of_one_field(lambda value: value >= bound, f"at least {bound}", minimum=bound)


def positive_or_minus_one(meaning: str) -> Validator:
    """Validator of positive numbers, or -1 with a special meaning: `positive_or_minus_one("all ranks")`."""
    return rule_of_one_field(lambda value: value > 0 or value == -1, f"positive, or -1 for {meaning}", minimum=-1)


def left_alone(instead: str) -> Validator:
    """Validator of fields that cannot be set because another setting replaces them, which the message names."""
    return rule_of_one_field(lambda value: False, f"allowed here: {instead}")


def number_of_items(count: int, predicate: Callable[[Any], bool], requirement: str) -> Validator:
    """Validator of lists with exactly `count` items for which `predicate` holds."""
    return rule_of_one_field(lambda value: len(value) == count and all(map(predicate, value)), requirement)


def between(low: float, high: float) -> Validator:
    """Validator of numbers from `low` to `high`, both included."""
    return rule_of_one_field(lambda value: low <= value <= high, f"between {low} and {high}", minimum=low, maximum=high)


all_positive = rule_of_one_field(lambda value: all(item > 0 for item in value), "a list of positive numbers")
no_negative = rule_of_one_field(lambda value: all(item >= 0 for item in value), "a list without negative numbers")
no_empty_text = rule_of_one_field(all, "a list without empty text")


def text_like(pattern: str, requirement: str) -> Validator:
    """Validator of text in which a regular expression, in the syntax that Python and JSON Schema share, matches."""
    compiled = re.compile(pattern)

    def holds(value: str) -> bool:
        return compiled.search(value) is not None and not value.endswith("\n")  # before which `$` matches in Python

    return rule_of_one_field(holds, requirement, pattern=pattern)


http_address = text_like("^https?://", "an address that begins with http:// or https://")
