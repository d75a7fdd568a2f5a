"""Checks of the texts of any tree: empty ones, references that nothing replaces, names that no file system takes."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping

import attrs

from skyrl.config.foundation.entry import RunConfig
from skyrl.errors import Problem
from skyrl.tree.classes import fields_of, is_config
from skyrl.tree.origins import Origins, Path, dotted, place_of
from skyrl.tree.rules import touches

MOST_BYTES = 255
"""Largest number of bytes of one name in a path, on every common file system."""

REFERENCE = re.compile(r"\$\{[^}$]*\}|\$\([^)$]*\)|(?:^|(?<=/))\$[A-Za-z_]\w*(?=/|$)")
"""`${...}` of OmegaConf and of shells, `$(...)`, and a variable as a whole name of a path."""

FREE = ("notes", "stop", "command", "kwargs", "chat_template_kwargs", "target_modules", "exclude_modules")
"""Names of fields whose text may hold a dollar sign: prose, programs, what templates are given, regular expressions."""

MAY_BE_EMPTY = (*FREE, "resume_from", "tools_key", "system_key", "margin_key")
"""Names of fields whose text may be empty: free text, a checkpoint to begin from, columns that rows need not have."""

_VARIABLE = re.compile(r"\$\{?(?:oc\.env:)?([A-Za-z_]\w*)\}?")
_OF_FILES = re.compile(
    r"(.*_)?path|(run|project)_name|(train|val)_data|(train|eval)_datasets|eval_dataset_names|python|readable|"
    r"rollouts_from|resume_from"
)


@attrs.frozen
class Text:
    """A text in a tree."""

    path: Path
    field: str
    """Name of the field that holds the text, itself or in a list or table."""

    value: str
    is_inside: bool
    """Whether the text is inside a free-form table."""


def texts_of(value: object, path: Path = (), field: str = "", *, is_inside: bool = False) -> Iterator[Text]:
    """The texts of a tree that differ from their class's defaults, including those in lists and free-form tables."""
    if isinstance(value, str):
        yield Text(path, field, value, is_inside)
    elif is_config(type(value)):
        for attribute in fields_of(type(value)).values():
            if (child := getattr(value, attribute.name)) is not attribute.default:  # most of a tree is default
                yield from texts_of(child, (*path, attribute.name), attribute.name)
    elif isinstance(value, Mapping):
        for name, child in value.items():
            yield from texts_of(child, (*path, str(name)), field, is_inside=True)
    elif isinstance(value, tuple):
        for number, child in enumerate(value):
            yield from texts_of(child, (*path, str(number)), field, is_inside=is_inside)


def _written_texts(run: RunConfig, origins: Origins, broken: Collection[str]) -> Iterator[tuple[str, Text]]:
    """Dotted path and text of all that was written: what is derived from it is not reported again."""
    for text in texts_of(run):
        path = dotted(text.path)
        own = (origins[item][-1] for item in (path, dotted(text.path[:-1])) if item in origins)
        if not any(origin.kind == "rule" for origin in own) and not touches([path], broken):
            yield path, text


def empty_text_problems(run: RunConfig, origins: Origins, broken: Collection[str]) -> Iterator[Problem]:
    """Problems of texts that are empty, such as the value of an unset variable of a shell: whatever the text should
    name would be left out in silence.
    """
    for path, text in _written_texts(run, origins, broken):
        if not (text.value.strip() or text.is_inside or text.field in MAY_BE_EMPTY):
            message, hint = "is empty, so it names nothing", "give it a value, or leave it out"
            yield Problem(path=path, message=message, hint=hint, location=place_of(path, origins))


def text_problems(run: RunConfig, origins: Origins, broken: Collection[str]) -> Iterator[Problem]:
    """Problems of references, and of names of files that are too long."""
    for path, text in _written_texts(run, origins, broken):
        if text.field not in FREE and (reference := REFERENCE.search(text.value)):
            variable = _VARIABLE.fullmatch(text.value)
            example = f"env:{variable[1] if variable else 'NAME'}"
            yield Problem(
                path=path,
                message=f"{reference[0][:80]} stands there as it is: nothing replaces it",
                hint=f'write the text itself, or take the whole value from a variable: "{example}"',
                location=place_of(path, origins),
                severity="warning" if text.is_inside or reference[0].startswith("$(") else "error",
            )
        elif not text.is_inside and _OF_FILES.fullmatch(text.field) and (refusal := refused_file_name(text.value)):
            yield Problem(path=path, message=refusal, hint="choose a shorter one", location=place_of(path, origins))


def refused_file_name(text: str) -> str | None:
    """Reason why no file system takes a path, or one of the names in it; None if one may, and for an address."""
    longest = max(text.split("/"), key=lambda name: len(os.fsencode(name)))
    size = len(os.fsencode(longest))
    if "://" in text or size <= MOST_BYTES:
        return None
    return f"{longest[:30]}... has {size} bytes, but the name of a file has at most {MOST_BYTES}"
