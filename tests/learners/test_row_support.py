"""The small copy shows what a model's rows may share, and every fault that its bounds can cause."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from skyrl.config.derive.model_overrides import LONGEST_ROW
from skyrl.errors import ModelError
from skyrl.inference.torch import sampling_support as engine
from skyrl.inference.torch.sampling_support import sampling_support
from skyrl.learners import row_support as rows
from skyrl.learners.row_support import row_support
from skyrl.models import small_copy as small_copy_module
from skyrl.models.attention import segment_attention
from skyrl.models.attention.segment_attention import SEGMENTS, WHOLE, KeyBounds
from skyrl.models.files.facts import sizes_to_cut
from skyrl.models.files.overrides import varies_with_length, with_overrides
from skyrl.models.small_copy import LONGEST, small_config, small_copy
from skyrl.planning.batches import uneven_parts
from tests.models.families import FAMILIES

BOUNDED = {
    "Gemma 2": "softcap",
    "Gemma 3": "window",
    "gpt-oss": "sinks",
    "Llama 4 without temperature tuning": "chunk",
    "Mistral": "window",
    "Qwen2, windows": "window",
    "Phi-3, windows": "window",
    "OLMo 3": "window",
    "Cohere 2": "window",
}
"""Families whose attention has a bound or a weight that a plain kernel leaves out, and which."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What is found about a configuration is kept; here the code changes."""
    for function in (rows._difference, rows._copy, engine._fault):
        function.cache_clear()
    yield
    for function in (rows._difference, rows._copy, engine._fault):
        function.cache_clear()


def asked(family: str) -> Any:
    return with_overrides(FAMILIES[family].config(), {LONGEST_ROW: 60})


@pytest.mark.parametrize("family", BOUNDED)
def test_bounded_attention_is_packed_and_shares_prompts(family: str) -> None:
    support = row_support(asked(family), "sdpa", pack=True, share_prompts=True)
    assert (support.attention, support.pack, support.share_prompts, support.reason) == (SEGMENTS, True, True, "")


@pytest.mark.parametrize(("family", "lost"), BOUNDED.items())
def test_a_bound_that_attention_loses_is_found(family: str, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention without it gives every layout other numbers; the rows then run as the model defines them."""
    lose(lost, monkeypatch)
    support = row_support(asked(family), "sdpa", pack=True, share_prompts=True)
    assert support.attention != SEGMENTS
    assert "differ from each row alone by" in support.reason


def lose(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the remedy for one kind of bound away."""
    if lost in ("window", "chunk"):
        original = segment_attention.key_bounds_of

        def shorter(module: torch.nn.Module, window: int | None) -> KeyBounds:
            bounds = original(module, window)
            return KeyBounds(
                window=None if lost == "window" else bounds.window, chunk=None if lost == "chunk" else bounds.chunk
            )

        monkeypatch.setattr(segment_attention, "key_bounds_of", shorter)
    else:
        kept = segment_attention.segment_attention

        def without(*args: Any, **kwargs: Any) -> Any:
            return kept(*args, **{**kwargs, "softcap" if lost == "softcap" else "s_aux": None})

        monkeypatch.setattr(segment_attention, "segment_attention", without)
    segment_attention.register()
    monkeypatch.setattr(rows, "register", lambda: segment_attention.register())


@pytest.fixture(autouse=True)
def registered_again() -> Iterator[None]:
    yield
    segment_attention.register()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["Phi-3.5 and Phi-4-mini, LongRoPE", "Phi-3.5-MoE", "Llama, dynamic NTK"])
def test_rotary_embeddings_of_each_call_are_found(family: str) -> None:
    """A long row would change the numbers of the short ones beside it, however they are laid out."""
    config = FAMILIES[family].config()
    assert varies_with_length(config)
    with pytest.raises(ModelError, match="depends on"):
        row_support(config, "sdpa", pack=True, share_prompts=True)
    with pytest.raises(ModelError, match=r"tokens differ from those of each row alone by .* nats"):
        sampling_support(config, "sdpa")
    assert not row_support(asked(family), "sdpa", pack=True, share_prompts=True).reason
    assert not sampling_support(asked(family), "sdpa").reason


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "attention", "reason"),
    [
        ("Llama 4", "sdpa", "packed rows with shared prompts differ from each row alone"),  # by place, not position
        ("Qwen3.5", "sdpa", "packed rows with shared prompts differ from each row alone"),  # a state along the row
        ("LFM2", "sdpa", "packed rows with shared prompts differ from each row alone"),  # convolutions along the row
        ("Mamba", "eager", "packed rows with shared prompts differ from each row alone"),
        ("Nemotron-H", "sdpa", "packed rows with shared prompts differ from each row alone"),
        (
            "MiniMax-M3",
            "sdpa",
            "packed rows with shared prompts differ from each row alone",
        ),  # blocks of keys, by place
        ("DeepSeek-V4", "eager", "packed rows with shared prompts differ from each row alone"),  # keys in one, by place
        ("BLOOM", "eager", "BloomForCausalLM has no attention but its own"),  # alibi
        ("Falcon", "eager", "FalconForCausalLM has no attention but its own"),
    ],
)
def test_what_cannot_be_packed_runs_unpacked_and_says_why(family: str, attention: str, reason: str) -> None:
    config = asked(family)
    support = row_support(config, "sdpa", pack=True, share_prompts=True)
    assert (support.attention, support.pack, support.share_prompts) == (attention, False, False)
    kind = config.model_type
    assert support.reason.startswith(f"{kind}: rows run unpacked, with attention {attention}: {reason}")


def test_a_model_may_pack_without_sharing_prompts() -> None:
    support = row_support(asked("StableLM"), "sdpa", pack=True, share_prompts=True)
    assert (support.attention, support.pack, support.share_prompts) == ("sdpa", True, False)
    assert "packed without shared prompts" in support.reason


@pytest.mark.parametrize("family", ["DeepSeek-V3.2", "GLM-5"])
def test_a_model_that_attends_the_best_keys_is_causal(family: str) -> None:
    """Which keys are the best does not depend on later tokens, unless many have the same score."""
    support = row_support(asked(family), "sdpa", pack=True, share_prompts=True)
    assert (support.attention, support.pack, support.share_prompts) == ("sdpa", True, False)


BOUND = re.compile("window|chunk|block_size|budget|extent|compress|keep|topk_blocks|max_distance|original_max|_floor$")
"""Names of what makes tokens depend on each other only beyond a number of them."""


@pytest.mark.long
def test_a_small_copy_shrinks_every_bound_of_transformers_models() -> None:
    """Rows of a small copy are longer than each of its bounds; one that it keeps would be seen by no probe. A copy four
    times as wide can be cut by eight ranks, if transformers has a plan for it.
    """
    kept, uncut = [], []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            small = small_config(CONFIG_MAPPING[kind]())
        except Exception:  # noqa: BLE001 - no default, or no layers: such a model is not packed
            continue
        values = [
            (name, value) for name, value in small.to_dict().items() if BOUND.search(name) and "layers" not in name
        ]
        wide = small_config(CONFIG_MAPPING[kind](), times=4)
        uncut += [kind] * bool(wide.base_model_tp_plan and uneven_parts(sizes_to_cut(wide.to_dict()), 8, 8))
        kept += [(kind, name, value) for name, value in values if any(number >= LONGEST for number in numbers(value))]
    assert kept == []
    assert uncut == []


def test_a_bound_that_a_small_copy_keeps_hides_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = asked("MiniMax-M3")
    config.index_block_size = 128  # as released
    assert not row_support(config, "sdpa", pack=True, share_prompts=True).pack
    rows._copy.cache_clear()
    rows._difference.cache_clear()
    bounds = {name: size for name, size in small_copy_module._MOST.items() if name != "index_block_size"}
    monkeypatch.setattr(small_copy_module, "_MOST", bounds)
    assert row_support(config, "sdpa", pack=True, share_prompts=True).pack


def numbers(value: object) -> Iterator[int]:
    """The whole numbers in a value."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, dict | list | tuple):
        for element in value.values() if isinstance(value, dict) else value:
            yield from numbers(element)


def test_what_is_asked_is_not_exceeded() -> None:
    unpacked = row_support(asked("Gemma 2"), "sdpa", pack=False, share_prompts=True)
    assert (unpacked.attention, unpacked.pack, unpacked.share_prompts, unpacked.reason) == (SEGMENTS, False, False, "")
    eager = row_support(asked("Gemma 2"), "eager", pack=True, share_prompts=True)
    assert (eager.attention, eager.pack, eager.share_prompts, eager.reason) == ("eager", True, False, "")


def test_a_model_that_cannot_be_made_small_runs_by_its_own_definition() -> None:
    config: Any = asked("Llama")
    config.hidden_act = "none of transformers'"
    support = row_support(config, "sdpa", pack=True, share_prompts=True)
    assert (support.attention, support.pack, support.share_prompts) == ("eager", False, False)
    assert "no small copy can be probed (KeyError" in support.reason


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("Llama 4", "tokens differ from those of each row alone"),  # its queries are scaled by place
        ("RecurrentGemma", "tokens differ from those of each row alone"),  # a state that no cache knows of
        ("Qwen3-Next", "keeps a state other than keys and values"),
        ("LFM2", "keeps a state other than keys and values"),
    ],
)
def test_the_embedded_engine_refuses_what_it_cannot_sample_from(family: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        sampling_support(asked(family), "sdpa")


@pytest.mark.parametrize(
    ("family", "attention"), [("Gemma 2", "sdpa"), ("Gemma 3", "sdpa"), ("gpt-oss", "eager"), ("BLOOM", "eager")]
)
def test_the_embedded_engine_samples_by_an_attention_that_is_right(family: str, attention: str) -> None:
    assert sampling_support(asked(family), "sdpa").attention == attention


def test_a_soft_cap_that_the_engine_loses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from skyrl.inference.torch import causal_lm

    monkeypatch.setattr(causal_lm, "attend", lambda query, key, value, _, seen: plain(query, key, value, seen))
    assert "tokens differ" in sampling_support(asked("Gemma 2"), "sdpa").reason


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, is_causal=seen is None, enable_gqa=True
    )


LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 4 Scout": ("llama4_text", {}),
    "Gemma 2 27B": ("gemma2", {"hidden_size": 4608, "num_hidden_layers": 46}),
    "Qwen3-Next 80B": ("qwen3_next", {}),
    "DeepSeek-V3": ("deepseek_v3", {}),
    "gpt-oss 120B": ("gpt_oss", {}),
    "Phi-3.5-mini": (
        "phi3",
        {
            "max_position_embeddings": 131_072,
            "original_max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0] * 48,
                "long_factor": [2.0] * 48,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
}


@pytest.mark.parametrize("model", LARGE)
def test_a_copy_of_a_large_model_is_small(model: str) -> None:
    """Few weights, whatever the model's size; a probe of it takes a tenth of a second."""
    from transformers import AutoConfig

    kind, values = LARGE[model]
    config = with_overrides(AutoConfig.for_model(kind, **values), {LONGEST_ROW: 8192})
    copy: Any = small_copy(config)
    assert copy.num_parameters() < 500_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row_support(config, "sdpa", pack=True, share_prompts=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes


def test_reach_counts_positions_of_the_sequence() -> None:
    assert KeyBounds(window=2).mask(1, 3, torch.device("cpu")).int().tolist() == [
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]
    assert KeyBounds(chunk=2).mask(1, 3, torch.device("cpu")).int().tolist() == [
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 1, 1],
    ]
    assert KeyBounds(window=4, chunk=8).within(4) == WHOLE
