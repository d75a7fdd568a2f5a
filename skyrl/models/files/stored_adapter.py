"""Adapters stored by PEFT or by a run: reading them into a model, or merging them into the weights they adapt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from skyrl.config import SkyRLLoraConfig
from skyrl.errors import ModelError
from skyrl.tree.files import stored_text

_PREFIX = "base_model.model."
_SETTINGS, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_rslora": (None, False),
    "use_dora": (None, False),
    "bias": (None, "none"),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
}
"""PEFT's settings -> the values for which an adapter is exactly W + alpha / rank B A."""


@frozen(kw_only=True)
class StoredSettings:
    """Size and scale of a stored adapter."""

    rank: int
    alpha: float


def read_adapter(model: nn.Module, lora: SkyRLLoraConfig, field: str) -> None:
    """Fill the new adapters of a model with the adapters stored in the folder `lora.path`.

    `field` is the dotted path of the adapter's table. Raises `ModelError` if the folder holds no adapter, or one with
    another size, scale or set of modules.
    """
    where = f"{field}.path"
    folder = Path(str(lora.path)).expanduser()
    settings = stored_settings(folder, where)
    for name, stored in (("rank", settings.rank), ("alpha", settings.alpha)):
        if stored != getattr(lora, name):
            raise ModelError(
                f"{field}.{name} = {getattr(lora, name)}, but the adapter in {where} has {stored:g}: set it to that"
            )
    _fill(model, stored_tensors(folder, where), field)


def stored_settings(folder: Path, where: str) -> StoredSettings:
    """Settings of the adapter in a folder. Raises `ModelError`, whose message begins with `where`, for a folder without
    an adapter, and for an adapter of a form other than W + alpha / rank B A.
    """
    try:
        settings = json.loads(stored_text(folder / _SETTINGS))
        result = StoredSettings(rank=int(settings["r"]), alpha=float(settings["lora_alpha"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _missing_adapter(folder, where, error) from error
    for name, plain in _PLAIN.items():
        if settings.get(name) not in plain:
            raise ModelError(f"{where}: an adapter with {name} = {settings[name]!r} is not supported in this version")
    return result


def stored_tensors(folder: Path, where: str) -> dict[str, Tensor]:
    """Tensors of the adapter in a folder, by PEFT's names. Raises `ModelError`, whose message begins with `where`."""
    try:
        return load_file(folder / _TENSORS)
    except (OSError, SafetensorError) as error:
        raise _missing_adapter(folder, where, error) from error


def _missing_adapter(folder: Path, where: str, error: Exception) -> ModelError:
    return ModelError(
        f"{where}: {folder} contains no adapter ({type(error).__name__}: {error}): give a folder with PEFT's "
        f"{_SETTINGS} and {_TENSORS}"
    )


def merge_adapters(model: nn.Module) -> nn.Module:
    """The model with its adapters merged into the adapted weights, and without the adapters' modules."""
    for name, module in list(model.named_modules()):
        if hasattr(module, "lora_A"):
            layer: Any = module
            layer.merge()
            model.set_submodule(name, layer.get_base_layer())
    return model


def _fill(model: nn.Module, tensors: Mapping[str, Tensor], field: str) -> None:
    """Copy each tensor into the parameter that PEFT stores under its name."""
    parameters = {
        f"{_PREFIX}{name.replace('.default.weight', '.weight')}": parameter
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }
    for missing, problem in (
        (parameters.keys() - tensors.keys(), "has none for"),
        (tensors.keys() - parameters.keys(), "has one for"),
    ):
        if missing:
            module = min(missing).removeprefix(_PREFIX).partition(".lora_")[0]
            others = "which would get one" if problem == "has none for" else "which would get none"
            raise ModelError(
                f"{field}.path: the stored adapter {problem} {module}, {others}: set {field}.target_modules and "
                "exclude_modules to the modules that it was trained for"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != tensors[name].shape:
                stored_shape, expected = tuple(tensors[name].shape), tuple(parameter.shape)
                raise ModelError(f"{field}.path: {name} has shape {stored_shape}, but the model expects {expected}")
            parameter.copy_(tensors[name])
