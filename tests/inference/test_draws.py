from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from skyrl.inference.draws import sample_seed, uniforms
from skyrl.inference.engine import SampleKey

KEY = SampleKey(run_seed=1, weight_version=2, prompt_id="3", sample_index=4)
WORD = 2**64


def splitmix64(seed: int, position: int) -> int:
    """The published generator in whole numbers."""
    state = (seed + (position + 1) * 0x9E3779B97F4A7C15) % WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % WORD
    return state ^ (state >> 31)


def test_uniforms_are_the_top_bits_of_splitmix64_at_any_position() -> None:
    assert splitmix64(1234567, 0) == 6457827717110365317  # the published first output for this seed
    seeds, positions = [1234567, 0, -1, 2**63 - 1, -(2**63)], [0, 1, 5, 100_000, 3]
    expected = [(splitmix64(s % WORD, p) >> 12) * 2.0**-52 for s, p in zip(seeds, positions, strict=True)]
    assert uniforms(torch.tensor(seeds), torch.tensor(positions)).tolist() == expected


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    drawn = uniforms(torch.full((100_000,), 42), torch.arange(100_000))
    assert 0.0 <= drawn.min() and drawn.max() < 1.0
    counts = torch.histc(drawn.float(), bins=20, min=0.0, max=1.0)
    chi_square = ((counts - 5_000) ** 2 / 5_000).sum()
    assert chi_square < 43.8  # 99.9 % of 19 degrees of freedom


def test_a_seed_is_the_same_in_every_version() -> None:
    assert sample_seed(KEY) == -5117423632407834919  # another number would break every run that resumes


@pytest.mark.parametrize(
    "change",
    [
        {"run_seed": 9},
        {"weight_version": 9},
        {"prompt_id": "9"},
        {"sample_index": 9},
        {"turn": 9},
        {"attempt": 9},
        {"purpose": "eval"},
        {"occurrence": 1},
        {"prompt_id": '3",4'},
    ],
)
def test_every_field_of_the_key_changes_the_seed(change: dict[str, Any]) -> None:
    assert sample_seed(attrs.evolve(KEY, **change)) != sample_seed(KEY)
