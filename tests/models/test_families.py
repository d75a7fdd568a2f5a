"""Each cell of `docs/models.md` is what a small model of the family does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from skyrl.config.model_overrides import LONGEST_ROW
from skyrl.models.storing import Export
from tests.long_cases import long_except
from tests.models.families import FAMILIES
from tests.models.family_cells import COLUMNS, cells, definition, state, store, stored

DEFAULT = ("Qwen3", "Gemma 2", "Phi-3.5 and Phi-4-mini, LongRoPE", "Qwen3.5")
"""A plain family, one with windows and a soft cap, one whose rotation depends on length, one with a state."""


@pytest.mark.parametrize("family", long_except(FAMILIES, *DEFAULT))
def test_a_family_does_what_its_row_says(family: str, nano: Path, tmp_path: Path) -> None:
    found = {name: state(cell) for name, cell in cells(family, nano / "model", tmp_path)}
    assert found == {name: state(stored()[family][name]) for name in COLUMNS}


def test_the_table_has_every_family_and_no_wrong_number() -> None:
    assert stored().keys() == FAMILIES.keys()
    wrong = [
        (family, name) for family, row in stored().items() for name in COLUMNS if state(row[name]).startswith("off")
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "family",
    [
        "Llama",
        "Qwen2.5",
        "Qwen3",
        "Qwen3 MoE",
        "Gemma 3",
        "Mistral",
        "SmolLM3",
        "OLMo 2",
        "Phi-3.5 and Phi-4-mini, LongRoPE",
    ],
)
def test_these_families_do_everything(family: str) -> None:
    row = stored()[family]
    assert row["rows"] == "packed, shared prompts"
    assert {state(row[name]) for name in ("learner", "gradient", "engine", "lora", "export")} == {"exact"}


def test_a_model_that_has_eager_attention_alone_is_exported(nano: Path, tmp_path: Path) -> None:
    """An export computes nothing, so the kind of attention must not matter to it."""
    path = store("BLOOM", nano / "model", tmp_path / "model")
    model = definition(path)
    Export(like=path, folder=tmp_path / "export")((name, weight) for name, weight in model.state_dict().items())
    ids = torch.arange(3, 20).unsqueeze(0)
    assert torch.equal(definition(str(tmp_path / "export"))(input_ids=ids).logits, model(input_ids=ids).logits)


def test_an_export_has_the_rotary_embeddings_of_the_run(tmp_path: Path, nano: Path) -> None:
    """Short rows of a run with long ones are computed with the factors of long rows, and so does whoever reads it."""
    path = store("Phi-3.5 and Phi-4-mini, LongRoPE", nano / "model", tmp_path / "model")
    weights = definition(path).state_dict()
    for longest, factor in ((60, 4.0), (24, 1.0)):
        Export(like=path, folder=tmp_path / "export", overrides={LONGEST_ROW: longest})(iter(weights.items()))
        table = AutoConfig.from_pretrained(tmp_path / "export").rope_parameters
        assert table["short_factor"] == table["long_factor"] == [factor] * 4
