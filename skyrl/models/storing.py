"""Storing models as transformers does, and adapters as PEFT does, for others to load."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import frozen
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import SkyRLLoraConfig
from skyrl.errors import RunError
from skyrl.models.loading import generation_ends, load_tokenizer, model_source
from skyrl.models.lora import adapter_settings
from skyrl.models.meta_model import causal_lm_skeleton
from skyrl.tree import FrozenDict

# Storing a model makes transformers import DeepSpeed, which has a word about its accelerator for those who use it.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to" not in record.getMessage())


@frozen(kw_only=True)
class Export:
    """Stores weights as a model folder. It runs where the weights are gathered, so it can be pickled."""

    like: str
    """The model that training started from: its architecture, its tokenizer and its generation defaults are stored."""

    tokenizer_path: str | None = None
    """A tokenizer other than the model's."""

    use_fast_tokenizer: bool = True
    folder: Path
    chat_template: str | None = None
    """The template that the model was trained with. None: that of its tokenizer."""

    overrides: Mapping[str, Any] = FrozenDict()
    """Values of its configuration that training replaced."""

    turn_end: int | None = None
    """A token that ends the turns that were learned; generation stops at it, too. None: no other than before."""

    def __call__(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Store `weights`, whole tensors by name in their own shapes, gathered in the memory of the host. See
        `save_pretrained`.
        """
        gathered = {name: weight.detach().to("cpu", copy=True) for name, weight in weights}
        model = causal_lm_skeleton(self.like, attention="sdpa", overrides=self.overrides)
        with suppress(OSError):  # a model without such a file has the defaults of its architecture
            model.generation_config = GenerationConfig.from_pretrained(model_source(self.like))
        if self.turn_end is not None:
            ends = generation_ends(self.like)
            model.generation_config.eos_token_id = [*ends, *({self.turn_end} - {*ends})]
        tokenizer = load_tokenizer(self.tokenizer_path or self.like, use_fast=self.use_fast_tokenizer)
        tokenizer.chat_template = self.chat_template or tokenizer.chat_template
        save_pretrained(gathered, model, tokenizer, self.folder)


@frozen(kw_only=True)
class AdapterExport:
    """Stores an adapter as a PEFT folder. It runs where the weights are gathered, so it can be pickled."""

    like: str
    """The model that the adapter is for."""

    lora: SkyRLLoraConfig
    folder: Path

    def __call__(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Store `weights`: A (rank, in) and B (out, rank) of the adapted layers alone, as PEFT names them.

        Raises `RunError` if the disk is full.
        """
        gathered = {name: weight.detach().to("cpu", copy=True).contiguous() for name, weight in weights}
        settings = adapter_settings(self.lora, self.like, gathered)

        def fill(scratch: Path) -> None:
            settings.save_pretrained(str(scratch))
            save_file(gathered, scratch / "adapter_model.safetensors", metadata={"format": "pt"})

        _replace_folder(self.folder, fill)


def save_pretrained(
    weights: Mapping[str, Tensor], model: PreTrainedModel, tokenizer: ChatTokenizer, folder: Path
) -> None:
    """Store a model as transformers does, from `weights` under their state-dict names, all of it or nothing.

    Each weight has the shape that the architecture gives it. `model` has the architecture and the generation defaults.
    A model that stood in `folder` before is replaced, and
    lost only once the new one is whole. Raises `RunError` if the disk does not take it.
    """
    disable_progress_bar()

    def fill(scratch: Path) -> None:
        _make_storable(getattr(model, "generation_config", None))  # a classifier generates nothing
        model.save_pretrained(scratch, state_dict={name: weight.detach().cpu() for name, weight in weights.items()})
        tokenizer.save_pretrained(scratch)

    _replace_folder(folder, fill)


def _replace_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Replace a folder's content by what `fill` writes into an empty one; the old content is deleted once the new one
    is complete. Raises `RunError`.
    """
    scratch, old = (folder.with_name(f".{folder.name}.{state}") for state in ("new", "old"))
    try:
        for leftover in (scratch, old):
            shutil.rmtree(leftover, ignore_errors=True)
        scratch.mkdir(parents=True)
        fill(scratch)
        _to_disk(scratch)
        if folder.exists():
            folder.rename(old)
        scratch.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise RunError(f"the model cannot be stored in {folder}: {error}") from error


def _make_storable(generation: GenerationConfig | None) -> None:
    """Sampling settings with sampling off come with many models, and transformers stores them only with sampling on."""
    if generation is not None:
        try:
            generation.validate(strict=True)
        except ValueError:
            generation.do_sample = True


def _to_disk(folder: Path) -> None:
    """Flush a file from the system's buffers to the disk."""
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
