"""A model's files are data: a configuration that would make transformers fetch or run code is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations import hub_kernels

from skyrl.errors import ModelError
from skyrl.inference.vllm.model import model_facts
from skyrl.models.files.loading import load_causal_lm, load_config, load_tokenizer

TRICKS: dict[str, tuple[dict[str, Any], str]] = {
    "kernels for attention": ({"_attn_implementation": "owner/repo"}, "_attn_implementation = 'owner/repo'"),
    "kernels under the public name": ({"attn_implementation": "owner/repo@v1:fn"}, "attn_implementation = "),
    "kernels by part": ({"_attn_implementation": {"": "sdpa", "text_config": "owner/repo"}}, "_attn_implementation = "),
    "kernels for experts": ({"_experts_implementation": "owner/repo"}, "_experts_implementation = "),
    "kernels of a part": ({"text_config": {"_attn_implementation": "a/b"}}, "text_config._attn_implementation = "),
    "a paged kernel": ({"_attn_implementation": "paged|owner/repo"}, "_attn_implementation = "),
    "an internal setting": (
        {"_attn_implementation_internal": "sdpa"},
        "_attn_implementation_internal is an internal setting",
    ),
    "code of a part": ({"text_config": {"auto_map": {"AutoConfig": "x.Y"}}}, "text_config.auto_map names classes"),
    "code of a part of several kinds": (
        {"text_config": {"model_type": ["qwen2"], "auto_map": {"AutoConfig": "x.Y"}}},
        "text_config.auto_map names classes",
    ),
    "code of another repository": ({"auto_map": {"AutoModelForCausalLM": "own/er--x.Y"}}, "auto_map names classes"),
    "code of an unknown kind": ({"model_type": "mine", "auto_map": {"AutoConfig": "x.Y"}}, "auto_map names classes"),
}


def configure(folder: Path, changes: dict[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("trick", TRICKS)
def test_a_configuration_that_asks_for_code_is_refused_with_file_and_key(trick: str, folder: Path) -> None:
    changes, message = TRICKS[trick]
    configure(folder, changes)
    for load in (load_config, load_tokenizer, model_facts):
        with pytest.raises(ModelError, match="config.json would load code from elsewhere: ") as refused:
            load(str(folder))
        assert message in str(refused.value)


def test_a_kernel_is_not_fetched_though_the_package_for_kernels_is_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *args, **_: calls.append(args))
    configure(folder, {"_attn_implementation": "owner/repo"})
    with pytest.raises(ModelError, match="_attn_implementation"):
        load_causal_lm(str(folder), dtype=torch.float32, attention="sdpa", device=torch.device("cpu"))
    assert calls == []


def test_a_model_that_transformers_knows_may_name_code_that_is_then_not_used(folder: Path) -> None:
    configure(folder, {"auto_map": {"AutoModelForCausalLM": "modeling_qwen2.Qwen2ForCausalLM"}})
    assert load_config(str(folder)).model_type == "qwen2"


def test_an_implementation_of_transformers_own_is_no_code_from_elsewhere(folder: Path) -> None:
    configure(folder, {"_attn_implementation": "flash_attention_2", "_experts_implementation": "grouped_mm"})
    assert load_config(str(folder)).model_type == "qwen2"
