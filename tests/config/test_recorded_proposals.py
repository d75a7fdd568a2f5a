"""Layouts, seconds and bytes of `skyrl plan --fit` as they were recorded, for some models, numbers of GPUs and runs.

A net, and no proof: a number that changes has to be meant. `python -m tests.config.test_recorded_proposals` makes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from skyrl.autotune.search import Proposal
from skyrl.config.estimates.memory import phases_of
from tests.config.test_fit import proposed, run_of

RECORDED = Path(__file__).with_name("recorded_proposals.json")

LORA = {"trainer.policy.model.lora.rank": 16}
BOUNDED = {"trainer.max_tokens_per_microbatch": 16_384, "trainer.use_sample_packing": True}
REFERENCE = {"trainer.algorithm.use_kl_loss": True, "trainer.update_epochs_per_batch": 2}

CASES: Mapping[str, tuple[str, int, Mapping[str, Any]]] = {
    "7B on 1": ("Qwen/Qwen2.5-7B", 1, {}),
    "7B on 8": ("Qwen/Qwen2.5-7B", 8, {}),
    "7B on 8, bounded in tokens": ("Qwen/Qwen2.5-7B", 8, BOUNDED),
    "7B on 16 with a reference": ("Qwen/Qwen2.5-7B", 16, REFERENCE),
    "7B on 8 with an adapter": ("Qwen/Qwen2.5-7B", 8, LORA),
    "30B of experts on 16": ("Qwen/Qwen3-30B-A3B", 16, {}),
    "70B on 64": ("meta-llama/Llama-3.1-70B", 64, {}),
}


def found(name: str) -> dict[str, Any]:
    """All proposals of a case, and the bytes of each phase of the fastest, as JSON has them."""
    model, gpus, changes = CASES[name]
    _, proposals = proposed(model, gpus, changes)
    phases = phases_of(run_of(model, {**changes, **proposals[0].changes})) or ()
    plain = {"proposals": [_row(proposal) for proposal in proposals], "phases": [repr(phase) for phase in phases]}
    return json.loads(json.dumps(plain))  # type: ignore[no-any-return]  # a table again


def _row(proposal: Proposal) -> list[Any]:
    seconds = {name: float(f"{value:.6g}") for name, value in attrs.asdict(proposal.seconds).items()}
    return [dict(sorted(proposal.changes.items())), seconds, proposal.memory, proposal.host]


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_what_is_proposed_is_what_was_recorded(name: str) -> None:
    assert found(name) == json.loads(RECORDED.read_text(encoding="utf-8"))[name]


if __name__ == "__main__":
    RECORDED.write_text(json.dumps({name: found(name) for name in CASES}, indent=1) + "\n", encoding="utf-8")
