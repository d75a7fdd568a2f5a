"""Allocation strings: what each form says, and the message of each that says nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyrl.planning.allocation import Allocation, AllocationError, Part, read_allocation, read_part
from skyrl.planning.topology import Degrees

REFERENCE = Path(__file__).parents[1] / "reference"


def parts(text: str) -> list[tuple[str, int]]:
    return [(part.backend, part.gpus) for part in read_allocation(text).parts]


@pytest.mark.parametrize(
    ("text", "expected", "gpus"),
    [
        ("sglang:d4t2+fsdp:d8", [("sglang", 8), ("fsdp", 8)], 16),
        ("vllm:d2t4|megatron:d2t4", [("vllm", 8), ("megatron", 8)], 8),
        ("sglang.d4p1t1+d4p1t1", [("sglang", 4), ("", 4)], 8),
        ("sglang.d16p1m1+d8p2m1", [("sglang", 16), ("", 16)], 32),
        ("d4t2p1", [("", 8)], 8),
        ("vllm:d8t4", [("vllm", 32)], 32),
        ("sglang:d4t2+eval", [("sglang", 8), ("eval", 0)], 8),
        ("sglang:d4t2 + cpu", [("sglang", 8), ("cpu", 0)], 8),
        ("fsdp:d4c2", [("fsdp", 8)], 8),
    ],
)
def test_the_forms_of_areal_with_their_gpus(text: str, expected: list[tuple[str, int]], gpus: int) -> None:
    assert (parts(text), read_allocation(text).gpus) == (expected, gpus)


@pytest.mark.parametrize(
    ("text", "learner"),
    [("d4t2", "fsdp"), ("d2p2t1", "megatron"), ("d4e2", "megatron"), ("fsdp:d4", "fsdp"), ("archon:d4", "archon")],
)
def test_pipelines_and_experts_are_megatrons_unless_the_string_says_otherwise(text: str, learner: str) -> None:
    assert read_part(text).learner == learner


def test_a_hybrid_splits_attention_and_experts_differently() -> None:
    for text in ("megatron:(attn:d1p2t2|ffn:d1p2e2)", "megatron:(attn:d1p2t2|ffn:p2e2)", "attn:p2t2|ffn:p2e2"):
        part = read_part(text)
        assert (part.degrees, part.experts) == (Degrees(pipeline=2, tensor=2), Degrees(pipeline=2, expert=2))
        assert part.learner == "megatron"
    allocation = read_allocation("sglang:d4+megatron:(attn:d1p2t2|ffn:d1p2e2)")
    assert [len(group) for group in allocation.groups] == [1, 1]


OTHERWISE = {"sglang[r1]": "two parts generate"}
"""Beginnings of strings that AReaL reads and that no run here has -> why."""


def read_as_areal_does(text: str) -> list[list[object]]:
    """Backend, name, and degrees (data, pipeline, tensor, context, expert, tensor of experts) of each part."""
    specs: list[list[object]] = []
    for part in read_allocation(text).parts:
        own, experts = part.degrees, part.experts or Degrees()
        degrees = [own.data, own.pipeline, own.tensor, own.context, experts.expert]
        degrees += [experts.tensor] if experts.expert > 1 else []
        specs += [[part.backend, part.name or None, degrees]] if part.gpus else []
    return specs


@pytest.mark.parametrize("version", ["0.3.3", "2.0.0"])
def test_the_strings_of_areals_tests_and_pages_are_read_as_it_reads_them(version: str) -> None:
    strings = json.loads((REFERENCE / "areal_allocations.json").read_text())[version]
    assert len(strings) > 20
    for text, parts_there in strings.items():
        if reason := next((reason for start, reason in OTHERWISE.items() if text.startswith(start)), ""):
            with pytest.raises(AllocationError, match=reason):
                read_allocation(text)
            continue
        specs = read_as_areal_does(text)
        assert [spec[1:] for spec in specs] == [spec[1:] for spec in parts_there], text
        backends = zip((spec[0] for spec in specs), (spec[0] for spec in parts_there), strict=True)
        assert all(skyrl in ("", areal) for skyrl, areal in backends), text


@pytest.mark.parametrize(
    ("text", "experts"),
    [
        ("megatron:d2t2e4", Degrees(expert=4)),
        ("megatron:d2p2t4e4", Degrees(pipeline=2, expert=4, data=2)),
        ("megatron:d4t2e2", Degrees(expert=2, data=4)),
        ("megatron:d2t2c2e8", Degrees(expert=8)),
        ("archon:d8e8", Degrees(expert=8)),
        ("fsdp:d4t2e4", Degrees(expert=4, data=2)),
    ],
)
def test_the_tensors_of_experts_are_whole_unless_the_string_splits_them(text: str, experts: Degrees) -> None:
    assert read_part(text).experts == experts


def test_named_parts_share_gpus_where_a_bar_is_between_them() -> None:
    allocation = read_allocation("sglang[rollout]:d2+fsdp[actor]:d4|fsdp[critic]:d4")
    assert [[part.name for part in group] for group in allocation.groups] == [["rollout"], ["actor", "critic"]]
    assert (allocation.gpus, allocation.shares, allocation.kind) == (6, False, "training")
    assert allocation.learner("critic") == Part(backend="fsdp", name="critic", degrees=Degrees(data=4))
    assert allocation.learner("ref", "actor") == allocation.learner("actor")
    assert allocation.learner("ref") is None


def test_what_a_string_is_for() -> None:
    kinds = {text: read_allocation(text).kind for text in ("d4", "vllm:d4", "vllm:d4+eval", "vllm:d4|d4")}
    assert list(kinds.values()) == ["learning alone", "serving alone", "serving alone", "training"]
    assert read_allocation("vllm:d4|d4").shares
    assert not read_allocation("vllm:d4+d4").shares


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("vllm:d2t4|megatron:d2t4p2", "the same number of them, but these take 8 and 16"),
        ("vllm:d2+fsdp:d4|fsdp:d4", "3 parts each need a name"),
        ("vllm[a]:d2+fsdp[b]:d4|fsdp[b]:d4", "two parts have the name b"),
        ("vllm:d2d2", "gives the data degree twice"),
        ("vllm:d0", "are not degrees"),
        ("vllm:x2", "the degrees are d, p, t"),
        ("vllm:d2c2", "engines have the degrees d, t and p"),
        ("tgi:d2", "'tgi' in 'tgi:d2' is not a backend"),
        ("d4t2e3", "pipeline x tensor x expert = 6 does not divide 8 ranks"),
        ("megatron:(attn:d4|ffn:d2e4)", "attention takes 4 ranks and experts 8"),
        ("megatron:(attn:p2|ffn:e2)", "attention has 2 pipeline stages and experts 1"),
        ("vllm:d1+sglang:d1", "two parts generate"),
        ("vllm:d4+", "is not a part"),
        ("", "is not a part"),
        ("vllm:(d4", "is not a part"),
        ("vllm:", "is not a part"),
        ("4", "are not degrees"),
    ],
)
def test_a_string_that_says_nothing_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(AllocationError) as failure:
        read_allocation(text)
    assert reason in str(failure.value)


def test_spaces_and_order_mean_nothing() -> None:
    spaced: Allocation = read_allocation(" vllm : t2 d4 | fsdp : d8 ")
    assert spaced == read_allocation("vllm:d4t2|fsdp:d8")
