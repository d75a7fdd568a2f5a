"""A server whose sequences are shorter than a run's is named, with what to do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from skyrl.errors import RunError
from skyrl.inference.servers.http_engine import HttpEngine
from skyrl.inference.servers.server_api import ServerFacts
from tests.inference.nano import nano_model, nano_tokenizer, request

REMEDY = "--max-model-len, SGLang: --context-length, skyrl serve: trainer.max_prompt_length"


class Short:
    """A server with sequences of at most 8 tokens."""

    url = "http://server:8000"

    async def connect(self, *, claim: bool) -> ServerFacts:
        return ServerFacts(models=("a model",), max_model_len=8, is_versioned=True)

    async def resume(self) -> None:
        """Nothing was paused."""

    async def check_health(self, seconds: float) -> object:
        """It lives."""

    async def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    nano_model().save_pretrained(tmp_path)
    return tmp_path


def engine(folder: Path, **more: Any) -> HttpEngine:
    server: Any = Short()
    return HttpEngine(server, model_path=str(folder), tokenizer=nano_tokenizer(), **more)


async def test_a_prompt_that_does_not_fit_names_the_server_and_the_remedy(folder: Path) -> None:
    with pytest.raises(RunError) as refused:
        await engine(folder).generate(request((1,) * 9, max_generate_length=12))
    text = str(refused.value)
    assert "has 9 tokens, more than max_model_len = 8 of the inference server http://server:8000" in text
    assert f"Start it with room for 21 (vLLM: {REMEDY}" in text


@pytest.mark.parametrize(("needed", "warned"), [(0, False), (8, False), (9, True), (38, True)])
async def test_a_run_whose_sequences_may_be_longer_is_warned_when_it_connects(
    folder: Path, caplog: pytest.LogCaptureFixture, needed: int, warned: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        await engine(folder, needed=needed).resume()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == warned
    if warned:
        assert f"sequences of at most 8 tokens, and this run has some of up to {needed}" in messages[0]
        assert REMEDY in messages[0]
