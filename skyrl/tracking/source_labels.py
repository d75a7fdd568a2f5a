"""Names under which data sources are reported and stored: any text names a source, and not every text names a file.

A source keeps its own name if that is short, printable, and its own; any other gets its beginning and a digest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256
from urllib.parse import quote

LONGEST = 200
"""Largest number of bytes of a label, percent-encoded as in the name of a file, of which Linux allows 255."""

TAKEN = (
    *("all", "aggregated_results", "dropped_groups", "failures"),
    *("replaced_samples", "skipped_samples", "filled_samples"),
)
"""Names that metrics or files of an evaluation have themselves."""

_UNSAFE = re.compile(r"[^\w\-.,:;@+=~#%&()\[\]{} /]|(?<![^/])\.*(?=/|$)|^\s|\s$")
"""Control and other special characters, empty and dotted parts of a path, and spaces at the ends."""


def source_labels(sources: Iterable[str]) -> dict[str, str]:
    """Source -> its label in metrics (`eval/<label>/...`) and, percent-encoded, in names of files.

    Labels are distinct even where case does not count, as in the file systems of other machines.
    """
    known = sorted({*sources})
    folded = [source.casefold() for source in known]
    return {source: _label(source, is_unique=folded.count(source.casefold()) == 1) for source in known}


def file_name(label: str, suffix: str) -> str:
    """Name of a file for a label. The label is `unquote` of it without the suffix."""
    return f"{quote(label, safe='')}{suffix}"


def _label(source: str, *, is_unique: bool) -> str:
    safe = _UNSAFE.sub("_", source)
    if is_unique and safe == source and source.casefold() not in TAKEN and len(quote(source, safe="")) <= LONGEST:
        return source
    while len(quote(safe, safe="")) > LONGEST - 9:
        safe = safe[:-1]
    return f"{safe}-{sha256(source.encode(errors='surrogatepass')).hexdigest()[:8]}"
