"""Dropout while a model learns: which modules drop, reproducibly from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from skyrl.config import SkyRLLoraConfig
from skyrl.config.settings.learners import sets_dropout
from skyrl.errors import ModelError


def dropping_modules(model: Any, lora: SkyRLLoraConfig, *, own: bool, field: str) -> list[nn.Module]:
    """The modules that drop while `model` learns: with `own` all modules, otherwise only the dropout of adapters.

    Raises `ModelError`, which names `field`, for `own` if the model's configuration has no dropout above 0.
    """
    modules = dict(model.named_modules())
    if own:
        config = model.config.get_text_config().to_dict()
        if not any(sets_dropout(name, value) for name, value in config.items()):
            raise ModelError(
                f"{field}: the model's configuration sets no dropout above 0: give one in model_config_kwargs, such "
                "as attention_dropout, or set it to false"
            )
        return list(modules.values())
    if not lora.rank or not lora.dropout:
        return []
    return [module for name, module in modules.items() if isinstance(module, nn.Dropout) and "lora_dropout" in name]


@contextmanager
def dropping(modules: list[nn.Module], device: torch.device, seed: int) -> Iterator[None]:
    """A block in which the modules drop, drawn from `seed`.

    Outside the block, as in scoring, nothing is dropped. Both passes of an update, forward and recomputed, must be
    inside it.
    """
    if not modules:
        yield
        return
    before = [module.training for module in modules]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for module in modules:
            module.training = True
        try:
            yield
        finally:
            for module, was in zip(modules, before, strict=True):
                module.training = was
