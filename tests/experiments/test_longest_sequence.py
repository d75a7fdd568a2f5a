"""Tokens of an engine's longest sequence: what the run needs, or what the engine's own options say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl.experiments.factories import longest_sequence
from tests.nano_run import config

EXTRA = "generator__inference_engine__engine_init_kwargs"


@pytest.mark.parametrize(
    ("kind", "options", "longest"),
    [
        ("vllm", {}, 21),  # the longest prompt and answer of the run
        ("vllm", {"max_model_len": 48}, 48),
        ("vllm", {"max_model_len": 4096}, 4096),
        ("vllm", {"context_length": 48}, 21),
        ("sglang", {"context_length": 48}, 48),
    ],
)
def test_an_engine_is_made_for_the_length_that_its_options_name(
    nano: Path, tmp_path: Path, kind: str, options: dict[str, Any], longest: int
) -> None:
    run = config(nano, tmp_path, generator__inference_engine__backend=kind, **{EXTRA: options})
    assert longest_sequence(run) == longest
