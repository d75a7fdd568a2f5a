"""Sizes of a decoder-only transformer, from the values of its `config.json`: numbers of weights, and cache per token.

Layers are those of Llama, Qwen2, Qwen3 and Qwen3-MoE as implemented in transformers: grouped-query attention, then a
gated feed-forward network or a mixture of such experts, each preceded by a norm. Weights of other layers are `Counted`
in the model's modules, where transformers is installed (`skyrl.models.files.meta_model`); their activations and their
cache are taken for those of a Llama of these sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen


@frozen(kw_only=True)
class CountedWeights:
    """Numbers of weights, counted in a model's modules. A tied weight counts once."""

    layers: tuple[tuple[int, ...], ...]
    """Numbers of weights of each tensor, layer by layer."""

    experts: tuple[int, ...]
    """Number of weights of the experts, layer by layer."""

    outer: tuple[int, ...]
    """Number of weights of each tensor outside the layers."""

    sides: int
    """Sum of the inputs and outputs of all linear modules of the layers."""


@frozen(kw_only=True)
class ModelShape:
    """The sizes that memory and time depend on."""

    layers: int
    hidden: int
    intermediate: int
    """Inner width of the feed-forward network, or of one expert."""

    heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    tied: bool = False
    """Whether the output matrix is the embedding."""

    attention_bias: bool = False
    """Whether query, key and value projections have biases."""

    head_norms: bool = False
    """Whether queries and keys are normalized in each head, as in Qwen3."""

    experts: int = 0
    """Number of experts per layer; 0: a plain feed-forward network."""

    experts_per_token: int = 0

    converts: bool = True
    """Whether the model type has a converter to Megatron's layout; set by `shape_of`."""

    is_estimated: bool = False
    """Whether the layers of this model type are others, so that its weights are only estimated; set by `shape_of`."""

    counted: CountedWeights | None = None
    """Weights as the model's modules have them; None: they follow from the sizes."""

    packs: bool = True
    """Whether rows can be laid end to end in one; else they are padded."""

    shares_prompts: bool = True
    """Whether a group's prompt can be computed once."""

    @property
    def query_width(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * self.head_size

    @property
    def key_width(self) -> int:
        """Width of the keys of all heads, and of the values."""
        return self.key_heads * self.head_size

    @property
    def layer_tensors(self) -> tuple[int, ...]:
        """Number of weights of each tensor of one layer, of the largest one if they differ."""
        if self.counted:
            return max(self.counted.layers, key=sum)
        attention = (self.hidden * self.query_width, *(2 * (self.hidden * self.key_width,)))
        biases = (self.query_width, self.key_width, self.key_width) if self.attention_bias else ()
        norms = (self.hidden, self.hidden, *((self.head_size, self.head_size) if self.head_norms else ()))
        matrix = self.hidden * self.intermediate
        if self.experts:  # transformers keeps all experts of a layer in two tensors
            feed_forward = (self.hidden * self.experts, 2 * matrix * self.experts, matrix * self.experts)
        else:
            feed_forward = (matrix, matrix, matrix)
        return (*attention, self.query_width * self.hidden, *biases, *norms, *feed_forward)

    @property
    def layer_experts(self) -> int:
        """Number of weights of the experts of one layer."""
        if self.counted:
            return max(self.counted.experts)
        return 3 * self.hidden * self.intermediate * self.experts

    @property
    def layer_parameters(self) -> int:
        """Number of weights of one layer, of the largest one if they differ."""
        return sum(self.layer_tensors)

    @property
    def inner_parameters(self) -> int:
        """Number of weights of all layers."""
        return sum(map(sum, self.counted.layers)) if self.counted else self.layers * self.layer_parameters

    @property
    def outer_tensors(self) -> tuple[int, ...]:
        """Number of weights of each tensor outside the layers: embedding, last norm, output matrix."""
        if self.counted:
            return self.counted.outer
        table = self.vocabulary * self.hidden
        return (table, self.hidden) if self.tied else (table, self.hidden, table)

    @property
    def tensors(self) -> tuple[int, ...]:
        """Number of weights of every tensor."""
        layers = sum(self.counted.layers, ()) if self.counted else self.layers * self.layer_tensors
        return self.outer_tensors + layers

    @property
    def parameters(self) -> int:
        """Number of all weights, tied ones counted once."""
        return sum(self.outer_tensors) + self.inner_parameters

    @property
    def active_parameters(self) -> int:
        """Number of weights in the matrices that one token is multiplied with: only its active experts count, and the
        embedding, which is a lookup, does not.
        """
        experts = sum(self.counted.experts) if self.counted else self.layers * self.layer_experts
        idle = experts * max(0, self.experts - self.experts_per_token) // max(1, self.experts)
        return self.inner_parameters - idle + self.vocabulary * self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Weights of a low-rank adapter (LoRA, arXiv:2106.09685) of every linear layer but the output matrix."""
        if self.counted:
            return rank * self.counted.sides
        hidden, inner = self.hidden, self.intermediate
        sides = 2 * hidden + 2 * self.query_width + 2 * (hidden + self.key_width)
        if not self.experts:
            sides += 3 * (hidden + inner)
        return rank * sides * self.layers

    def cache_bytes_per_token(self, size: float) -> float:
        """Bytes of the keys and values of one token in all layers, at `size` bytes per number."""
        return 2 * self.layers * self.key_width * size


CONVERTED = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe")
"""Model types that have a converter to Megatron's layout."""

COUNTED = {
    *("cohere", "cohere2", "exaone4", "gemma", "gemma2", "gemma3_text", "glm4", "granite", "llama", "ministral3"),
    *("mistral", "mixtral", "olmo2", "olmo3", "olmoe", "phi3", "phimoe", "qwen2", "qwen3", "qwen3_moe", "smollm3"),
}
"""Model types whose weights are counted to 1 %. Others have shared experts, latent attention, a state along the row."""

NAMES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "vocabulary": "vocab_size",
}
"""Sizes that every `config.json` must contain."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts of a layer."""


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """The sizes from the values of a `config.json`; None if a required one is missing."""
    text = config.get("text_config")
    values: Mapping[str, Any] = {**config, **text} if isinstance(text, Mapping) else config
    required = {name: values.get(key) for name, key in NAMES.items()}
    experts = int(next((values[name] for name in EXPERTS if values.get(name)), 0))
    inner = (values.get("moe_intermediate_size") if experts else None) or values.get("intermediate_size")
    if not all(type(size) is int and size > 0 for size in (*required.values(), inner)):
        return None
    sizes: dict[str, Any] = {name: int(value) for name, value in required.items() if value is not None}
    kind, heads = str(values.get("model_type", "")), sizes["heads"]
    return ModelShape(
        **sizes,
        intermediate=int(inner or 0),
        key_heads=int(values.get("num_key_value_heads") or heads),
        head_size=int(values.get("head_dim") or sizes["hidden"] // heads),
        tied=bool(values.get("tie_word_embeddings", False)),
        attention_bias=kind.startswith("qwen2") or bool(values.get("attention_bias", False)),
        head_norms=kind.startswith("qwen3"),
        experts=experts,
        experts_per_token=int(values.get("num_experts_per_tok") or 0),
        converts=kind in CONVERTED,
        is_estimated=kind not in COUNTED,
    )
