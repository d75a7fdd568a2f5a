"""Stores models in transformers' format and adapters in PEFT's format."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from safetensors import SafetensorError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import SkyRLLoraConfig
from skyrl.errors import RunError
from skyrl.models.files.loading import generation_ends, load_tokenizer, model_source
from skyrl.models.files.meta_model import causal_lm_skeleton
from skyrl.models.lora import adapter_settings
from skyrl.models.output_head import output_embeddings
from skyrl.storage.atomic import atomic_folder
from skyrl.storage.modes import save_tensors
from skyrl.tree import FrozenDict

# Storing a model makes transformers import DeepSpeed, which logs a message about its accelerator.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to" not in record.getMessage())


@frozen(kw_only=True)
class ModelFolder:
    """A folder that a trained model is stored into, with its tokenizer."""

    like: str
    """The model that training started from, whose architecture, tokenizer and generation defaults are stored."""

    tokenizer_path: str | None = None
    """Path of a tokenizer other than the model's. None: the model's own."""

    use_fast_tokenizer: bool = True
    folder: Path
    chat_template: str | None = None
    """The template that the model was trained with, its variables included. None: the tokenizer's own."""

    overrides: Mapping[str, Any] = FrozenDict()
    """Values of the model's configuration that training replaced."""

    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer to store, with the chat template."""
        tokenizer = load_tokenizer(self.tokenizer_path or self.like, use_fast=self.use_fast_tokenizer)
        tokenizer.chat_template = self.chat_template or tokenizer.chat_template
        return tokenizer


@frozen(kw_only=True)
class Export(ModelFolder):
    """Stores weights as a model folder. It runs where the weights are gathered, so it can be pickled."""

    turn_end: int | None = None
    """A token that ends turns in training, added to the tokens that stop generation. None: none is added."""

    def __call__(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Store `weights`, whole tensors by name in their own shapes, gathered in the memory of the host. See
        `save_pretrained`.
        """
        gathered = {name: weight.detach().to("cpu", copy=True) for name, weight in weights}
        _replace_folder(self.folder, partial(self.write, gathered))

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write the model's files into an existing folder."""
        model = causal_lm_skeleton(self.like, attention="eager", overrides=self.overrides)
        with suppress(OSError):  # a model without such a file has the defaults of its architecture
            model.generation_config = GenerationConfig.from_pretrained(model_source(self.like))
        if self.turn_end is not None:
            ends = generation_ends(self.like)
            model.generation_config.eos_token_id = [*ends, *({self.turn_end} - {*ends})]
        _write(weights, model, self.tokenizer(), folder)


@frozen(kw_only=True)
class AdapterExport:
    """Stores an adapter as a PEFT folder. It runs where the weights are gathered, so it can be pickled."""

    like: str
    """The model that the adapter is for."""

    lora: SkyRLLoraConfig
    folder: Path

    def __call__(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Store `weights`: A (rank, in) and B (out, rank) of the adapted layers alone, as PEFT names them.

        Raises `RunError` if writing fails.
        """
        gathered = {name: weight.detach().to("cpu", copy=True).contiguous() for name, weight in weights}
        settings = adapter_settings(self.lora, self.like, gathered)

        def fill(scratch: Path) -> None:
            settings.save_pretrained(str(scratch))
            save_tensors(gathered, scratch / "adapter_model.safetensors", metadata={"format": "pt"})

        _replace_folder(self.folder, fill)


def save_pretrained(
    weights: Mapping[str, Tensor], model: PreTrainedModel, tokenizer: ChatTokenizer, folder: Path
) -> None:
    """Store a model in transformers' format, from `weights` under their state-dict names, completely or not at all.

    Each weight has the shape that the architecture gives it. `model` has the architecture and the generation defaults;
    its configuration is stored with `tie_word_embeddings` as the weights are.
    A model that was in `folder` before is replaced only when the new one is complete. Raises `RunError` if writing
    fails.
    """
    _replace_folder(folder, partial(_write, weights, model, tokenizer))


def _write(weights: Mapping[str, Tensor], model: PreTrainedModel, tokenizer: ChatTokenizer, folder: Path) -> None:
    disable_progress_bar()
    _say_whether_tied(model, weights)
    generation: GenerationConfig | None = getattr(model, "generation_config", None)  # a classifier generates nothing
    if generation is not None:
        try:
            generation.validate(strict=True)
        except ValueError:  # many models have sampling settings with sampling off, which transformers refuses to store
            generation.do_sample = True
    model.save_pretrained(folder, state_dict={name: weight.detach().cpu() for name, weight in weights.items()})
    tokenizer.save_pretrained(folder)


def _replace_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Replace a folder by one that `fill` writes; the old content is deleted once the new one is complete. Raises
    `RunError`.
    """
    try:
        with atomic_folder(folder) as scratch:
            fill(scratch)
    except (OSError, SafetensorError) as error:
        raise RunError(f"the model cannot be stored in {folder}: {error}") from error


def _say_whether_tied(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Correct `tie_word_embeddings` of the model's configuration if the head is another matrix than the embedding, or
    is not among the weights. A wrong value would make engines ignore the head, or invent one.
    """
    head = output_embeddings(model)
    embedding = model.get_input_embeddings()
    names = {module: f"{name}.weight" for name, module in model.named_modules()}
    if head is None or head not in names or embedding not in names or names[embedding] not in weights:
        return
    head_weight = weights.get(names[head])
    for config in (model.config, model.config.get_text_config()):
        if head_weight is None:
            config.tie_word_embeddings = True
        elif not torch.equal(head_weight, weights[names[embedding]]):
            config.tie_word_embeddings = False
