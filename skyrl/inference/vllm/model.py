"""Facts that vLLM needs of a model before loading it: sizes, end-of-sequence tokens, names of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from skyrl.errors import ModelError, WeightSyncError
from skyrl.models.files.foreign_code import refuse_foreign_code
from skyrl.models.files.loading import model_error
from skyrl.models.files.naming import is_experts, named_weights, refuse_unnamed_experts, tied_names
from skyrl.models.files.overrides import changed_values, with_overrides
from skyrl.models.files.paths import local_folder
from skyrl.tree import FrozenDict
from skyrl.weight_receiver.incoming_weights import IncomingWeights, WeightInfo, summarize_problems, weight_info

HEAD_SIZES_ON_CPU = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head dimensions that the attention of vLLM 0.32 supports on a CPU. Any other fails at the first request."""


@frozen(kw_only=True)
class ModelFacts:
    """Facts from a model's configuration; its weights are not read."""

    head_dims: tuple[int, ...]
    """Sizes of the attention heads of its layers, each once."""

    kv_numbers_per_token: int
    """Number of values that one token adds to the cache: keys and values of all layers."""

    positions: int | None
    """Largest number of tokens in a sequence; None if the configuration has no limit."""

    eos_ids: tuple[int, ...]
    """Every id that ends a completion, except for the tokenizer's."""

    vocabulary: int
    """Number of token ids."""


@frozen(kw_only=True)
class ExpectedWeights:
    """A complete set of weights, under the names of the transformers model."""

    infos: dict[str, WeightInfo]
    """Description of each weight by name, each tied weight once."""

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(out, in) of each module with a matrix, by its name."""
        shapes = {name.removesuffix(".weight"): info.shape for name, info in self.infos.items()}
        return {name: (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}

    @property
    def has_experts(self) -> bool:
        """Whether some tensors hold the matrices of all experts of a layer, which files store one by one."""
        return any(map(is_experts, self.infos))

    tied: dict[str, str]
    """Second name -> first name of each tied weight. A second name is usually the `lm_head.weight` of a tied head."""


def model_facts(
    path: str, *, trust_remote_code: bool = False, overrides: Mapping[str, Any] = FrozenDict()
) -> ModelFacts:
    """The facts of the model at `path`. Raises `ModelError` if its configuration cannot be read."""
    config = with_overrides(_config(path, trust_remote_code), overrides)
    text = config.get_text_config()
    layers = list(text.per_layer_config) if text.is_heterogeneous else [text] * text.num_hidden_layers
    sizes = [_heads(layer) for layer in layers]
    return ModelFacts(
        head_dims=tuple(sorted({size for _, size in sizes})),
        kv_numbers_per_token=sum(2 * kv_heads * size for kv_heads, size in sizes),
        positions=getattr(text, "max_position_embeddings", None),
        eos_ids=_eos_ids(path, config),
        vocabulary=text.vocab_size,
    )


def _heads(layer: PretrainedConfig) -> tuple[int, int]:
    """Number of the heads of keys in a layer, and their size; (0, 0) for a model without attention."""
    heads = getattr(layer, "num_attention_heads", None)
    if not heads:
        return 0, 0
    size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return getattr(layer, "num_key_value_heads", None) or heads, size


def overridden(path: str, overrides: Mapping[str, Any], *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Values of the model's configuration that `overrides` change, in vLLM's form, and those that vLLM reads otherwise.
    Raises `ModelError`.
    """
    config = _config(path, trust_remote_code)
    values = changed_values(config, overrides)
    config = with_overrides(config, overrides)
    # Read as they are, the following would make vLLM sample from another model, silently.
    table = getattr(config, "rope_parameters", None) or {}
    if table.get("llama_4_scaling_beta"):  # Ministral 3: the temperature of queries, under the name of Mistral's format
        values["llama_4_scaling"] = {
            "original_max_position_embeddings": table["original_max_position_embeddings"],
            "beta": table["llama_4_scaling_beta"],
        }
    if config.model_type in ("cohere2", "cohere2_moe"):  # windows of one token more than transformers has
        values["sliding_window"] = config.sliding_window - 1
    return values


def expected_weights(
    path: str, *, trust_remote_code: bool = False, overrides: Mapping[str, Any] = FrozenDict()
) -> ExpectedWeights:
    """Names and shapes of the model's weights, from an instance without storage. Raises `ModelError`."""
    config = with_overrides(_config(path, trust_remote_code), overrides)
    fault = ""  # what vLLM 0.32 computes wrongly without an error
    if config.model_type == "gpt_neox":
        fault = "it does not read embed_out.weight, and its logits are random"
    elif config.model_type == "falcon" and config.alibi:
        fault = "it computes attention with alibi differently from the model"
    if fault:
        raise ModelError(
            f"vLLM samples wrongly from a {config.model_type} model: {fault}; set generator.inference_engine.backend = "
            "torch"
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        model.tie_weights()
    except Exception as error:  # as in `_config`
        raise model_error("model", path, error) from error
    infos = {name: weight_info(name, weight) for name, weight in named_weights(model)}
    refuse_unnamed_experts(iter(infos), config.get_text_config().model_type)
    return ExpectedWeights(infos=infos, tied=tied_names(model))


def refuse_unfit(expected: ExpectedWeights, incoming: IncomingWeights) -> None:
    """Raises `WeightSyncError` unless exactly the model's weights are announced, a tied one under one of its names."""
    problems: list[str] = []
    missing = dict(expected.infos)
    for info in incoming.weights:
        first = expected.tied.get(info.name, info.name)
        expected_info = missing.pop(first, None)
        if first not in expected.infos:
            problems.append(f"{info.name} is not a weight of this model")
        elif expected_info is None:
            problems.append(f"{info.name} is sent twice")
        elif info.shape != expected_info.shape:
            problems.append(f"{info.name} has shape {info.shape}, this model's has {expected_info.shape}")
    problems += [f"{name} is missing" for name in missing]
    if problems:
        raise WeightSyncError(f"the weights sent do not fit, the old ones are kept: {summarize_problems(problems)}")


def _eos_ids(path: str, config: PretrainedConfig) -> tuple[int, ...]:
    """End-of-sequence ids of the generation config, as transformers finds it: a file beside the model, or the model's
    own config.
    """
    try:
        generation = GenerationConfig.from_pretrained(_source(path))
    except OSError:
        generation = GenerationConfig.from_model_config(config)
    configured = generation.eos_token_id
    listed = configured if isinstance(configured, list | tuple) else [configured]
    return tuple(sorted(int(eos) for eos in listed if eos is not None))


def _config(path: str, trust_remote_code: bool) -> PretrainedConfig:
    if not trust_remote_code:
        refuse_foreign_code(_source(path))
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(_source(path), trust_remote_code=trust_remote_code)
    except ModelError:
        raise
    except Exception as error:  # transformers, its hub client and third-party models raise different types
        raise model_error("configuration of", path, error) from error
    return config


def _source(path: str) -> str:
    return str(local_folder(path) or path)
