"""A setting below a feature that is off needs nothing, whatever its value."""

from __future__ import annotations

import pytest

from skyrl.interop.systems import Switch, why_idle
from skyrl.interop.translation import Values

PROFILER = Switch(
    key="*.profiler.enable", settings=("*.profiler.*",), default=False, source="peer/profiler.py:10"
)  # fmt: skip
ADAPTER = Switch(key="model.rank", settings=("model.adapter_*",), default=0, source="peer/model.py:20")
SHARDED = Switch(
    key="strategy",
    settings=("*.pipelines.*",),
    default="pipelines",
    is_off=lambda value: value != "pipelines",
    source="peer/strategy.py:30",
)
SWITCHES = (PROFILER, ADAPTER, SHARDED)


@pytest.mark.parametrize(
    ("setting", "values", "switch"),
    [
        ("policy.profiler.ranks", {}, "policy.profiler.enable"),
        ("policy.profiler.ranks", {"policy.profiler.enable": False}, "policy.profiler.enable"),
        ("policy.profiler.ranks", {"policy.profiler.enable": True}, ""),
        ("policy.profiler.ranks", {"ref.profiler.enable": True}, "policy.profiler.enable"),
        ("policy.profiler.enable", {}, ""),
        ("policy.other.ranks", {}, ""),
        ("model.adapter_path", {}, "model.rank"),
        ("model.adapter_path", {"model.rank": 8}, ""),
        ("model.rank", {}, ""),
        ("policy.pipelines.size", {}, ""),
    ],
)
def test_a_setting_is_idle_while_its_switch_is_off(setting: str, values: Values, switch: str) -> None:
    assert why_idle(setting, values, SWITCHES) == (f"only read with {switch}, which is off" if switch else "")


def test_the_reason_names_a_value_that_is_a_word() -> None:
    assert why_idle("policy.pipelines.size", {"strategy": "fsdp"}, SWITCHES) == "not read with strategy = 'fsdp'"
