"""Dumps of training batches, for debugging: `trainer.dump_data_batch`."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from skyrl.errors import RunError
from skyrl.tracking.recording import Computed, SampledBatch, write_tensors


class BatchDump:
    """A `Sink` of traced steps that writes the tensors of each batch: `global_step_<n>.safetensors`.

    Tensors are (B, L) under the names of `TrainingBatch`: tokens, mask, log-probabilities, rewards, advantages.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write_sampled(self, step: int, sampled: SampledBatch) -> None:
        """Does nothing: the samples are in the run's folder."""

    def write_computed(self, computed: Computed) -> None:
        """Write the batch. Raises `RunError` if it cannot be written."""
        path = self._folder / f"global_step_{computed.step}.safetensors"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_tensors(path, computed.tensors)
        except (OSError, SafetensorError) as error:
            raise RunError(f"the batch of step {computed.step} cannot be written to {path}: {error}") from error
