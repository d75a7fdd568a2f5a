"""Loading transformers models and tokenizers, and storing them for others. What cannot be loaded is a `ModelError`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from skyrl.errors import ModelError
from skyrl.models.paths import check_model_path, local_folder

_PROBE = "Sort: hgdbha, 12 + 34 = 46!\n\tÜber naïve 東京 #### 7.5  end"


def load_causal_lm(
    path: str, *, dtype: torch.dtype, attention: str, device: torch.device, trust_remote_code: bool = False
) -> Any:
    """A transformers causal language model from a local folder (`~` is expanded) or the hub, on `device`.

    `attention` is a name of transformers: `sdpa`, `flash_attention_2`, `eager`. Raises `ModelError`.
    """
    from transformers import AutoModelForCausalLM

    source = _source(path)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("trainer.device is cuda, but this torch sees no CUDA device: set trainer.device = cpu")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
        )
    except Exception as error:  # transformers, its hub client and safetensors each raise types of their own
        raise ModelError(f"the model {path} cannot be loaded: {_first_line(error)}") from error
    return model.to(device)


def load_tokenizer(path: str, *, use_fast: bool = True) -> Any:
    """The tokenizer beside a model, with a chat template and a padding token. Raises `ModelError`."""
    from transformers import AutoTokenizer

    source = _source(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, use_fast=use_fast)
    except Exception as error:
        raise ModelError(f"the tokenizer of {path} cannot be loaded: {_first_line(error)}") from error
    if not tokenizer.chat_template:
        raise ModelError(f"the tokenizer of {path} has no chat template, so prompts cannot be written for it")
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {path} has no end-of-sequence token, so an answer could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    _compare_with_file(tokenizer, Path(source), path)
    return tokenizer


def save_pretrained(weights: Mapping[str, Tensor], model: Any, tokenizer: Any, folder: Path) -> None:
    """Store a model as transformers does, from `weights` under their state-dict names, all of it or nothing.

    `model` gives the architecture and generation defaults. An older model in `folder` is replaced.
    """
    scratch = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    state = {name: weight.detach().cpu() for name, weight in weights.items()}
    model.save_pretrained(scratch, state_dict=state)
    tokenizer.save_pretrained(scratch)
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)


def _source(path: str) -> str:
    """What transformers is given. Raises `ModelError` if it is a folder that cannot be a model."""
    why = check_model_path(path)
    if why:
        raise ModelError(why)
    return str(local_folder(path) or path)


def _compare_with_file(tokenizer: Any, folder: Path, path: str) -> None:
    """transformers 5 replaces the pipeline of a tokenizer that lies beside some model types, and says nothing."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return
    stored = Tokenizer.from_file(str(file))
    ids = stored.encode(_PROBE, add_special_tokens=False).ids
    loaded = tokenizer.encode(_PROBE, add_special_tokens=False)
    if loaded != ids or tokenizer.decode(loaded) != stored.decode(ids):
        raise ModelError(
            f"the tokenizer of {path} does not read text as its own tokenizer.json does: transformers replaces the pipeline "
            "of some tokenizers on loading. Store it as the tokenizer class of the model type, such as byte-level BPE for qwen2"
        )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
