"""Exports the model of a checkpoint, without starting a learner or any other process of the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from skyrl.checkpoint.store import Checkpoint, CheckpointStore
from skyrl.config.loading.kinds import kind_of, samples_rollouts
from skyrl.errors import ResumeError, UserError
from skyrl.experiments.exports import export_of, policy_export
from skyrl.models.lora import adapter_alone, merge_adapters
from skyrl.models.saving.storing import AdapterExport
from skyrl.runs.stored_runs import checkpoints_of, place_of, run_of
from skyrl.tree import required

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.bin", "*.py", "README.md")
"""Names of files in a folder with a model or an adapter: one with anything else is not replaced."""

_WEIGHTS = "model."
"""Prefix of the names of weights in a checkpoint; the optimizer's state has other prefixes."""


def export(
    run: Path,
    *,
    step: int | None = None,
    to: Path | None = None,
    adapter: bool = False,
    checkpoints: Path | None = None,
) -> tuple[int, Path]:
    """Store the model of a checkpoint, the newest unless `step` names another. Returns the step and the folder.

    The format is that of transformers, with an adapter merged in; with `adapter`, only the adapter, in PEFT's format.
    Without `to`, the run's own export folder is used. Raises `ResumeError` for a missing or damaged checkpoint,
    `UserError` for the adapter of a run without one, and `RunError` if writing to the disk fails.
    """
    store = CheckpointStore(checkpoints or checkpoints_of(str(run)))
    steps = store.steps()
    if not steps:
        raise ResumeError(
            f"there is no checkpoint in {store.folder}: pass the folder of the run's checkpoints with --checkpoints"
        )
    saved = steps[-1] if step is None else step
    if saved not in steps:
        available = ", ".join(map(str, steps))
        raise ResumeError(f"there is no checkpoint of step {saved} in {store.folder}; available steps: {available}")
    checkpoint = store.load(saved)
    config = run_of(checkpoint.config, f"the checkpoint of step {saved}")
    kind = kind_of(config)
    section = kind.trained.section(config)
    lora, like = section.model.lora, required(section.model.path, "the path of the model")
    if adapter and not lora.rank:
        raise UserError(f"{run} trained all weights ({kind.model}.lora.rank = 0): it has no adapter")
    name = "adapter" if adapter else kind.trained.exported_as
    folder = to or Path(place_of(config.trainer.folder("export_path"), run, config)) / f"global_step_{saved}" / name
    weights = _weights(checkpoint, kind.trained.stored_as)
    if adapter:
        AdapterExport(like=like, lora=lora, folder=folder)(adapter_alone(weights))
    elif samples_rollouts(config):
        policy_export(config.trainer, section, folder)(merge_adapters(weights, lora))
    else:
        export_of(config, folder)(merge_adapters(weights, lora))
    return saved, folder


def _weights(checkpoint: Checkpoint, role: str) -> Iterator[tuple[str, Tensor]]:
    """The model's weights by their names in training, each read from the checkpoint on demand."""
    tensors = checkpoint.models[role]
    for name in tensors:
        if name.startswith(_WEIGHTS):
            yield name.removeprefix(_WEIGHTS), tensors[name]
