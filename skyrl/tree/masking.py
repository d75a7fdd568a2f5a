"""Names and forms of secrets, and masking of plain data by them: the one list for everything that is printed, stored or
sent. `skyrl.processes.redaction` adds the values of this process's variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
"""Replacement of a secret in everything that is printed, stored or sent."""

REFERENCE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
"""A reference to an environment variable: `env:NAME`."""

USER_INFO = re.compile(
    r"(?<=://)(?:[^\s/\"'<>]{1,512}|[^\s/@:\"'<>]{0,128}:(?!\d{1,5}[/?#])[\"']?[^\s@\"'<>]{1,512})(?=@)"
)
"""User name and password of an address. A password may contain an at sign or a slash, which should be escaped."""

_SHORTEST = len("sig=....")
"""Length of the shortest text that can match one of `_FORMS`."""

SHOWN = re.compile(r"\*\*\* \(env:([A-Za-z_][A-Za-z0-9_]*)\)")
"""The masked form of a `Secret`: `*** (env:NAME)`."""


def is_secret_name(name: str) -> bool:
    """Is this key, header or variable called like a credential: `hf_token`, `X-Api-Key`, `password`?

    The last word decides, and for keys and tokens the word before it: a `pad_token`, a `max_token`, a `sort_key` and an
    `answer_key` are no credentials.
    """
    spelled = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return bool(re.search(_NAME, re.sub(r"[-. ]", "_", spelled).lower()))


_VARIABLES = re.compile(
    r"KEY|TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|(?<![A-Z])PASS(?![A-Z])|.PWD|^PW$|CREDENTIAL|AUTH|COOKIE|WEBHOOK|PRIVATE"
    r"|CONNECTION_?STR|SERVICE_ACCOUNT|KUBE_?CONFIG|UNSEAL|MNEMONIC|SESSION_?ID|(?:OTP|WALLET)_?SEED"
    r"|(?<![A-Z])(?:DSN|PAT|SAS|JWT|CREDS?|HMAC|BEARER|PIN|SK|PW)(?![A-Z])",
    re.IGNORECASE,
)


def is_secret_variable(name: str) -> bool:
    """Is this environment variable called like one that holds a credential? More words count than for a key: masking
    the value of a variable that is none costs little, and a variable has no other mark of what it holds.
    """
    return bool(_VARIABLES.search(name))


def masked(value: object, name: str = "") -> Any:
    """Plain data without its secrets; `name` is the key or path of the value.

    Text is masked at any depth under a name that suggests a secret, and wherever it has the form of one: user names and
    passwords in addresses, signatures of presigned addresses, bearer tokens, and keys of well-known services. A
    reference (`env:NAME`) is kept: it says where the secret is.
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
    """The text with everything that looks like a secret masked; shared by configurations, logs and recordings."""
    folded = _folded(text) if len(text) >= _SHORTEST else ""
    if "://" in text:
        text = USER_INFO.sub(HIDDEN, text)
        text = re.sub(_SIGNATURE, rf"\1{HIDDEN}", text)
    if not folded:
        return text
    for words, form in _FORMS:
        for word in words:  # `any` takes twice the time, and every line of a log comes here
            if word in folded:
                text = re.sub(form, rf"\1{HIDDEN}", text)
                break
    return text


def _folded(text: str) -> str:
    """The text in lower case, with the non-ASCII letters that `re.IGNORECASE` equates with ASCII ones: K, s, i."""
    return text.lower() if text.isascii() else text.casefold().replace("\u0131", "i").replace("\u0307", "")


_OWNERS = (
    "api|app|access|account|admin|auth|authorization|bearer|bot|client|csrf|deploy|encryption|endpoint|gpg|host|"
    "jwt|login|master|oauth|oauth2|personal|pgp|private|proxy|refresh|registry|sas|secret|security|server|service|"
    "session|shared|shared_access|signing|ssh|storage|subscription|webhook|xsrf|"
    "anthropic|aws|azure|clearml|cohere|comet|deepseek|discord|e2b|exa|gcp|gemini|gh|git|github|gitlab|google|"
    "groq|hf|hub|hugging_?face|judge|mistral|mlflow|modal|neptune|ngc|npm|nvidia|openai|openrouter|pypi|ray|"
    "sendgrid|serpapi|serper|slack|stripe|swanlab|tavily|telegram|tinker|together|twilio|vault|wandb"
)
_WORDS = (
    "auth|authorization|bearer|connection_?str(?:ing)?|cookie|creds?|credential|dsn|jwt|pass(?:code|phrase|wd|word)|pat|"
    "pwd|sas|secret|signature|webhook(?:_ur[il])?"
)
_PARTS = r"signature|credential|security-token|access_?token|access_?key_?id|api_?key|password|secret"
_NAME = rf"^token$|(?:^|_)(?:{_WORDS}|(?:{_OWNERS})_?(?:key|token))s?(?:_?[0-9]+)?$"
_SIGNATURE = rf"(?i)([?&](?:[\w-]*(?:{_PARTS})|sig|token)=)[^&#\s\"'<>]+"
_TO_THE_END = r"[^\s\"'\\,;}{]"
_OPENING = r"\\?[\"']?\s*[:=]\s*\\?[\"']?"
_FORMS = (
    (("bearer",), r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}"),
    (("authorization",), rf"(?i)(authorization{_OPENING}(?:basic|token)\s+){_TO_THE_END}+"),
    (("x-api-key", "x-auth-token"), rf"(?i)(\bx-(?:api-key|auth-token){_OPENING}){_TO_THE_END}{{4,}}"),
    (
        ("key=", "signature=", "password=", "passwd=", "pwd=", "client_secret=", "sig="),
        r"(?i)(\b(?:AccountKey|SharedAccessKey|SharedAccessSignature|password|passwd|pwd|client_secret|sig)=)"
        r"[^\s;&\"'\\]{4,}",
    ),
    (("hooks.slack",), r"(https://hooks\.slack\.com/)[\w/-]+"),
    (("/webhooks/",), r"(https://(?:\w+\.)?discord(?:app)?\.com/api/webhooks/)[\w/-]+"),
    (("webhook.office",), r"(https://[\w.-]+\.webhook\.office\.com/)[\w/@-]+"),
    (("api.telegram",), r"(https://api\.telegram\.org/bot)[\w:-]+"),
    (
        ("akia", "asia", "aiza", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "hf_", "xox"),
        r"\b(AKIA|ASIA|AIza|gh[pousr]_|github_pat_|glpat-|hf_|xox[abprs]-)[A-Za-z0-9_-]{16,}",
    ),
    (
        (
            *("xapp-", "npm_", "pypi-", "ya29.", "sg.", "_live_", "_test_", "dop_v1_", "shpat_", "nvapi-", "r8_"),
            *("gsk_", "xai-", "pplx-", "lin_api_", "atatt", "wandb_v1_", "dapi", "tskey-", "glsa_", "age-secret"),
        ),
        r"\b(xapp-|npm_|pypi-|ya29\.|SG\.|[rs]k_(?:live|test)_|dop_v1_|shpat_|nvapi-|r8_|gsk_|xai-|pplx-|lin_api_"
        r"|ATATT|wandb_v1_|dapi|tskey-|glsa_|AGE-SECRET-KEY-)(?=[\w.-]{0,40}\d)[\w.-]{20,}",
    ),
    (("eyj",), r"\b(eyJ)[\w-]{8,1024}\.eyJ[\w-]{4,8192}\.[\w-]{16,}"),
    (("sk-",), r"\b(sk-)(?=[\w-]{0,40}\d)[\w-]{16,}"),
    (("-----begin",), r"(-----BEGIN [A-Z ]*PRIVATE KEY-----)[^-]+(?=-----END)"),
)
"""Patterns of secrets; the first group of each match is kept. Each comes after lower-case words, at least one of which
is in every text that it changes: searching for the words first is 10 times as fast, and a pattern is compiled (and kept
by `re`) only if one is found.
"""
