"""Reads the text of a file, or reports in one sentence why it cannot."""

from __future__ import annotations

import os
import stat
from pathlib import Path as FilePath

from skyrl.errors import ConfigError, Problem

UNREADABLE = "The configuration cannot be read"
"""The title of errors about files as a whole."""

MOST_BYTES = 2**18
"""Largest file, and longest argument, that is read as a configuration: parsing more would take seconds."""

MOST_STORED = 2**26
"""Largest file that is read as a record of a run, a checkpoint or a model."""

_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def read_text(name: str) -> str:
    """Text of a regular file of at most `MOST_BYTES`, with CRLF line ends converted to line feeds.

    Raises `ConfigError` for a file that is missing, unreadable, too large, not a regular file, or not UTF-8.
    """
    if not name:
        raise cannot_read("''", "the name is empty")
    try:
        text = _bytes_of(name).decode("utf-8-sig")  # Windows editors write a byte order mark first
    except FileNotFoundError:
        raise cannot_read(name, "no such file") from None
    except IsADirectoryError:
        raise cannot_read(name, "this is a folder, not a file") from None
    except UnicodeDecodeError as error:
        raise cannot_read(name, f"not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise cannot_read(name, error.strerror or str(error)) from None
    except ConfigError:
        raise
    except (ValueError, RuntimeError) as error:  # a zero byte in the name; no home folder for ~
        raise cannot_read(name, str(error)) from None
    return text.replace("\r\n", "\n")


def stored_text(path: FilePath) -> str:
    """Text of a file that a program wrote, such as `config.json` in the folder of a run, which may be a stranger's.

    Raises `OSError` for one that is missing or unreadable, and `ValueError` for one that is not UTF-8, not a regular
    file, or larger than `MOST_STORED`.
    """
    if kind := _other_kind(path):
        raise ValueError(f"it is {kind}, not a regular file")
    with path.open("rb") as file:
        content = file.read(MOST_STORED + 1)
    if len(content) > MOST_STORED:
        raise ValueError(f"it is larger than {MOST_STORED // 2**20} MiB")
    return content.decode("utf-8")


def _other_kind(path: FilePath) -> str:
    """Kind of a file that is not regular, so that reading it may block or never end; empty for other files."""
    mode = os.stat(path).st_mode
    return next((words for is_kind, words in _KINDS if is_kind(mode)), "")


def _bytes_of(name: str) -> bytes:
    """Bytes of the file. Anything but a regular file is not even opened: reading a pipe may block or never end."""
    path = FilePath(name).expanduser()
    if kind := _other_kind(path):
        raise cannot_read(name, f"this is {kind}, not a regular file: write its content to a file first")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise cannot_read(name, f"the file is larger than {MOST_BYTES // 2**10} KiB, the limit for a configuration")
    return content


def cannot_read(name: str, why: str) -> ConfigError:
    """The error for a file that cannot be read at all."""
    return ConfigError([Problem(path=name, message=f"cannot be read: {why}")], title=UNREADABLE)


def malformed(name: str, language: str, why: str, *position: int, text: str = "") -> ConfigError:
    """The error for `text` that is not valid `language`; `position` is the line, or line and column, of the error."""
    place = ":".join([name, *map(str, position)])
    hint = ""
    if text and len(position) == 2:
        from skyrl.tree.syntax_errors import shown_error

        hint = shown_error(language, text, position[0], position[1], why)
    problem = Problem(path=name, message=f"not valid {language}: {why[:1].lower()}{why[1:]}", hint=hint, place=place)
    return ConfigError([problem], title=UNREADABLE)
