"""What the table of engines says, and who reads it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from skyrl.config import InferenceEngineConfig
from skyrl.config.engine_backends import BACKENDS, backends_that, weight_dtype
from skyrl.tree.classes import fields_of
from skyrl.tree.docs import docs_of

ROOT = Path(__file__).parents[2]
MAKES_ENGINES = {"skyrl/experiments/collaborators.py"}
"""The one place that selects by name, as others do a loss or an estimator."""


def test_every_backend_that_can_be_named_is_in_the_table() -> None:
    assert set(BACKENDS) == set(get_args(get_type_hints(InferenceEngineConfig)["backend"]))


@pytest.mark.parametrize("name", BACKENDS)
def test_the_fields_of_a_backend_exist(name: str) -> None:
    assert set(BACKENDS[name].fields) <= set(fields_of(InferenceEngineConfig))


@pytest.mark.parametrize(
    ("names", "both", "either"),
    [
        (("vllm",), "vllm", "vllm"),
        (("vllm", "sglang"), "vllm and sglang", "vllm or sglang"),
        (("vllm", "http", "sglang"), "vllm, http and sglang", "vllm, http or sglang"),
    ],
)
def test_kinds_of_engine_are_listed_as_a_sentence_needs_it(names: tuple[str, ...], both: str, either: str) -> None:
    suiting = [BACKENDS[name] for name in names]
    assert backends_that(lambda backend: backend in suiting) == both
    assert backends_that(lambda backend: backend in suiting, join="or") == either


def test_the_documentation_of_a_field_ends_with_the_backends_that_read_it() -> None:
    named = re.compile(r"[.:)]\s+((?:vllm|torch|sglang|http)(?:(?: and|,)\s+(?:vllm|torch|sglang|http))*)\.$")
    found = {name: re.findall(r"\w+", match[1]) for name, match in _endings(named)}
    read_by = {name: [kind for kind, backend in BACKENDS.items() if name in backend.fields] for name in found}
    assert {name: sorted(set(kinds) - {"and"}) for name, kinds in found.items()} == {
        name: sorted(kinds) for name, kinds in read_by.items()
    }
    assert "engine_init_kwargs" in found


def _endings(pattern: re.Pattern[str]) -> Iterator[tuple[str, re.Match[str]]]:
    for name, said in docs_of(InferenceEngineConfig).items():
        if match := pattern.search(said.strip()):
            yield name, match


@pytest.mark.parametrize("name", BACKENDS)
def test_the_transports_of_a_backend_exist(name: str) -> None:
    assert set(BACKENDS[name].transports) <= set(get_args(get_type_hints(InferenceEngineConfig)["weight_sync_backend"]))


@pytest.mark.parametrize(
    ("computes", "travels"),
    [("int8", "bfloat16"), ("float16", "float16"), ("bfloat16", "bfloat16"), (None, "float32")],
)
def test_weights_travel_in_the_type_that_the_engine_computes_in_and_eight_bits_as_bfloat16(
    computes: Any, travels: str
) -> None:
    assert weight_dtype(InferenceEngineConfig(backend="torch", rollout_dtype=computes), "float32") == travels


def test_a_message_names_the_backends_that_suit() -> None:
    assert backends_that(lambda backend: "nccl" in backend.transports) == "vllm, http and sglang"
    assert backends_that(lambda backend: backend.package == "" and backend.is_started_by_the_run) == "torch"


def test_no_module_compares_the_name_of_a_backend() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in sorted((ROOT / "skyrl").rglob("*.py"))
        if str(file.relative_to(ROOT)) not in MAKES_ENGINES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Compare) and ast.unparse(node.left).endswith("engine.backend")
    ]
    assert found == []
