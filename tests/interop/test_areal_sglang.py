"""AReaL's files whose engines stay SGLang's: each option has its effect at the server, or a reason why it has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from skyrl.config import ConfigError
from skyrl.config.derive.engine_options import SGLANG_FIXED, SGLANG_SETTINGS
from skyrl.config.loading.load import compose
from skyrl.inference.servers.sglang_engine import launch_command
from skyrl.interop.areal.convert import convert_keys
from skyrl.interop.peer_trees import peer_trees
from skyrl.interop.report import Conversion, Line
from skyrl.tree.sparse import as_toml_has_it
from tests.interop.corpora import areal_files
from tests.interop.test_areal_every_setting import REQUIRED, another

REASONS = {
    "model_path": "differs from actor.path",
    "random_seed": "derived from trainer.seed",
    "skip_tokenizer_init": "engines receive token IDs",
    "context_length": "derived from the run's longest prompt and response",
    "enable_lora": "derived from trainer.policy.model.lora",
    "max_lora_rank": "derived from trainer.policy.model.lora",
    "lora_paths": "derived from trainer.policy.model.lora",
    "dp_size": "data parallelism within an engine",
    "enable_deterministic_inference": "derived from the run's other settings",
    "enable_multimodal": "vision-language",
    "enable_return_routed_experts": "routed experts from SGLang engines",
}
"""Option -> why it is not given to the server: the run decides it, or it is refused."""

FIELDS = {
    "enable_metrics": None,
    "dtype": ["float16"],
    "max_running_requests": ["3"],
    "mem_fraction_static": ["0.45"],
    "chunked_prefill_size": ["512"],
    "disable_radix_cache": None,
    "disable_cuda_graph": [],
}
"""Option -> its words where they are not its value's: switches that are turned off, and options that have a field."""


WHOLE = {key: value for key, value in REQUIRED.items() if not key.startswith("model.")} | {"gconfig.n_samples": 4}


def kept(changes: dict[str, Any]) -> Conversion:
    return convert_keys(WHOLE | {"actor.kl_ctl": 0.0} | changes, keep_engine=True)


def checked(conversion: Conversion, folder: Path) -> Any:
    """As `skyrl config check` reads the file."""
    file = folder / "converted.toml"
    file.write_text(tomli_w.dumps(as_toml_has_it(conversion.tables, conversion.root)))
    return compose([file], environ={}).config


def options(conversion: Conversion, folder: Path) -> dict[str, list[str]]:
    """Options of the server that the converted run starts, with their words."""
    engine = checked(conversion, folder).generator.inference_engine
    server_options: dict[str, list[str]] = {}
    for word in launch_command(engine, model_path="a/model", device="cuda", port=1)[3:]:
        if word.startswith("--"):
            words = server_options.setdefault(word[2:].replace("-", "_"), [])
        else:
            words.append(word)
    return server_options


def line_of(conversion: Conversion, source: str) -> Line:
    return next(line for line in conversion.lines if line.source == source)


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    """Options of AReaL's engines in all versions, with their defaults."""
    trees = peer_trees("areal", "GRPOConfig")
    assert len(trees) >= 3
    return {
        key.removeprefix("sglang."): value
        for tree in trees
        for key, value in tree.defaults.items()
        if key.startswith("sglang.")
    }


def test_every_option_reaches_the_command_line_or_has_a_reason(defaults: dict[str, Any], tmp_path: Path) -> None:
    values = {name: another(name, default) for name, default in defaults.items()} | {
        "dtype": "float16",
        "max_running_requests": 3,
        "chunked_prefill_size": 512,
    }
    conversion = kept({f"sglang.{name}": value for name, value in values.items()})
    server_options = options(conversion, tmp_path)
    assert len(values) > 50
    for name, value in values.items():
        line = line_of(conversion, f"sglang.{name}")
        if name in REASONS:
            assert REASONS[name] in line.reason and not line.targets, line
        elif name == "enable_multithread_load":
            assert server_options["model_loader_extra_config"] == ['{"enable_multithread_load": true}']
        elif value is False and name not in FIELDS:
            assert name not in server_options
        else:
            words = FIELDS.get(name, [] if value is True else [str(value)])
            assert (line.outcome, server_options.get(name)) == ("renamed", ["x"] if value == ["x"] else words), line


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("cuda_graph_bs", [1, 2, 4], ["1", "2", "4"]),
        ("cpu_offload_gb", 0, ["0"]),
        ("ep_size", 2, ["2"]),
        ("enable_metrics", False, None),
        ("disable_radix_cache", True, []),
        ("chunked_prefill_size", -1, ["-1"]),
        ("attention_backend", None, None),
        ("torchao_config", "", None),
        ("an_option_of_a_newer_areal", "on", ["on"]),
    ],
)
@pytest.mark.parametrize("table", ["sglang", "actor.sglang"])
def test_options_keep_areals_spelling(table: str, name: str, value: Any, words: Any, tmp_path: Path) -> None:
    assert options(kept({f"{table}.{name}": value}), tmp_path).get(name) == words


@pytest.mark.long
def test_options_that_the_server_of_a_run_refuses_are_never_written() -> None:
    for name in (*SGLANG_SETTINGS, *SGLANG_FIXED):
        for value in (1, True, "x"):
            targets = line_of(kept({f"sglang.{name}": value}), f"sglang.{name}").targets
            assert not any("engine_init_kwargs" in path for path in targets), name


@pytest.mark.long
def test_areals_files_keep_sglang_and_lose_none_of_its_settings(reference: Path, tmp_path: Path) -> None:
    tried = 0
    for name in ("areal_yaml_keys.json", "areal_yaml_keys_2026_05.json"):
        for file in areal_files(reference, name):
            named = str(file.facts.get("allocation_mode") or file.facts.get("rollout.backend"))
            if not named.startswith("sglang"):
                continue
            tried += 1
            conversion = convert_keys(file.facts, file.name, keep_engine=True)
            assert [line.source for line in conversion.lines] == list(file.facts)
            engine = conversion.tables["generator"]["inference_engine"]
            assert engine["backend"] == "sglang" and "max_model_len" not in engine.get("engine_init_kwargs", {})
            assert not [
                problem for problem in conversion.problems if problem.path.startswith("generator.inference_engine")
            ]
            if not any(problem.severity == "error" for problem in conversion.problems):
                options(conversion, tmp_path)
    assert tried >= 30


def test_sglang_converts_to_vllm_with_a_remark_unless_kept() -> None:
    conversion = convert_keys(WHOLE | {"sglang.attention_backend": "fa3"})
    assert conversion.tables["generator"]["inference_engine"]["backend"] == "vllm"
    assert "--keep-engine" in line_of(conversion, "sglang.attention_backend").reason
    assert "SGLang engines were converted to vLLM. --keep-engine keeps SGLang" in conversion.report()
    stays = kept({"sglang.attention_backend": "fa3"}).report()
    assert "The engines remain SGLang" in stays and "converted to vLLM" not in stays
    target = "generator.inference_engine.engine_init_kwargs.attention_backend"
    assert f"  sglang.attention_backend  ->  {target}\n" in stays


def test_keep_engine_does_not_change_vllm_engines() -> None:
    keys = WHOLE | {"rollout.backend": "vllm:d4", "sglang.attention_backend": "fa3"}
    assert convert_keys(keys, keep_engine=True) == convert_keys(keys)


def test_keep_engine_without_an_engine_raises() -> None:
    with pytest.raises(ConfigError, match=r"(?s)sets no engine to keep.*omit --keep-engine"):
        convert_keys({"actor.path": "a/b"}, "grpo.yaml", keep_engine=True)


@pytest.mark.parametrize("changes", [{"rollout.backend": "sglang:d2p2"}, {"allocation_mode": "sglang:d2p2+fsdp:d4"}])
def test_pipeline_stages_of_sglang_are_refused(changes: dict[str, str]) -> None:
    (key,) = changes
    line = line_of(kept(changes), key)
    assert (line.outcome, line.reason) == ("not yet", "pipeline parallelism in SGLang engines")
    assert line_of(convert_keys(WHOLE | changes), key).outcome == "renamed"


@pytest.mark.parametrize("key", ["rollout.return_routed_experts", "sglang.enable_return_routed_experts"])
def test_experts_are_not_returned_by_sglang(key: str) -> None:
    assert line_of(kept({key: True}), key).outcome == "not yet"
    assert line_of(kept({key: False}), key).outcome == "needless"


def test_defaults_of_areals_sglang_are_listed_where_they_differ() -> None:
    sources = {row.source for row in kept({"sglang.schedule_policy": "fcfs"}).other_defaults}
    assert {"sglang.attention_backend", "sglang.chunked_prefill_size"} <= sources
    assert not sources & {"sglang.schedule_policy", "sglang.disable_cuda_graph"}
    replaced = {row.source for row in convert_keys(WHOLE).other_defaults}
    assert "sglang.disable_radix_cache" in replaced and "sglang.attention_backend" not in replaced


@pytest.mark.parametrize(
    "changes", [{"allocation_mode": "sglang:d4|fsdp:d4"}, {"rollout.scheduling_strategy.type": "colocation"}]
)
def test_colocated_sglang_engines_are_reported_as_a_problem(changes: dict[str, str]) -> None:
    (problem,) = [problem for problem in kept(changes).problems if problem.severity == "error"]
    assert problem.path == "trainer.placement.colocate_all"
    assert problem.message == "sglang engines do not take turns with learners on the same GPUs"
