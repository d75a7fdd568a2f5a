"""Loading weights into the very parameters with which vLLM computes, where these are what was stored.

vLLM's own reloading rebuilds each layer as it was before its weights were processed (quantized, packed, rearranged),
loads it, processes it again and copies the result back: half a millisecond of Python for each weight, which is more
than the transfer of a small model takes. Where nothing is processed, weights are copied to where they belong, and
`ReadBack` shows that they are there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl.errors import WeightSyncError
from skyrl.weight_receiver.checksums import digest_word
from skyrl.weight_receiver.incoming_weights import summarize_problems

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


@contextmanager
def repairable(worker: Worker) -> Iterator[None]:
    """If loading fails in the block, a complete later load replaces all that came of it.

    vLLM's reloading would otherwise go on where it stopped: a layer of which a part had come would be made of that part
    and of newer ones.
    """
    try:
        yield
    except BaseException:
        layerwise = importlib.import_module(f"{_RELOAD}.layerwise")
        model = worker.model_runner.get_model()
        for layer in map(layerwise.get_layerwise_info, model.modules()):
            if layer.can_load():  # it was not yet rebuilt: as one of which nothing has come, it gets its tensors back
                layer.loaded_weights.clear()
                layer.load_numel = layer.load_numel_total = 0
        with importlib.import_module("vllm.config").set_current_vllm_config(worker.vllm_config):
            layerwise.finalize_layerwise_reload(model, worker.model_config)
        raise


class ModelConfig(Protocol):
    """The part of vLLM's configuration of a model that is used here."""

    dtype: torch.dtype


def _process_attention(model: nn.Module, model_config: ModelConfig) -> None:
    """Set the scales of attention, as vLLM does at the end of its own reloading."""
    for module in model.modules():
        if type(module).__name__ == _ATTENTION:
            attention: Any = module
            attention.process_weights_after_loading(model_config.dtype)


class ReadBack(TorchDispatchMode):
    """While it is entered, notes what is copied into the parameters of `model`; `compare` reads it again.

    A model's `load_weights` decides itself where a weight goes: into a slice of a fused matrix, into several, or
    nowhere. While it loads into its parameters in place, each copy is noted with the digest of what was copied, and
    afterwards the same places are read again. Where each weight goes does not depend on its values, so that one load of
    a worker shows it for those that follow.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._names: list[str] = []
        self._copies: list[tuple[str, Tensor, Tensor]] = []
        """Name of the weight, the place that it was copied to, and the digest of what was copied."""

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Tensor, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Executes an operation, and notes it if it copies into a parameter."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and args[0].untyped_storage().data_ptr() in self._held:
            target, content = args[0], args[1]
            self._copies.append((self._names[-1], target, digest_word(content.to(target).expand_as(target))))
        return result

    def record(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights, while it is noted which of them the model takes."""
        for name, tensor in weights:
            self._names.append(name)
            yield name, tensor

    def compare(self, may_go_nowhere: Container[str]) -> None:
        """Raises `WeightSyncError` if a weight went nowhere, unless it may, or is not where it was copied to."""
        copied = {name for name, _, _ in self._copies}
        lost = (name for name in self._names if name not in copied and name not in may_go_nowhere)
        problems = [f"{name} was taken by vLLM and is in none of its parameters" for name in lost]
        if self._copies:
            now = torch.stack([digest_word(target) for _, target, _ in self._copies]).tolist()
            then = torch.stack([word for _, _, word in self._copies]).tolist()
            pairs = zip(self._copies, now, then, strict=True)
            changed = dict.fromkeys(name for (name, _, _), after, before in pairs if after != before)
            problems += [f"{name} was replaced by another weight after it was loaded" for name in changed]
        if problems:
            raise WeightSyncError(summarize_problems(problems))
