"""LoRA adapters that are sent without the base weights, to engines that already hold these.

An adapter is a set of weights like any other: announced, compared with digests, versioned. Names are PEFT's:
`base_model.model.<module>.lora_A.weight`, (rank, in), and `lora_B`, (out, rank).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from skyrl.errors import ModelError, WeightSyncError
from skyrl.inference.weights import refuse_not_loaded
from skyrl.models.files.stored_adapter import stored_settings, stored_tensors
from skyrl.models.low_rank import LowRank, Updates, of_layers, set_updates
from skyrl.storage.modes import save_tensors
from skyrl.weight_receiver.incoming_weights import Adapter, SharedWeights, summarize_problems

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")


def refuse_foreign(adapter: Adapter, layers: Mapping[str, tuple[int, int]]) -> None:
    """Raises `WeightSyncError` unless every tensor is half of an update of one of these layers, (out, in), and both
    halves of each update are present.
    """
    if problems := misfits(adapter, layers):
        raise WeightSyncError(f"the adapter sent does not fit, the old one is kept: {problems}")


def misfits(adapter: Adapter, layers: Mapping[str, tuple[int, int]]) -> str:
    """Reasons why the adapter does not fit these layers, (out, in); empty if it does."""
    problems, parts = [], set()
    for info in adapter.weights:
        match = _NAME.fullmatch(info.name)
        if match is None or match["module"] not in layers:
            problems.append(f"{info.name} belongs to no linear layer of this model")
            continue
        out, into = layers[match["module"]]
        expected = (adapter.rank, into) if match["part"] == "A" else (out, adapter.rank)
        if info.shape != expected:
            problems.append(f"{info.name} has shape {info.shape}, this layer expects {expected}")
        parts.add((match["module"], match["part"]))
    problems += [
        f"the other half of {module}'s update is missing"
        for module, part in sorted(parts)
        if (module, "AB".replace(part, "")) not in parts
    ]
    if not parts and not problems:
        problems = ["it contains no tensors"]
    return summarize_problems(problems)


def linear_layers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(out, in) of each linear layer, by name."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: (item.out_features, item.in_features) for name, item in linear.items()}


def apply_updates(model: nn.Module, updates: Mapping[str, LowRank]) -> None:
    """Make the model compute with these `received_updates` beside its own weights. Raises `WeightSyncError` if its
    layers then do not hold what arrived.
    """
    set_updates(model, updates)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    layer_updates = dict(zip(layers, of_layers(list(layers.values())), strict=True))
    for part in ("a", "b"):
        parts = {name: (getattr(layer_updates[name], part), getattr(update, part)) for name, update in updates.items()}
        refuse_not_loaded(parts)


def updates_of(model: nn.Module, adapter: Adapter, number: int, device: torch.device) -> Updates:
    """The adapter for the layers of this model, which is not changed, in their type and on the `device` where they
    compute, even if they wait elsewhere now. Raises `WeightSyncError` if it does not fit.
    """
    layers = {}
    for name, update in received_updates(model, adapter).items():
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        layers[layer] = LowRank(*(factor.to(device, layer.weight.dtype) for factor in (update.a, update.b)))
    return Updates(number=number, layers=layers)


def stored_adapter(folder: Path, where: str, layers: Mapping[str, tuple[int, int]] | None = None) -> Adapter:
    """The adapter in a folder, in PEFT's format. Raises `ModelError`, whose message begins with `where`, if there is
    none, or none that fits these layers, (out, in).
    """
    settings = stored_settings(folder, where)
    adapter = shared(tuple(stored_tensors(folder, where).items()), rank=settings.rank, alpha=settings.alpha)
    if layers is not None and (problems := misfits(adapter, layers)):
        raise ModelError(f"{where}: {folder} is not for this model: {problems}")
    return adapter


def received_updates(model: nn.Module, adapter: Adapter) -> dict[str, LowRank]:
    """The update of each module of this model, which is not changed, by name, after all of it has arrived. Raises
    `WeightSyncError` if it does not fit, or a tensor is lost or changed in transit.
    """
    refuse_foreign(adapter, linear_layers(model))
    received, updates = received_tensors(adapter), {}
    for name, a in received.items():
        match = _NAME.fullmatch(name)
        if match is not None and match["part"] == "A":
            b = received[name.replace(".lora_A.", ".lora_B.")]
            updates[match["module"]] = LowRank(a, b * (adapter.alpha / adapter.rank))
    return updates


def received_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """Copies of all tensors, by name. Raises `WeightSyncError` if one is lost or changed in transit."""
    with adapter.open() as tensors:
        received = {name: tensor.detach().clone() for name, tensor in tensors}
    missing = [info.name for info in adapter.weights if info.name not in received]
    if missing:
        raise WeightSyncError(f"{missing[0]} did not arrive")
    return received


def write_adapter(adapter: Adapter, folder: Path) -> None:
    """Writes the adapter in PEFT's format, which inference servers read. Raises as `received_tensors`."""
    tensors = received_tensors(adapter)
    matches = [match for match in map(_NAME.fullmatch, tensors) if match is not None]
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": sorted({match["module"].rpartition(".")[2] for match in matches}),
        "bias": "none",
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    on_the_host = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_tensors(on_the_host, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")


def shared(tensors: Sequence[tuple[str, Tensor]], *, rank: int, alpha: float) -> Adapter:
    """An adapter whose tensors are in this process: nothing is sent."""
    return Adapter(tensors=SharedWeights(tuple(tensors)), rank=rank, alpha=alpha)
