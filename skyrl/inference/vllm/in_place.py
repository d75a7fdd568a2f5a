"""Loading weights into the very parameters with which vLLM computes, where these are what was stored.

vLLM's own reloading rebuilds each layer as it was before its weights were processed (quantized, packed, rearranged),
loads it, processes it again and copies the result back: half a millisecond of Python for each weight, which is more
than the transfer of a small model takes. Where nothing is processed, weights are copied to where they belong.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

_PLAIN = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
"""Ways of vLLM to compute with a layer that leave its parameters as they were loaded, except on a CPU, which packs
them."""

_ATTENTION = "Attention"
"""Class of vLLM's attention whose only processing is of scales that no weight sets, unlike that of latent attention."""

_RELOAD = "vllm.model_executor.model_loader.reload"


class Worker(Protocol):
    """The part of a worker of vLLM that is used here."""

    vllm_config: Any
    model_config: Any
    model_runner: Any


class StoredLayer(Protocol):
    """vLLM's description of a layer before its weights were loaded and processed."""

    restore_metadata: tuple[dict[str, Tensor], dict[str, Tensor]]
    """Parameters and buffers by name, without content."""


def in_place_obstacle(worker: Worker) -> str:
    """An empty string if the model of a worker computes with its weights as they are stored, so that new ones can be
    copied into its parameters; otherwise the reason: quantization, experts, latent attention, adapters, packed weights.
    """
    if worker.vllm_config.lora_config is not None:
        return "it serves adapters"
    stored = importlib.import_module(f"{_RELOAD}.layerwise").get_layerwise_info
    modules = worker.model_runner.get_model().named_modules()
    others = ((name, type(module).__name__) for name, module in modules if not _is_plain(module, stored(module)))
    return next((f"{name} ({kind}) processes its weights" for name, kind in others), "")


def _is_plain(module: nn.Module, stored: StoredLayer) -> bool:
    """Whether a module has its parameters as vLLM described them before they were loaded."""
    method = getattr(module, "quant_method", None)
    if method is not None and type(method).__name__ not in _PLAIN:
        return False
    if hasattr(module, "process_weights_after_loading") and type(module).__name__ != _ATTENTION:
        return False
    parameters, _ = stored.restore_metadata
    now = {
        name: (parameter.shape, parameter.dtype)
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    now.pop("bias", None)  # described before layers add theirs, which nothing processes
    return now == {name: (item.shape, item.dtype) for name, item in parameters.items() if name != "bias"}


@contextmanager
def without_reloading() -> Iterator[None]:
    """While vLLM's transfer engines work, they do not rebuild the layers: weights are loaded in place."""
    reload: Any = importlib.import_module(_RELOAD)
    begin, end = reload.initialize_layerwise_reload, reload.finalize_layerwise_reload
    reload.initialize_layerwise_reload, reload.finalize_layerwise_reload = lambda model: None, _process_attention
    try:
        yield
    finally:
        reload.initialize_layerwise_reload, reload.finalize_layerwise_reload = begin, end


def load_in_place(worker: Worker, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load all weights, with whole shapes, into the parameters of a worker's model."""
    config = importlib.import_module("vllm.config").set_current_vllm_config
    model = worker.model_runner.get_model()
    with config(worker.vllm_config):
        model.load_weights(weights)
        _process_attention(model, worker.model_config)


class ModelConfig(Protocol):
    """The part of vLLM's configuration of a model that is used here."""

    dtype: torch.dtype


def _process_attention(model: nn.Module, model_config: ModelConfig) -> None:
    """Set the scales of attention, as vLLM does at the end of its own reloading."""
    for module in model.modules():
        if type(module).__name__ == _ATTENTION:
            attention: Any = module
            attention.process_weights_after_loading(model_config.dtype)
