"""Rows of stored weights, without the rest of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyrl.errors import ModelError
from skyrl.models.files.naming import named_weights
from skyrl.models.files.stored_weights import StoredWeights
from tests.inference.nano import nano_model


@pytest.mark.parametrize("shard", ["50GB", "20KB"])
def test_rows_of_every_weight_are_those_of_the_model(shard: str, tmp_path: Path) -> None:
    model = nano_model("qwen3")
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    stored = StoredWeights(str(tmp_path))
    for name, weight in named_weights(model):
        assert torch.equal(stored.rows(name, range(3, 7), weight.shape), weight[3:7])


def test_a_weight_that_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    nano_model().save_pretrained(tmp_path)
    stored = StoredWeights(str(tmp_path))
    with pytest.raises(ModelError, match=r"is incomplete: no weights are stored for model\.gone\.weight"):
        stored.rows("model.gone.weight", range(2), torch.Size([2]))
    with pytest.raises(ModelError, match=r"stores model\.norm\.weight in the shape \(32,\), not \(33,\)"):
        stored.rows("model.norm.weight", range(2), torch.Size([33]))


def test_a_damaged_file_is_said_to_be_one(tmp_path: Path) -> None:
    nano_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match="its weights are damaged or incomplete"):
        StoredWeights(str(tmp_path)).rows("model.norm.weight", range(2), torch.Size([32]))
