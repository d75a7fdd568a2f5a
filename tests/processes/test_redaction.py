"""Forms, names and keys of secrets, each decided with its reason, alike in logs, recordings and configurations."""

from __future__ import annotations

import io
from typing import Any

import pytest

from skyrl.processes.redaction import RedactedStream, redacted, redacted_tree, secrets_of
from skyrl.tree.masking import is_secret_name, is_secret_variable, masked, masked_text

R = "Zq9x7Kw3Lm5Nb2Vc8Rt4Yp6"
HEX = "a1b2c3d4" * 4

ANYWHERE = {
    "Slack app": "xapp-1-A0-123-" + R * 2,
    "npm": "npm_" + R * 2,
    "PyPI": "pypi-AgEIcHlwaS5vcmc" + R,
    "Google OAuth": "ya29." + R * 2,
    "JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0." + R * 2,
    "SendGrid": f"SG.{R[:22]}.{R}",
    "Stripe restricted": "rk_live_" + R,
    "Stripe": "sk_live_" + R,
    "Stripe test": "sk_test_" + R,
    "DigitalOcean": "dop_v1_" + HEX * 2,
    "Shopify": "shpat_" + HEX,
    "NVIDIA": "nvapi-" + R * 2,
    "Replicate": "r8_" + R * 2,
    "Groq": "gsk_" + R * 2,
    "xAI": "xai-" + R * 2,
    "Perplexity": "pplx-" + R * 2,
    "Linear": "lin_api_" + R * 2,
    "Atlassian": "ATATT3xFfGF0" + R,
    "Weights & Biases": "wandb_v1_" + R * 2,
    "Databricks": "dapi" + HEX,
    "Tailscale": "tskey-auth-" + R,
    "Grafana": f"glsa_{R}_a1b2c3d4",
    "age": "AGE-SECRET-KEY-1" + "QPZRY9X8" * 7,
    "GitHub": "ghp_" + R + "abcdefghijklm",
    "address": f"https://user:{R}@host/x",
    "address, at sign in the password": f"https://user:{R[:10]}@{R}@host/x",
    "address, slash in the password": f"https://user:{R[:10]}/{R}@host/x",
    "address, quote in the password": f'https://user:"{R}@host',
    "address, no user": f"redis://:{R}@host/0",
    "parameter of an address": f"https://h/x?a=1&access_token={R}",
    "header": f"Authorization: Bearer {R}",
    "connection string": f"Server=x;Uid=u;Pwd={R};",
}
"""Forms that are masked wherever text is: in logs, recordings and configurations."""

PRINTED = {
    "curl": f"curl -u user:{R} https://h",
    "curl with options": f"curl -s --user user:{R} https://h",
    "option": f"prog --api-key {R}",
    "option of a password": f"prog --password {R} file",
    "option with a sign": f"prog --token={R}",
    "every value of a cookie": f"Cookie: a=b; session={R}",
    "assignment in quotes": f'password = "{R}"',
    "assignment in JSON": f'{{"user": "u", "password": "{R}"}}',
    "assignment in JSON in JSON": f'{{\\"password\\": \\"{R}\\"}}',
    "assignment in Python": f"{{'token': b'{R}'}}",
    "YAML": f"passwd: {R}\nuser: u",
    "shell": f"export FOO_TOKEN={R}",
    "variable of the run": f"WANDB_API_KEY={R}",
    "YAML of a key": f"secret_key: {R}",
    "netrc": f"machine h login u password {R}",
    "Docker": f'{{"auths":{{"r":{{"auth":"{R}"}}}}}}',
}
"""Forms that are masked in what is printed. In recordings they stay: an answer may be a program with such a line."""

NO_SECRETS = {
    "redis:user:name9@host": "not an address: no scheme ends in //",
    '{"private_key_id": "a1b2c3d4e5"}': "the id of a key identifies it and opens nothing; the key itself is masked",
    "a1b2c3d4e5" * 4: "40 hexadecimal digits are a commit; Weights & Biases' old keys are found by their variable",
    "token: no such field": "a sentence of a message",
    "password: must be set before step 10": "a sentence of a message, with a digit behind the word",
    "max_token=1024 eos_token_id=50256 n_tokens: 99999999": "numbers, under names of the vocabulary",
    "token = 12345678": "a token's id",
    'external_token = "env:JUDGE_TOKEN"': "a reference says where the secret is",
    'api_key = "*** (env:JUDGE_TOKEN)"': "a masked reference",
    "self.token = other.token": "a line of a program in a traceback",
    "http://127.0.0.1:8000/pkg@1.2": "a port and a path, not a password",
    "npm_config_registry_of_the_company_x": "a name: no digit",
    "xai-is-a-word-with-many-hyphens-here": "a name: no digit",
    "sort_key: step_12ab34cd": "the key of an order",
}

VARIABLES = {
    **dict.fromkeys(("WANDB_API_KEY", "HF_TOKEN", "DB_PASS", "MYSQL_PWD", "GH_PAT", "SENTRY_DSN", "token"), True),
    **dict.fromkeys(("STRIPE_SK", "LDAP_BIND_PW", "MY_CREDS", "ADMIN_PIN", "HMAC", "OAUTH_BEARER"), True),
    **dict.fromkeys(("KUBE_CONFIG_DATA", "SERVICE_ACCOUNT_JSON", "VAULT_UNSEAL", "SESSION_ID"), True),
    **dict.fromkeys(("TOTP_SEED", "WALLET_SEED", "MNEMONIC"), True),
    "LICENSE": False,  # text that everybody may read, or the name of a file
    "REFRESH": False,  # an interval
    "ENCRYPTION_SALT": False,  # stored beside what it salts, by design
    "SIGNING_CERT": False,  # a certificate is public; its key is a variable with KEY in its name
    "SEED": False,  # random numbers of a run
    "TOKENIZERS_PARALLELISM": False,
    "PATH": False,
    "SPINNER": False,  # PIN counts as a whole word
    "TASK": False,
    "POWER_LIMIT": False,
}
"""Whether the value of a variable of this name is masked."""

KEYS = {
    **dict.fromkeys(("api_key", "apiKey", "X-Api-Key", "password", "passwd", "pwd", "secret", "client_secret"), True),
    **dict.fromkeys(("token", "access_token", "refresh_token", "authToken", "hf_token", "session_token"), True),
    **dict.fromkeys(("wandb_key", "private_key", "credentials", "bearer", "dsn", "ssh_key", "pat", "cookie"), True),
    **dict.fromkeys(("aws_secret_access_key", "secret_access_key", "X-Amz-Signature", "webhook_url"), True),
    **dict.fromkeys(("max_token", "pad_token", "think_end_token", "answer_key", "messages_key", "sort_key"), False),
    **dict.fromkeys(("secretary", "path", "license", "refresh", "tokens", "token_ids", "private_key_id"), False),
    "signature": True,  # of a presigned address; a column of functions' signatures needs another name
}
"""Whether text under a key is masked, in configurations and in recordings."""


@pytest.mark.parametrize("form", ANYWHERE)
def test_a_form_is_masked_in_logs_recordings_and_configurations(form: str) -> None:
    text = f"it said {ANYWHERE[form]}"
    for output in (redacted(text), masked_text(text), str(masked({"a": [text]})), str(redacted_tree({"a": [text]}))):
        assert "***" in output and R not in output and HEX not in output and "QPZRY9X8QPZ" not in output


@pytest.mark.parametrize("form", PRINTED)
def test_a_form_is_masked_in_what_is_printed_and_stays_in_recorded_text(form: str) -> None:
    assert "***" in redacted(PRINTED[form]) and R not in redacted(PRINTED[form])
    assert redacted(redacted(PRINTED[form])) == redacted(PRINTED[form])


@pytest.mark.parametrize("text", NO_SECRETS)
def test_what_is_no_secret_is_printed_as_it_is(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize("name", VARIABLES)
def test_names_of_variables_are_decided(name: str) -> None:
    assert is_secret_variable(name) == VARIABLES[name]
    assert (R in secrets_of({name: R})) == VARIABLES[name]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", ["plain text", ["plain text", "and more"], {"inner": "plain text"}])
def test_keys_are_decided_alike_in_configurations_and_recordings(key: str, value: Any) -> None:
    assert is_secret_name(key) == KEYS[key]
    assert ("plain" not in str(masked({key: value}))) == KEYS[key]
    if not isinstance(value, dict):  # whose own keys decide in a recording
        assert ("plain" not in str(redacted_tree({"a": {key: value}}))) == KEYS[key]


def test_bytes_under_the_name_of_a_secret_are_masked_and_references_stay() -> None:
    assert redacted_tree({"password": b"x", "token": "env:A", "secret": "*** (env:A)", "pwd": 5}) == {
        "password": "***",
        "token": "env:A",
        "secret": "*** (env:A)",
        "pwd": 5,
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "text",
    [
        "a: ",
        "a=b ",
        "--a ",
        "://a:b",
        "curl -u ",
        "machine a ",
        "Cookie: a",
        "eyJ",
        "eyJ-",
        "token=",
        "token:x1",
        '"',
        "x-",
        "sk-1",
    ],
)
def test_masking_takes_time_linear_in_the_text(text: str) -> None:
    """What is quadratic would take minutes."""
    assert len(redacted(text * (100_000 // len(text)))) > 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_no_characters_that_turn_text_around_and_a_file_gets_them_all() -> None:
    text = "run \u202eeman\u202c \u2066x\u2069 größe 日本 \x1b[1mbold\x1b[0m\n"
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        RedactedStream(stream).write(text)
    assert terminal.getvalue() == "run \\u202eeman\\u202c \\u2066x\\u2069 größe 日本 \x1b[1mbold\x1b[0m\n"
    assert file.getvalue() == text
