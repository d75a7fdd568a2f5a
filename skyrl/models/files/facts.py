"""Facts from the files of a model, read without torch and transformers, for checks before a run starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from skyrl.hub import cached_folder
from skyrl.models.files.paths import local_folder
from skyrl.tree.files import stored_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TOKENIZERS = ("tokenizer.json", "*.model", "vocab*", "*.tiktoken", "tekken.json")
"""Vocabulary files; a tokenizer needs one of them."""

REUSE_PROMPTS = ("llama", "qwen2", "qwen3")
"""Types of models (`model_type` of `config.json`) for which the torch engine reuses the beginnings of prompts."""


@frozen(slots=False)
class ModelFiles:
    """The local folder of a model."""

    folder: Path

    tokenizer: Path | None = None
    """Folder of a tokenizer that replaces the model's own. None: the model's own is used."""

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer and its chat template."""
        return self.tokenizer or self.folder

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """`config.json`, or its text part for a multimodal model. Raises ValueError if it is damaged."""
        full_config = _table(self.folder / "config.json")
        text = full_config.get("text_config")
        return text if isinstance(text, dict) else full_config

    @property
    def positions(self) -> int | None:
        """Largest number of tokens of a sequence; None if the configuration has no bound."""
        result = self.config.get("max_position_embeddings")
        return result if isinstance(result, int) else None

    @property
    def sizes_to_cut(self) -> dict[str, int]:
        """Sizes that the tensor parallel size must divide, keyed by their names in messages."""
        return sizes_to_cut(self.config)

    @property
    def parts_under_megatron(self) -> dict[str, dict[str, int]]:
        """For each of Megatron's parallel dimensions, the sizes that its degree must divide, keyed by name."""
        return parts_under_megatron(self.config)

    @property
    def heads(self) -> int | None:
        """Attention heads of a layer; None if the configuration names them differently."""
        result = self.config.get("num_attention_heads")
        return result if isinstance(result, int) else None

    @property
    def experts(self) -> int | None:
        """Experts of a layer; None for a model without experts."""
        return _experts(self.config) or None

    @property
    def reuses_prompts(self) -> bool:
        """Whether the torch engine computes the model with its own forward pass, which reuses the beginnings of
        prompts; it knows more conditions, which few models miss (`FusedDecoder.supports`).
        """
        layers = self.config.get("layer_types") or ["full_attention"]
        return self.config.get("model_type") in REUSE_PROMPTS and set(layers) == {"full_attention"}

    @property
    def has_tokenizer(self) -> bool:
        """Whether the tokenizer's folder has a vocabulary file."""
        return any(any(self.tokenizer_folder.glob(pattern)) for pattern in _TOKENIZERS)

    @cached_property
    def chat_template(self) -> str | None:
        """The chat template, searched in transformers' order; None if there is none."""
        folder = self.tokenizer_folder
        file = folder / "chat_template.jinja"
        if file.is_file():
            return stored_text(file)
        for name in ("chat_template.json", "tokenizer_config.json"):
            result = _table(folder / name).get("chat_template") if (folder / name).is_file() else None
            if isinstance(result, list):
                result = next((item.get("template") for item in result if item.get("name") == "default"), None)
            if result:
                return str(result)
        return None

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens such as `eos_token`, as templates receive them."""
        tokens: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            file = self.tokenizer_folder / name
            if file.is_file():
                tokens |= {key: value for key, value in _table(file).items() if key.endswith("_token")}
        texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
        return {key: text for key, text in texts.items() if isinstance(text, str)}

    def count_tokens(self, text: str) -> int | None:
        """Number of tokens of a text; None without a `tokenizer.json` that the library `tokenizers` can read."""
        tokenizer = self._fast_tokenizer
        return None if tokenizer is None else len(tokenizer.encode(text, add_special_tokens=False).ids)

    @cached_property
    def vocabulary(self) -> int | None:
        """Number of tokens of the tokenizer, with those of `tokenizer_config.json`; None as in `count_tokens`."""
        if self._fast_tokenizer is None:
            return None
        file = self.tokenizer_folder / "tokenizer_config.json"
        added = _table(file).get("added_tokens_decoder") if file.is_file() else None
        tokens = added.values() if isinstance(added, dict) else ()
        texts = (token.get("content") for token in tokens if isinstance(token, dict))
        return len({*self._fast_tokenizer.get_vocab(), *texts, *self.special_tokens.values()})

    @cached_property
    def _fast_tokenizer(self) -> Tokenizer | None:
        file = self.tokenizer_folder / "tokenizer.json"
        if not file.is_file():
            return None
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception:  # noqa: BLE001 - the library raises nothing narrower; transformers reports it when it loads
            return None
        tokenizer.no_truncation()
        return tokenizer

    @property
    def parameters(self) -> int | None:
        """Number of weights, computed from the sizes in `config.json`; None if it names them differently.

        Counts a decoder's embeddings, attention and gated feed-forward layers, experts included; norms, biases and
        routers, less than a hundredth, are left out.
        """
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        if any(not isinstance(self.config.get(name), int) for name in sizes):
            return None
        vocabulary, hidden, layers, heads, inner = (int(self.config[name]) for name in sizes)
        head = self.config.get("head_dim") or hidden // heads
        groups = self.config.get("num_key_value_heads") or heads
        experts = _experts(self.config) or 1
        inner = self.config.get("moe_intermediate_size") or inner if experts > 1 else inner
        attention = hidden * head * 2 * (heads + groups)
        embeddings = vocabulary * hidden * (1 if self.config.get("tie_word_embeddings") else 2)
        return int(embeddings + layers * (attention + 3 * hidden * inner * experts))


def model_files(path: str, tokenizer: str | None = None) -> ModelFiles | None:
    """The files of a local model, or of the cached copy of a hub name, with the files of a separate tokenizer if one is
    given; None if either is not on this machine.
    """
    folder = local_folder(path) or cached_folder(path)
    other = (local_folder(tokenizer) or cached_folder(tokenizer)) if tokenizer is not None else None
    lacks_other = tokenizer is not None and (other is None or not other.is_dir())
    if folder is None or not (folder / "config.json").is_file() or lacks_other:
        return None
    return ModelFiles(folder, other)


def sizes_to_cut(config: Mapping[str, Any]) -> dict[str, int]:
    """Sizes that the tensor parallel size must divide, keyed by their names in messages, from the values of a
    transformers configuration. The vocabulary is not among them: it may be cut unevenly.
    """
    heads = config.get("num_attention_heads")
    result = {
        "attention heads": heads,
        "key and value heads": config.get("num_key_value_heads") or heads,
        "intermediate features": config.get("intermediate_size"),
    }
    return {name: size for name, size in result.items() if isinstance(size, int)}


def parts_under_megatron(config: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """For each of Megatron's parallel dimensions, the sizes that its degree must divide, keyed by their names in
    messages, from the values of a transformers configuration. The two dimensions of experts are present only for a
    model with experts.
    """
    layers, experts = config.get("num_hidden_layers"), _experts(config)
    matrices = sizes_to_cut(config)
    result = {"tensor_model": matrices, "pipeline_model": {"layers": layers} if isinstance(layers, int) else {}}
    inner = config.get("moe_intermediate_size") or config.get("intermediate_size")
    if experts and isinstance(inner, int):
        if not config.get("mlp_only_layers") and config.get("decoder_sparse_step", 1) == 1:
            matrices.pop("intermediate features", None)  # every layer has experts
        result |= {"expert_model": {"experts": experts}, "expert_tensor": {"features of an expert": inner}}
    return result


def _table(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError if it holds anything else."""
    content = json.loads(stored_text(file))
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def _experts(config: Mapping[str, Any]) -> int:
    """Experts of a layer; 0 for a model without experts."""
    counts = (config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return next((count for count in counts if isinstance(count, int) and count), 0)
