"""Turns the errors of transformers' loading functions into one sentence with a remedy."""

from __future__ import annotations

from safetensors import SafetensorError

from skyrl.errors import ModelError
from skyrl.tree import joined

_REMEDIES: tuple[tuple[str, str], ...] = (
    ("couldn't connect", "there is no such folder here, and the hub cannot be reached to fetch it: download it first"),
    ("is not a local folder", "it is neither a folder here nor a model on the hub that this account can see"),
    ("gated repo", "its authors ask for consent: accept their terms on its page and log in with `hf auth login`"),
    (
        "does not recognize this architecture",
        "the installed transformers does not know its architecture; a newer version may",
    ),
    (
        "GGUF model with architecture",
        "the installed transformers does not read its architecture from GGUF files; a newer version may",
    ),
    ("Unrecognized configuration class", "it is not a causal language model"),
    ("custom code", "it needs to run its own code, which is not allowed"),
    ("FlashAttention2", "FlashAttention is not installed: set {flash_attn} = false, or install flash-attn"),
    ("not a valid JSON file", "its config.json is damaged: copy it again"),
    (
        "ignore_mismatched_sizes",
        "its weights have other shapes than its config.json says: they belong to different models",
    ),
    (
        "instantiate the backend tokenizer",
        "the folder contains no tokenizer: copy tokenizer.json and related files there",
    ),
)
"""Part of a transformers message -> our message, in which `{flash_attn}` stands for the path of that field."""


def model_error(kind: str, path: str, error: Exception, *, table: str = "trainer") -> ModelError:
    """`kind` is `model` or `tokenizer`; `table` holds the fields that a remedy names. Raise the result from `error`."""
    return ModelError(f"the {kind} {path} cannot be loaded: {_failure_reason(error, table)}")


def _failure_reason(error: Exception, table: str) -> str:
    text = str(error).strip()
    if isinstance(error, SafetensorError):
        return f"its weights are damaged or incomplete ({text}): copy them again"
    for piece, remedy in _REMEDIES:
        if piece in text:
            return remedy.format(flash_attn=joined(table, "flash_attn"))
    first_line = text.splitlines()[0] if text else "no message"
    return f"{type(error).__name__}: {first_line}"
