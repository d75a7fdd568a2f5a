from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from skyrl.tree.masking import _FORMS, masked_text

SECRETS: dict[str, str] = {
    "Bearer abcdefgh12345678": "Bearer ***",
    "Authorization: Basic dXNlcjpwYXNz": "Authorization: Basic ***",
    "X-Api-Key: abcd1234": "X-Api-Key: ***",
    "AccountKey=abcd1234": "AccountKey=***",
    "SharedAccessSignature=abcd1234": "SharedAccessSignature=***",
    "passwd=abcd1234": "passwd=***",
    "client_secret=abcd1234": "client_secret=***",
    "https://hooks.slack.com/services/T0/B0/x": "https://hooks.slack.com/***",
    "https://discord.com/api/webhooks/12/ab": "https://discord.com/api/webhooks/***",
    "https://a.webhook.office.com/webhookb2/x": "https://a.webhook.office.com/***",
    "https://api.telegram.org/bot12:ab/send": "https://api.telegram.org/bot***/send",
    "AKIAABCDEFGHIJKLMNOP": "AKIA***",
    "github_pat_0123456789abcdef": "github_pat_***",
    "xoxb-0123456789abcdef": "xoxb-***",
    "sk-0123456789abcdefg": "sk-***",
    "-----BEGIN RSA PRIVATE KEY-----abc-----END RSA PRIVATE KEY-----": (
        "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----"
    ),
    "https://user:password@host/x": "https://***@host/x",
    "https://host/x?sig=abcd": "https://host/x?sig=***",
}


LOOKALIKES = str.maketrans({"k": "\u212a", "K": "\u212a", "s": "\u017f", "i": "\u0131", "I": "\u0130"})
"""The letters that `re.IGNORECASE` takes for those of ASCII: Kelvin, long s, i without and with a dot."""


def by_every_form(text: str) -> str:
    """What is left of the text if no form is left out for want of its words."""
    for _, form in _FORMS:
        text = re.sub(form, r"\1***", text)
    return text


@pytest.mark.parametrize("text", SECRETS)
def test_what_has_the_form_of_a_secret_is_hidden(text: str) -> None:
    assert masked_text(f"so: {text} and on") == f"so: {SECRETS[text]} and on"


@pytest.mark.parametrize("text", [text for text in SECRETS if "://" not in text])
@pytest.mark.parametrize("change", [str.upper, str.swapcase, lambda text: text.translate(LOOKALIKES)])
def test_letters_that_count_as_those_of_another_case_hide_nothing(text: str, change: Callable[[str], str]) -> None:
    assert masked_text(change(text)) == by_every_form(change(text))


def test_text_without_secrets_stays() -> None:
    text = "x = 3, so key words, the bearer of news, and Asia's password are no secrets: see https://example.org"
    assert masked_text(text) == text
