"""A model out of a checkpoint: no learner is started, and no process of the run is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cattrs
from torch import Tensor

from skyrl.checkpoint.store import Checkpoint, CheckpointStore
from skyrl.config.load import root_of
from skyrl.errors import ResumeError, UserError
from skyrl.experiments.replay import stored_run
from skyrl.models.lora import adapter_alone, merged
from skyrl.models.reward_model import RewardModelExport
from skyrl.models.storing import AdapterExport, Export
from skyrl.tree import required

_WEIGHTS = "model."
"""Before the names of weights in a checkpoint; those of the optimizer's state begin otherwise."""


def export(
    run: Path,
    *,
    step: int | None = None,
    to: Path | None = None,
    adapter: bool = False,
    checkpoints: Path | None = None,
) -> tuple[int, Path]:
    """Store the policy of a checkpoint, or the model of a supervised run's, the newest unless `step` names another.
    Which step it was, and the folder.

    The model is stored as transformers does, an adapter merged into it; with `adapter`, that alone, as PEFT does.
    Without `to` it goes where the run itself exports to. Raises `ResumeError` for a checkpoint that is not there or is
    damaged, `UserError` for the adapter of a run without one, `RunError` if the disk does not take it.
    """
    store = CheckpointStore(checkpoints or stored_run(run).trainer.ckpt_path)
    saved = _saved(store, step)
    checkpoint = store.load(saved)
    config: Any = cattrs.structure(checkpoint.config, root_of(checkpoint.config))
    trainer, model = config.trainer, config.trainer.policy.model
    at = "trainer.policy.model" if config.kind == "rl" else "model"
    like = required(model.path, f"{at}.path")
    if adapter and not model.lora.rank:
        raise UserError(f"{run} trained all weights ({at}.lora.rank = 0): it has no adapter")
    name = "adapter" if adapter else "policy" if config.kind == "rl" else "model"
    folder = to or Path(trainer.export_path).expanduser() / f"global_step_{saved}" / name
    if adapter:
        AdapterExport(like=like, lora=model.lora, folder=folder)(adapter_alone(_weights(checkpoint)))
    else:
        whole = RewardModelExport if config.kind == "reward_model" else Export
        fast = not trainer.disable_fast_tokenizer
        whole(like=like, use_fast_tokenizer=fast, folder=folder)(merged(_weights(checkpoint), model.lora))
    return saved, folder


def _saved(store: CheckpointStore, step: int | None) -> int:
    steps = store.steps()
    if not steps:
        raise ResumeError(f"there is no checkpoint in {store.folder}: name its folder with --checkpoints")
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps))
        raise ResumeError(f"there is no checkpoint of step {step} in {store.folder}, but of {there}")
    return steps[-1] if step is None else step


def _weights(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """The policy's, or those of a run's only model, under the names that they have in training, each read when it is
    asked for.
    """
    tensors = checkpoint.models.get("policy") or checkpoint.models["critic"]
    for name in tensors:
        if name.startswith(_WEIGHTS):
            yield name.removeprefix(_WEIGHTS), tensors[name]
