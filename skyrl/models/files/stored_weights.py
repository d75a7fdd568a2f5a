"""The weights of a stored model, read row by row, so that a rank reads only its own part of the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from safetensors import safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from skyrl.errors import ModelError
from skyrl.models.files.loading import model_error, model_source
from skyrl.tree.files import stored_text

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@frozen(slots=False)
class StoredWeights:
    """The safetensors files of a local folder, or of a hub name, which are downloaded."""

    path: str

    table: str = "trainer"
    """Table of the configuration whose fields messages name."""

    def rows(self, name: str, rows: range, shape: torch.Size) -> Tensor:
        """(len(rows), ...) float32 on the host: rows of the weight `name`, whose whole shape is `shape`. Raises
        `ModelError` if it is not stored or has another shape.
        """
        file = self._file_of.get(name)
        if file is None:
            raise ModelError(f"the model {self.path} is incomplete: no weights are stored for {name}")
        try:
            with safe_open(file, framework="pt") as opened:
                weight: Any = opened.get_slice(name)
                stored_shape = tuple(weight.get_shape())
                if stored_shape != tuple(shape):
                    raise ModelError(
                        f"the model {self.path} stores {name} in the shape {stored_shape}, not {tuple(shape)}"
                    )
                read: Tensor = weight[rows.start : rows.stop]
        except ModelError:
            raise
        except Exception as error:  # safetensors raises its own type
            raise model_error("model", self.path, error, table=self.table) from error
        return read.float()

    @cached_property
    def _file_of(self) -> Mapping[str, Path]:
        """Weight -> the file that holds it."""
        source = model_source(self.path, weights=True)
        try:
            index = cached_file(source, _INDEX, _raise_exceptions_for_missing_entries=False)
            if index is None:
                file = Path(_require_file(cached_file(source, _FILE)))
                with safe_open(file, framework="pt") as opened:
                    return dict.fromkeys(opened.keys(), file)
            names: dict[str, str] = json.loads(stored_text(Path(index)))["weight_map"]
            files = {name: Path(_require_file(cached_file(source, name))) for name in set(names.values())}
        except Exception as error:  # transformers, its hub client and safetensors each raise types of their own
            raise model_error("model", self.path, error, table=self.table) from error
        return {name: files[alias] for name, alias in names.items()}


def _require_file(path: str | None) -> str:
    if path is None:
        raise FileNotFoundError(_FILE)
    return path
