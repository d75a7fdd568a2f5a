"""Loads transformers models and tokenizers; failures raise `ModelError`, one sentence with a remedy."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sized
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file
from transformers.utils.logging import disable_progress_bar

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.errors import ModelError
from skyrl.models.files.foreign_code import refuse_foreign_code
from skyrl.models.files.overrides import with_overrides
from skyrl.models.files.paths import local_folder, model_failure
from skyrl.tree import FrozenDict, joined

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
    text = str(error).strip()
    if isinstance(error, SafetensorError):
        reason = f"its weights are damaged or incomplete ({text}): copy them again"
    elif remedy := next((remedy for piece, remedy in _REMEDIES if piece in text), None):
        reason = remedy.format(flash_attn=joined(table, "flash_attn"))
    else:
        reason = f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
    return ModelError(f"the {kind} {path} cannot be loaded: {reason}")


SAMPLE_TEXT = "Sort: hgdbha, 12 + 34 = 46!\n\tÜber naïve 東京 #### 7.5  end"
"""Text on which tokenizers that read differently differ."""


def load_causal_lm(
    path: str,
    *,
    dtype: torch.dtype,
    attention: str,
    device: torch.device,
    table: str = "trainer",
    overrides: Mapping[str, Any] = FrozenDict(),
    init_seed: int | None = None,
) -> PreTrainedModel:
    """A transformers causal language model from a local folder (`~` is expanded) or the hub, on `device`.

    `attention` is a name of transformers: `sdpa`, `flash_attention_2`, `eager`. Messages name fields of the
    configuration below `table`. `overrides` replace values of the model's own configuration. With `init_seed` the
    weights are drawn from it, as the architecture initializes them, and none are loaded. Raises `ModelError`, also if
    weights are missing, which transformers would draw at random.
    """
    source = model_source(path, weights=init_seed is None)
    if device.type == "cuda" and not torch.cuda.is_available():
        field = joined(table, "device")
        raise ModelError(f"{field} is cuda, but this torch sees no CUDA device: set {field} = cpu")
    disable_progress_bar()
    config = load_config(path, overrides)
    if init_seed is not None:  # drawn on the CPU in float32 so that all devices and types get the same weights
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(init_seed)
            drawn: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
        with suppress(OSError):  # a model without such a file has the defaults of its architecture
            drawn.generation_config = GenerationConfig.from_pretrained(model_source(path))
        random: PreTrainedModel = drawn.to(device=device, dtype=dtype)
        return random
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers, its hub client and safetensors each raise types of their own
        raise model_error("model", path, error, table=table) from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"the model {path} is incomplete: no weights are stored for {missing[0]}{more}")
    placed: PreTrainedModel = model.to(device)
    return placed


def load_tokenizer(path: str, *, use_fast: bool = True, table: str = "trainer") -> ChatTokenizer:
    """The tokenizer of a model or of a separate folder, with a chat template and a padding token. Raises `ModelError`.

    `use_fast=False` requests the tokenizer written in Python. If transformers has none, the error names the field below
    `table`.
    """
    folder = local_folder(path)
    is_no_model = folder is not None and folder.is_dir() and not (folder / "config.json").is_file()
    source = str(folder) if is_no_model else model_source(path)
    tokenizer: Any = copy.deepcopy(_checked_tokenizer(path, source, use_fast, _state_of(Path(source))))
    if tokenizer.is_fast and not use_fast:
        raise ModelError(
            f"the tokenizer of {path} exists in its fast form only: "
            f"set {joined(table, 'disable_fast_tokenizer')} = false"
        )
    loaded: ChatTokenizer = tokenizer
    return loaded


@lru_cache(maxsize=2)  # of the policy and of a teacher
def _checked_tokenizer(
    path: str, source: str, use_fast: bool, state: frozenset[tuple[str, int, int]]
) -> PreTrainedTokenizerBase:
    """A tokenizer that was loaded and checked. Each caller makes a copy, in a fraction of the time of loading."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source, use_fast=use_fast, trust_remote_code=False)
        stored_in = cached_file(source, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    except Exception as error:  # as above
        raise model_error("tokenizer of", path, error) from error
    _require_what_chats_need(tokenizer, path)
    if tokenizer.is_fast and type(tokenizer.backend_tokenizer.model).__name__ == "BPE":
        tokenizer.clean_up_tokenization_spaces = False  # ignored for BPE, and warned about at the first decoding
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if stored_in is not None:
        _compare_with_file(tokenizer, stored_in, path)
    checked: PreTrainedTokenizerBase = tokenizer
    return checked


def _state_of(folder: Path) -> frozenset[tuple[str, int, int]]:
    """Name, time and size of each file in a folder, which show that it has changed; nothing for a name on the hub."""
    if not folder.is_dir():
        return frozenset()
    stats = ((file.name, file.stat()) for file in folder.iterdir() if file.exists())
    return frozenset((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


def max_positions(path: str, overrides: Mapping[str, Any] = FrozenDict()) -> int | None:
    """Largest number of tokens of a sequence, from the model's configuration; None if it has no bound."""
    config = load_config(path, overrides)
    positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions


def generation_ends(path: str) -> tuple[int, ...]:
    """Tokens at which the model's generation stops, from its generation settings or else its configuration."""
    try:
        ends = end_tokens(GenerationConfig.from_pretrained(model_source(path)))
    except OSError:  # there is no such file
        ends = ()
    return ends or end_tokens(load_config(path).get_text_config())


def end_tokens(config: PretrainedConfig | GenerationConfig) -> tuple[int, ...]:
    """End-of-sequence tokens of one of transformers' configurations, which has one, several or none."""
    result = getattr(config, "eos_token_id", None)
    return () if result is None else (result,) if isinstance(result, int) else tuple(result)


def refuse_small_vocabulary(path: str, tokenizer: Sized) -> None:
    """Raises `ModelError` if the tokenizer has tokens that the model has no embedding for."""
    rows = load_config(path).get_text_config().vocab_size
    if len(tokenizer) > rows:
        raise ModelError(f"the tokenizer has {len(tokenizer)} tokens, the model {path} embeddings for {rows} only")


def load_config(path: str, overrides: Mapping[str, Any] = FrozenDict()) -> PretrainedConfig:
    """The model's transformers configuration, with some of its values replaced. Raises `ModelError`."""
    source = model_source(path)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # as above
        raise model_error("configuration of", path, error) from error
    return with_overrides(config, overrides)


def model_source(path: str, *, weights: bool = False) -> str:
    """The hub name or folder to pass to transformers. Raises `ModelError` for a folder that cannot be a model, a name
    that the hub does not have, and a model whose configuration requests code of its own; with
    `weights`, also for a folder without weights.
    """
    reason = model_failure(path, weights=weights)
    if reason:
        raise ModelError(reason)
    source = str(local_folder(path) or path)
    refuse_foreign_code(source)
    return source


def _require_what_chats_need(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Refuse a tokenizer without vocabulary, chat template or end token. For a folder without a tokenizer, transformers
    silently makes an empty one.
    """
    if not tokenizer.encode(SAMPLE_TEXT, add_special_tokens=False):
        raise ModelError(
            f"the tokenizer of {path} has no vocabulary: copy tokenizer.json and related files next to the model"
        )
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of {path} has no chat template, so prompts cannot be written for it: use the instruct "
            "version of the model, or put a chat_template.jinja next to it"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {path} has no end-of-sequence token, so no answer could ever end")


def _compare_with_file(tokenizer: PreTrainedTokenizerBase, file: str, path: str) -> None:
    """Compare a tokenizer with its file: transformers 5 silently replaces its pipeline for some model types."""
    stored = Tokenizer.from_file(file)
    stored.no_truncation()
    stored.no_padding()
    ids = stored.encode(SAMPLE_TEXT, add_special_tokens=False).ids
    loaded = tokenizer.encode(SAMPLE_TEXT, add_special_tokens=False)
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if loaded != ids or text != stored.decode(ids, skip_special_tokens=False):
        raise ModelError(
            f"the tokenizer of {path} does not read text as its own tokenizer.json does: for this type of model, "
            f"transformers builds a {type(tokenizer).__name__} whatever is stored. Store one of that class "
            "(for qwen2: byte-level BPE)"
        )
