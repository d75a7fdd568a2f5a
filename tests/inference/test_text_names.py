"""Names of a language model's weights in vLLM's multimodal models, by stand-ins for those and their mapper."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest


@attrs.frozen
class Mapper:
    """vLLM's `WeightsMapper`, as far as prefixes go: one replaces the next, in order."""

    orig_to_new_prefix: dict[str, str | None] = attrs.field(factory=dict)

    def __or__(self, other: Mapper) -> Mapper:
        return Mapper({**self.orig_to_new_prefix, **other.orig_to_new_prefix})

    def name(self, name: str) -> str | None:
        for before, after in self.orig_to_new_prefix.items():
            if name.startswith(before):
                if after is None:
                    return None
                name = name.replace(before, after, 1)
        return name


SEES = Mapper({
    "model.visual.": "visual.", "lm_head.": "language_model.lm_head.", "model.language_model.": "language_model.model.",
})  # fmt: skip


@pytest.fixture
def know(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The function, of a module that is otherwise imported in vLLM's processes alone."""
    environment = ModuleType("skyrl.inference.vllm.environment")
    environment.end_with_host = lambda: None  # type: ignore[attr-defined]  # it would end this process with its parent
    monkeypatch.setitem(sys.modules, "skyrl.inference.vllm.environment", environment)
    monkeypatch.delitem(sys.modules, "skyrl.inference.vllm.worker", raising=False)
    from skyrl.inference.vllm.worker import accept_text_model_names

    yield accept_text_model_names
    sys.modules.pop("skyrl.inference.vllm.worker", None)


def test_a_model_that_sees_takes_names_with_and_without_the_table_of_its_language_model(know: Any) -> None:
    model = SimpleNamespace(hf_to_vllm_mapper=SEES)
    know(model)
    mapper = model.hf_to_vllm_mapper
    assert mapper.name("model.layers.0.mlp.weight") == "language_model.model.layers.0.mlp.weight"
    assert mapper.name("model.language_model.layers.0.mlp.weight") == "language_model.model.layers.0.mlp.weight"
    assert mapper.name("model.visual.blocks.0.weight") == "visual.blocks.0.weight"
    assert mapper.name("lm_head.weight") == "language_model.lm_head.weight"


def test_names_of_a_language_model_alone_stay_as_they_are(know: Any) -> None:
    model, without = SimpleNamespace(hf_to_vllm_mapper=Mapper({"mtp.": None})), SimpleNamespace()
    know(model)
    know(without)
    assert model.hf_to_vllm_mapper == Mapper({"mtp.": None})
    assert vars(without) == {}
