"""Masking: plain data without the secrets in it, for everything that is printed, stored or sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

HIDDEN = "***"
"""Replacement of a secret in everything that is printed, stored or sent."""

REFERENCE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
"""`env:NAME`."""

SHOWN = re.compile(r"\*\*\* \(env:([A-Za-z_][A-Za-z0-9_]*)\)")
"""`*** (env:NAME)`, as a `Secret` shows itself."""


def is_secret_name(name: str) -> bool:
    """Does a key of a free-form table, a header or a variable speak of a secret: `hf_token`, `X-Api-Key`, `password`?

    Names of a tokenizer's own tokens (`pad_token`) and counts of tokens do not.
    """
    return bool(_patterns()["name"].search(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()))


def masked(value: object, name: str = "") -> Any:
    """Plain data without its secrets; `name` is the key or path that it stands under.

    Masked are texts under names that speak of a secret, at any depth below them, and what has the form of one: user
    names and passwords in addresses, signatures of presigned addresses, bearer tokens, and keys of well-known services.
    A reference (`env:NAME`) stays: it says where the secret is.
    """
    is_secret = is_secret_name(name.rpartition(".")[2].strip('"'))
    if isinstance(value, str):
        if is_secret and value and not REFERENCE.fullmatch(value) and not SHOWN.fullmatch(value):
            return HIDDEN
        return masked_text(value)
    if isinstance(value, Mapping):
        return {masked_text(str(key)): masked(item, name if is_secret else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item, name) for item in value]
    return value


def masked_text(text: str) -> str:
    """A text without what has the form of a secret."""
    patterns = _patterns()
    if "://" in text:
        text = patterns["user_info"].sub(HIDDEN, text)
        text = patterns["signature"].sub(rf"\1{HIDDEN}", text)
    return patterns["key"].sub(HIDDEN, patterns["bearer"].sub(rf"\1{HIDDEN}", text))


@cache
def _patterns() -> dict[str, re.Pattern[str]]:
    """Compiled when something is printed or stored: checking a file needs none of them."""
    parts = r"signature|credential|security-token|access_?token|access_?key_?id|api_?key|password|secret"
    return {
        "name": re.compile(
            r"passw|passphrase|secret|credential|cookie|(^|_)auth(orization)?($|_)|(^|_)pwd$|api_?key|.(?<!sort)_key$|"
            r"(?<!pad)(?<!eos)(?<!bos)(?<!unk)(?<!sep)(?<!cls)(?<!mask)(?<!stop)(?<!image)(?<!video)(?<!audio)_token$|"
            r"^token$|signature$"
        ),
        "user_info": re.compile(r"(?<=://)[^\s/@\"'<>]+(?=@)"),
        "signature": re.compile(rf"([?&](?:[\w-]*(?:{parts})|sig|token)=)[^&#\s\"'<>]+", re.IGNORECASE),
        "bearer": re.compile(r"\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE),
        "key": re.compile(
            r"\b(?:hf_[A-Za-z0-9]{16,}|sk-(?=[\w-]{0,40}\d)[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|"
            r"glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,})"
        ),
    }
