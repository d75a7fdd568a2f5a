"""What the table of engines says, and who reads it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from skyrl.config import InferenceEngineConfig, SkyRLTrainConfig, compose
from skyrl.config.derive.engine_backends import BACKENDS, backends_that, server_urls, weight_dtype
from skyrl.config.derive.rl_models import has_reference
from skyrl.config.derive.sizes import on_ray, starts_engines
from skyrl.tree.classes import docs_of, fields_of
from tests.config.leaves import RUNNABLE

ROOT = Path(__file__).parents[2]
MAKES_ENGINES = {"skyrl/experiments/factories.py"}
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
    backends = {name: re.findall(r"\w+", match[1]) for name, match in _endings(named)}
    read_by = {name: [kind for kind, backend in BACKENDS.items() if name in backend.fields] for name in backends}
    assert {name: sorted(set(kinds) - {"and"}) for name, kinds in backends.items()} == {
        name: sorted(kinds) for name, kinds in read_by.items()
    }
    assert "engine_init_kwargs" in backends


def _endings(pattern: re.Pattern[str]) -> Iterator[tuple[str, re.Match[str]]]:
    for name, docs in docs_of(InferenceEngineConfig).items():
        if match := pattern.search(docs.strip()):
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
    comparisons = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in sorted((ROOT / "skyrl").rglob("*.py"))
        if str(file.relative_to(ROOT)) not in MAKES_ENGINES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Compare) and ast.unparse(node.left).endswith("engine.backend")
    ]
    assert comparisons == []


E = "generator.inference_engine."
OLD, NEW = ["127.0.0.1:8001"], ["http://10.0.0.1:8000"]
WITH_SCHEME = ("http://127.0.0.1:8001",)


def run_of(**engine: Any) -> tuple[SkyRLTrainConfig, set[str]]:
    """A run with these engines, and the paths that have no effect in it."""
    values = {f"{E}{name}": value for name, value in engine.items()}
    composed = compose([], RUNNABLE | {"trainer.placement.colocate_all": False} | values)
    return composed.config, {warning.path for warning in composed.warnings if "has no effect" in warning.message}


@pytest.mark.parametrize(
    ("engine", "starts", "urls", "idle"),
    [
        # the defaults of SkyRL's design and of its Hydra era, word for word: addresses that are not applicable
        ({"backend": "vllm", "run_engines_locally": True, "remote_urls": OLD}, True, (), {"remote_urls"}),
        ({"backend": "vllm", "remote_urls": OLD}, True, (), {"remote_urls"}),
        ({"backend": "sglang", "run_engines_locally": True, "remote_urls": OLD}, True, (), {"remote_urls"}),
        ({"backend": "torch", "run_engines_locally": True, "remote_urls": OLD}, True, (), {"remote_urls"}),
        ({"backend": "vllm", "run_engines_locally": False, "remote_urls": OLD}, False, WITH_SCHEME, ()),
        (
            {"backend": "sglang", "run_engines_locally": False, "remote_urls": OLD},
            False,
            WITH_SCHEME,
            (),
        ),
        ({"backend": "http", "remote_urls": OLD}, False, WITH_SCHEME, ()),
        ({"backend": "vllm", "external_server_urls": NEW}, False, tuple(NEW), ()),
        ({"backend": "vllm", "external_server_urls": NEW, "remote_urls": OLD}, False, tuple(NEW), {"remote_urls"}),
        ({"backend": "vllm", "external_proxy_url": NEW[0], "remote_urls": OLD}, False, WITH_SCHEME, ()),
        # contradictions: these addresses are those of engines that are already running
        (
            {"backend": "vllm", "run_engines_locally": True, "external_server_urls": NEW},
            False,
            tuple(NEW),
            {"run_engines_locally"},
        ),
        (
            {"backend": "sglang", "run_engines_locally": True, "external_proxy_url": NEW[0]},
            False,
            (),
            {"run_engines_locally"},
        ),
        (
            {"backend": "http", "run_engines_locally": True, "external_server_urls": NEW},
            False,
            tuple(NEW),
            {"run_engines_locally"},
        ),
        ({"backend": "vllm", "run_engines_locally": False, "external_server_urls": NEW}, False, tuple(NEW), ()),
    ],
)
def test_addresses_that_skyrl_writes_beside_engines_of_the_run_do_not_replace_them(
    engine: dict[str, Any], starts: bool, urls: tuple[str, ...], idle: set[str]
) -> None:
    run, without_effect = run_of(**engine)
    assert (starts_engines(run), server_urls(run.generator.inference_engine)) == (starts, urls)
    assert without_effect & {f"{E}run_engines_locally", f"{E}remote_urls"} == {E + name for name in idle}


@pytest.mark.parametrize(
    ("off", "settings", "is_off"),
    [
        ({f"{E}run_engines_locally": True}, {f"{E}remote_urls": OLD}, starts_engines),
        (
            {"trainer.algorithm.use_kl_loss": False, "trainer.algorithm.use_kl_in_reward": False},
            {"trainer.algorithm.kl_loss_coef": 0.1},
            lambda run: not has_reference(run),
        ),
        (
            {"trainer.fully_async.enabled": False},
            {"trainer.fully_async.max_staleness_steps": 3},
            lambda run: not run.trainer.fully_async.enabled,
        ),
        (
            {"trainer.policy.model.lora.rank": 0},
            {"trainer.policy.model.lora.alpha": 32},
            lambda run: run.trainer.policy.model.lora.rank == 0,
        ),
        (
            {f"{E}enable_http_endpoint": False},
            {f"{E}http_endpoint_port": 9000},
            lambda run: not run.generator.inference_engine.enable_http_endpoint,
        ),
        (
            {"trainer.placement.executor": "in_process"},
            {"trainer.placement.ray_address": "auto"},
            lambda run: not on_ray(run),
        ),
    ],
)
def test_a_switch_that_is_written_off_stays_off_whatever_stands_beside_it(
    off: dict[str, Any], settings: dict[str, Any], is_off: Any
) -> None:
    composed = compose([], RUNNABLE | off | settings)
    assert is_off(composed.config)
    idle = {warning.path for warning in composed.warnings if "has no effect" in warning.message}
    assert idle & {*settings, *(path.rpartition(".")[0] for path in settings)}
