"""Loading transformers models and tokenizers, and storing them for others. What cannot be loaded is a `ModelError`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.hub import cached_file
from transformers.utils.logging import disable_progress_bar

from skyrl.errors import ModelError, RunError
from skyrl.models.failures import model_error
from skyrl.models.paths import check_model_path, local_folder

_PROBE = "Sort: hgdbha, 12 + 34 = 46!\n\tÜber naïve 東京 #### 7.5  end"


def load_causal_lm(
    path: str, *, dtype: torch.dtype, attention: str, device: torch.device, trust_remote_code: bool = False
) -> Any:
    """A transformers causal language model from a local folder (`~` is expanded) or the hub, on `device`.

    `attention` is a name of transformers: `sdpa`, `flash_attention_2`, `eager`. Raises `ModelError`, also for weights
    that are not all there: transformers would draw the rest at random.
    """
    source = _source(path)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("trainer.device is cuda, but this torch sees no CUDA device: set trainer.device = cpu")
    disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers, its hub client and safetensors each raise types of their own
        raise model_error("model", path, error) from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"the model {path} is incomplete: no weights are stored for {missing[0]}{more}")
    return model.to(device)


def load_tokenizer(path: str, *, use_fast: bool = True) -> Any:
    """The tokenizer beside a model, with a chat template and a padding token. Raises `ModelError`.

    `use_fast=False` asks for the one written in Python; it is refused where transformers has none.
    """
    source = _source(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, use_fast=use_fast, trust_remote_code=False)
        stored_in = cached_file(source, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    except Exception as error:  # as above
        raise model_error("tokenizer of", path, error) from error
    if tokenizer.is_fast and not use_fast:
        raise ModelError(
            f"the tokenizer of {path} exists in its fast form only: set trainer.disable_fast_tokenizer = false"
        )
    _require_what_chats_need(tokenizer, path)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if stored_in is not None:
        _compare_with_file(tokenizer, stored_in, path)
    return tokenizer


def max_positions(path: str) -> int | None:
    """How many tokens a sequence may have, from the model's configuration; None if it names no bound."""
    source = _source(path)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # as above
        raise model_error("configuration of", path, error) from error
    positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions


def refuse_small_vocabulary(model: Any, tokenizer: Any, path: str) -> None:
    """Raises `ModelError` if the tokenizer has tokens that the model has no embedding for."""
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise ModelError(f"the tokenizer of {path} has {len(tokenizer)} tokens, its model embeddings for {rows} only")


def save_pretrained(weights: Mapping[str, Tensor], model: Any, tokenizer: Any, folder: Path) -> None:
    """Store a model as transformers does, from `weights` under their state-dict names, all of it or nothing.

    `model` gives the architecture and the generation defaults. A model that stood in `folder` before is replaced, and
    lost only once the new one is whole. Raises `RunError` if the disk does not take it.
    """
    scratch, old = (folder.with_name(f".{folder.name}.{state}") for state in ("new", "old"))
    try:
        for leftover in (scratch, old):
            shutil.rmtree(leftover, ignore_errors=True)
        scratch.mkdir(parents=True)
        _make_storable(model.generation_config)
        model.save_pretrained(scratch, state_dict={name: weight.detach().cpu() for name, weight in weights.items()})
        tokenizer.save_pretrained(scratch)
        _to_disk(scratch)
        if folder.exists():
            folder.rename(old)
        scratch.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise RunError(f"the model cannot be stored in {folder}: {error}") from error


def _source(path: str) -> str:
    """What transformers is given. Raises `ModelError` if it is a folder that cannot be a model."""
    why = check_model_path(path)
    if why:
        raise ModelError(why)
    return str(local_folder(path) or path)


def _require_what_chats_need(tokenizer: Any, path: str) -> None:
    """transformers makes an empty tokenizer of the model's kind where a folder holds none, and says nothing."""
    if not tokenizer.encode(_PROBE, add_special_tokens=False):
        raise ModelError(f"the tokenizer of {path} knows no text: copy tokenizer.json and its like beside the model")
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of {path} has no chat template, so prompts cannot be written for it: take the instruct "
            "version of the model, or put a chat_template.jinja beside it"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {path} has no end-of-sequence token, so no answer could ever end")


def _compare_with_file(tokenizer: Any, file: str, path: str) -> None:
    """transformers 5 replaces the pipeline of a tokenizer that lies beside some model types, and says nothing."""
    stored = Tokenizer.from_file(file)
    stored.no_truncation()
    stored.no_padding()
    ids = stored.encode(_PROBE, add_special_tokens=False).ids
    loaded = tokenizer.encode(_PROBE, add_special_tokens=False)
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if loaded != ids or text != stored.decode(ids, skip_special_tokens=False):
        raise ModelError(
            f"the tokenizer of {path} does not read text as its own tokenizer.json does: beside this type of model "
            f"transformers makes a {type(tokenizer).__name__} of whatever is stored. Store one of that class "
            "(for qwen2: byte-level BPE)"
        )


def _make_storable(generation: Any) -> None:
    """Sampling settings with sampling off come with many models, and transformers stores them only with sampling on."""
    if generation is not None:
        try:
            generation.validate(strict=True)
        except ValueError:
            generation.do_sample = True


def _to_disk(folder: Path) -> None:
    """Nothing of it is left in the system's buffers."""
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
