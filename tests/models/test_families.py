"""Each cell of `docs/models.md` is what a small model of the family does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl.config.derive.model_overrides import LONGEST_ROW
from skyrl.models.files.meta_model import counted_shape
from skyrl.models.saving.storing import Export
from skyrl.planning.model_shape import COUNTED, shape_of
from tests.inference.vllm_host import Host
from tests.learners.pool import Pool
from tests.long_cases import long_except
from tests.models.families import FAMILIES
from tests.models.family_cells import (
    alone,
    apart,
    cells,
    definition,
    rows,
    served,
    spread,
    state,
    store,
    stored,
    worker,
)

DEFAULT = ("Gemma 2", "Phi-3.5 and Phi-4-mini, LongRoPE", "Qwen3.5")
"""A family with windows and a soft cap, one whose rotation depends on length, one with a state."""


def _takes_long(name: str, cell: str | float) -> bool:
    """Whether the cell has a test of its own."""
    return name == "vllm" or (name == "megatron" and isinstance(cell, float))


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    with closing(Pool(2)) as started:
        yield started


@pytest.mark.long
@pytest.mark.parametrize("family", long_except(FAMILIES, *DEFAULT))
def test_a_family_does_what_its_row_says(family: str, nano: Path, tmp_path: Path, pair: Pool) -> None:
    row = {name: state(cell) for name, cell in stored()[family].items() if not _takes_long(name, cell)}
    results = cells(family, nano / "model", tmp_path, pair, columns=row)
    assert {name: state(cell) for name, cell in results} == row


@pytest.mark.long
@pytest.mark.xdist_group("vllm")
@pytest.mark.parametrize("family", [family for family, row in stored().items() if "vllm" in row])
def test_vllm_does_what_the_row_says(family: str, nano: Path, tmp_path: Path, host: Host) -> None:
    assert state(served(family, nano / "model", tmp_path, host)) == state(stored()[family]["vllm"])


@pytest.mark.long
@pytest.mark.parametrize("family", [name for name, row in stored().items() if isinstance(row.get("megatron"), float)])
def test_megatron_does_what_the_row_says(family: str, nano: Path, tmp_path: Path, pair: Pool) -> None:
    results = cells(family, nano / "model", tmp_path, pair, columns=["megatron"])
    assert [state(cell) for _, cell in results] == ["exact"]


_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "partial_rotary_factor": 1.0,
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "bounds", "longest"),
    [
        ("gpt-oss", {"sliding_window": 128}, 400),
        ("Gemma 3", {"sliding_window": 512}, 1200),
        ("OLMo 3", {"sliding_window": 1024}, 2200),
        ("Llama, YaRN", {"rope_parameters": _YARN}, 2200),
        ("Llama 4 without temperature tuning", {"attention_chunk_size": 1024}, 2200),
        ("MiniMax-M3", {"index_block_size": 128}, 700),
        (
            "Phi-3.5 and Phi-4-mini, LongRoPE",
            {"rope_parameters": _LONG, "original_max_position_embeddings": 4096},
            4200,
        ),
    ],
)
def test_rows_longer_than_the_bounds_of_released_models_are_those_alone(
    family: str, bounds: Mapping[str, Any], longest: int, nano: Path, tmp_path: Path
) -> None:
    """What small copies show of bounds of tens of tokens holds for bounds of hundreds and thousands."""
    bounds = {**bounds, "max_position_embeddings": 2 * longest}
    path = store(family, nano / "model", tmp_path / "model", bounds=bounds)
    truth = definition(path, longest)
    batch = rows(truth.config.vocab_size, ((longest - 60, (60, 9)), (30, (longest // 2, 4)), (1, (12,))))
    scores = asyncio.run(worker(path, longest=longest).score(batch))
    with torch.no_grad():
        assert state(apart(scores, alone(truth, batch), batch)) == "exact"


@pytest.mark.long
@pytest.mark.parametrize("family", ["Qwen3", "OLMo 2", "OLMo 3", "Phi-3, windows", "GLM-4", "GPT-NeoX"])
def test_deepspeed_cuts_the_matrices_of_a_family(family: str, nano: Path, tmp_path: Path) -> None:
    """DeepSpeed cuts matrices whose inputs or outputs are whole on every rank, too."""
    path = store(family, nano / "model", tmp_path / "model")
    batch = rows(definition(path).config.vocab_size)
    zero = {"strategy": "deepspeed", "policy.deepspeed_config.zero_optimization.stage": 2}
    with closing(Pool(2, stay=True)) as ranks:
        changes = {**zero, "policy.tensor_parallel_size": 2}
        apart = spread(ranks, path, batch, alone(definition(path), batch), changes)
    assert state(apart) == "exact"


def test_the_table_has_every_family_and_no_wrong_number() -> None:
    assert stored().keys() == FAMILIES.keys()
    wrong = [
        (family, name)
        for family, row in stored().items()
        for name, cell in row.items()
        if state(cell).startswith("off")
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
    assert {state(row[name]) for name in ("learner", "gradient", "engine", "lora", "export", "sharded")} == {"exact"}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("family", FAMILIES)
def test_plan_knows_the_weights_of_every_family(family: str) -> None:
    config = FAMILIES[family].config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert counted_shape(config).parameters == weights
    shape = shape_of(config.to_dict())
    assert shape is None or shape.is_estimated or shape.parameters == pytest.approx(weights, rel=0.01)


def test_the_kinds_that_are_counted_are_among_the_families() -> None:
    assert {family.config().model_type for family in FAMILIES.values()} >= COUNTED


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
