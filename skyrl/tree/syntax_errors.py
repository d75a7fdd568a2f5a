"""Errors for text that is not TOML, YAML or JSON: the line with a caret, and the usual cause in a few words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from json import JSONDecodeError

from skyrl.errors import ConfigError, Problem
from skyrl.tree.masking import is_secret_name, masked_text

UNREADABLE = "The configuration cannot be read"
"""The title of errors about files as a whole."""

_WIDEST = 72
"""Largest number of characters of a line that are shown, around the error."""

_ROUND_QUOTES = ("\u201c", "\u201d", "\u2018", "\u2019", "\u201e")
_SCALAR = r"""[^\s,\]}#]*"""


def malformed(name: str, language: str, reason: str, *position: int, text: str = "") -> ConfigError:
    """The error for `text` that is not valid `language`; `position` is the line, or line and column, of the error."""
    location = ":".join([name, *map(str, position)])
    hint = _shown_error(language, text, position[0], position[1], reason) if text and len(position) == 2 else ""
    message = f"not valid {language}: {reason[:1].lower()}{reason[1:]}"
    return ConfigError([Problem(path=name, message=message, hint=hint, location=location)], title=UNREADABLE)


def json_line_error(error: ValueError) -> str:
    """Why a line of a file is not JSON, with the column: the number of the line is told by whoever read it."""
    if not isinstance(error, JSONDecodeError):  # no UTF-8, or a number with thousands of digits
        return str(error)
    return f"{error.msg.removesuffix(' at')} at column {min(error.pos, len(error.doc.rstrip())) + 1}"


def _shown_error(language: str, text: str, number: int, column: int, reason: str) -> str:
    """The line of an error with a caret, `2 | clip = False`, and its usual cause, each if there is one; `reason` is in
    the parser's words. Empty for a line that may hold a secret.
    """
    lines = text.split("\n")
    line = lines[number - 1] if 1 <= number <= len(lines) else ""
    name = re.match(r"""\s*["']?([\w-]*)""", line)
    if name and (is_secret_name(name[1]) or masked_text(line) != line):
        return ""
    shown = ""
    if line.strip():
        start = max(0, column - 1 - _WIDEST // 2) if len(line) > _WIDEST else 0
        head, part = f"{number} | ", line[start : start + _WIDEST].replace("\t", " ").rstrip()
        shown = f"{head}{part}\n{' ' * len(head)}{' ' * (column - 1 - start)}^"
    cause = _CAUSES[language](line, max(column - 1, 0), reason)
    cause = cause or next((known for words, known in _BY_WORDS.items() if reason.startswith(words)), "")
    return "\n".join(filter(None, (shown, cause)))


def _word(line: str, at: int) -> str:
    return re.match(_SCALAR, line[at:])[0]  # type: ignore[index]  # the pattern matches anything


def _toml(line: str, at: int, reason: str) -> str:
    word = _word(line, at)
    if word.lower() in ("true", "false"):
        return f"TOML writes {word.lower()}"
    if word.lower() in ("yes", "no", "on", "off"):
        return f"TOML writes true or false, not {word}"
    if word.lower() in ("none", "null", "nil", "~"):
        return f'TOML has no {word}: write "none", or leave the field out'
    number = line[len(line[:at].rstrip("-+0123456789.eE_")) : at] + word
    if re.fullmatch(r"[-+]?\.[0-9]+([eE][-+]?[0-9]+)?", number):
        return f"TOML writes a digit before the point: {number.replace('.', '0.')}"
    if re.fullmatch(r"[-+]?[0-9]+\.([eE][-+]?[0-9]+)?", number):
        return f"TOML writes a digit after the point: {number.replace('.', '.0')}"
    if re.fullmatch(r"[-+]?0[0-9]+", number):
        sign, _, rest = number.partition("0")
        return f"TOML writes no zero before a whole number: {sign}{rest.lstrip('0') or '0'}"
    if reason.startswith(("Illegal character '\\n'", 'Expected "\'"')):
        return "the closing quote is missing"
    if reason.startswith("Unterminated string"):
        return "a text that begins with three quotes has no end"
    if reason.startswith("Invalid value") and line[at : at + 1] in _ROUND_QUOTES:
        return 'TOML has straight quotes: "..."'
    if reason.startswith("Invalid value") and re.match(r"[A-Za-z/~.$<{*@-]", line[at:]):
        return f'text is written in quotes: "{line[at:].split("#")[0].strip()}"'
    if reason.startswith("Expected '=' after a key"):
        yaml = re.match(r"\s*([\w.-]+)\s*:", line)
        return f"TOML writes {yaml[1]} = ..." if yaml else "TOML writes key = value"
    if twice := re.match(r"Cannot declare \((.*?),?\) twice", reason):
        name = ".".join(re.findall(r"'([^']*)'", twice[1]))
        return f"[{name}] is written once, with all of its fields below it"
    if reason.startswith("Invalid initial character for a key part") and line[at : at + 1] == "}":
        return "TOML has no comma before }"
    if reason.startswith("Expected newline") and line[at : at + 1] == ",":
        return "TOML has no comma at the end of a line"
    return ""


def _yaml(line: str, at: int, reason: str) -> str:
    character = line[at : at + 1]
    if reason.startswith("found character that cannot start any token"):
        is_tab = character == "\t"
        return "YAML indents with spaces, not tabs" if is_tab else f"text that begins with {character} is put in quotes"
    if reason.startswith("mapping values are not allowed"):
        if len(re.findall(r":\s", line[: at + 2])) > 1:
            return "text with a colon and a space is put in quotes"
        return "a key of the line before lacks the space after its colon, or this line is indented too far"
    return ""


def _json(line: str, at: int, reason: str) -> str:
    rest, word = line[at:], _word(line, at)
    if rest.startswith(("//", "#", "/*")):
        return "JSON has no comments"
    if word in ("True", "False", "None"):
        return f"JSON writes {({'None': 'null'}).get(word, word.lower())}"
    if rest.startswith("'"):
        return 'JSON has double quotes: "..."'
    if rest.startswith(("}", "]")) and re.search(r",\s*$", line[:at]):
        return f"JSON has no comma before {rest[0]}"
    if reason.startswith("Expecting property name") and re.match(r"\w", rest):
        return f'a key is written in quotes: "{word.partition(":")[0]}"'
    if reason.startswith("Expecting value") and re.match(r"-?\.[0-9]", rest):
        return f"JSON writes a digit before the point: {word.replace('.', '0.')}"
    if reason.startswith("Expecting value") and re.match(r"[A-Za-z]", rest):
        return f'text is written in quotes: "{word}"'
    return ""


_BY_WORDS = {
    "Cannot overwrite a value": "the key, or a table of this name, is written before",
    "Unclosed array": "a comma between two items, or the closing ], is missing",
    "Unclosed inline table": "a table in { } is written on one line, with commas: use a heading [...] for more",
    "Expected ']'": "the closing ] is missing",
    "found unexpected end of stream": "the closing quote is missing",
    "did not find expected ',' or": "the closing bracket, or a comma, is missing",
    "did not find expected key": "a quote or bracket ends before the text does, or the line is indented otherwise than "
    "those before it",
    "did not find expected <document start>": "the line is indented otherwise than those before it",
    "found undefined alias": "text that begins with * is put in quotes",
    "block sequence entries are not allowed": "a list begins on a line of its own, or is written in [ ]",
    "Unterminated string": "the closing quote is missing",
    "Expecting ',' delimiter": "a comma, or the closing bracket, is missing",
    "Invalid \\escape": "a backslash is written twice: \\\\",
}
"""Beginning of the words of a parser -> the cause, wherever the error is."""

_CAUSES: Mapping[str, Callable[[str, int, str], str]] = {"TOML": _toml, "YAML": _yaml, "JSON": _json}
"""Language -> function of the line, the index of the error in it and the parser's words, that returns the cause; empty
if it is none that depends on the line.
"""
