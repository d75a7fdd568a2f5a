"""The text of a file, or one sentence about why there is none."""

from __future__ import annotations

from pathlib import Path as FilePath

from skyrl.errors import ConfigError, Problem

UNREADABLE = "The configuration cannot be read"
"""The title of errors about files as a whole."""


def read_text(name: str) -> str:
    """The text, with line feeds alone. Raises `ConfigError` for a file that is missing, unreadable, or not UTF-8."""
    try:
        text = FilePath(name).expanduser().read_bytes().decode("utf-8-sig")  # Windows editors write a mark first
    except FileNotFoundError:
        raise cannot_read(name, "there is no such file") from None
    except IsADirectoryError:
        raise cannot_read(name, "this is a folder, not a file") from None
    except UnicodeDecodeError as error:
        raise cannot_read(name, f"not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise cannot_read(name, error.strerror or str(error)) from None
    except (ValueError, RuntimeError) as error:  # a zero byte in the name; no home folder for ~
        raise cannot_read(name, str(error)) from None
    return text.replace("\r\n", "\n")


def cannot_read(name: str, why: str) -> ConfigError:
    """The file as a whole is of no use."""
    return ConfigError([Problem(path=name, message=f"cannot be read: {why}")], title=UNREADABLE)


def malformed(name: str, language: str, why: str, *position: int) -> ConfigError:
    """The text is not of its language; `position` is the line, or line and column, where that shows."""
    place = ":".join([name, *map(str, position)])
    problem = Problem(path=name, message=f"not valid {language}: {why[:1].lower()}{why[1:]}", place=place)
    return ConfigError([problem], title=UNREADABLE)
