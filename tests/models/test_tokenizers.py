from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from skyrl.chats.text import text_tokens
from skyrl.data.prompts import load_prompts
from skyrl.errors import ModelError
from skyrl.models.files.loading import load_tokenizer
from skyrl.starter.tiny_chat import byte_tokenizer


def test_a_tokenizer_reads_and_writes_text_as_it_was_stored(folder: Path) -> None:
    stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(str(folder))
    text = "sort: hgdbha\n\tnaïve 東京<|end|>"
    assert tokenizer.encode(text) == stored.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_tokenizer_is_read_once_and_each_caller_has_one_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, template = load_tokenizer(str(folder)), (folder / "chat_template.jinja").read_text()
    first.chat_template = "{{ 'changed' }}"
    with monkeypatch.context() as during:
        during.setattr("skyrl.models.files.loading.AutoTokenizer", None)
        second = load_tokenizer(str(folder))
    assert second is not first and second.chat_template == template
    assert (second.get_vocab(), second.pad_token, second.eos_token) == (first.get_vocab(), "<|pad|>", "<|end|>")
    (folder / "chat_template.jinja").write_text("{{ 'stored' }}")
    assert load_tokenizer(str(folder)).chat_template == "{{ 'stored' }}"


def test_a_padding_token_is_kept_and_without_one_the_end_of_sequence_serves(folder: Path) -> None:
    assert load_tokenizer(str(folder)).pad_token == "<|pad|>"
    PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|end|>", chat_template="{{ messages }}"
    ).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "phi3"}))  # a type that keeps what is stored
    assert load_tokenizer(str(folder)).pad_token == "<|end|>"


def test_a_tokenizer_without_a_chat_template_is_refused_with_the_way_out(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=r"has no chat template, .* put a chat_template\.jinja next to it"):
        load_tokenizer(str(folder))


def test_a_tokenizer_without_an_end_of_sequence_is_refused(folder: Path) -> None:
    PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), chat_template="{{ messages }}"
    ).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "phi3"}))
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        load_tokenizer(str(folder))


def test_a_folder_without_a_tokenizer_is_refused_although_transformers_makes_an_empty_one(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match=r"has no vocabulary: copy tokenizer\.json"):
        load_tokenizer(str(folder))


def test_a_pipeline_that_transformers_replaced_is_refused(folder: Path) -> None:
    """A tokenizer of whole words beside a qwen2 model comes back as byte-level BPE: spaces and newlines are lost."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "Sort": 2, ":": 3, "end": 4}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="<eos>", chat_template="{{ messages }}"
    ).save_pretrained(folder)
    with pytest.raises(ModelError, match=r"does not read text as its own tokenizer\.json does"):
        load_tokenizer(str(folder))


def test_a_damaged_tokenizer_is_told(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="the tokenizer of .* cannot be loaded"):
        load_tokenizer(str(folder))


def test_a_hub_tokenizer_that_cannot_be_fetched_is_told() -> None:
    with pytest.raises(ModelError, match="nobody/nothing cannot be loaded: .* cannot be reached"):
        load_tokenizer("nobody/nothing")


def test_the_tokenizer_written_in_python_is_refused_where_there_is_none(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"set trainer\.disable_fast_tokenizer = false"):
        load_tokenizer(str(folder), use_fast=False)


def test_a_text_longer_than_the_model_reads_is_tokenized_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, long = byte_tokenizer(length=64), "a" * 100
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert len(text_tokens(tokenizer, long)) == 100
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in (long, "a")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert load_prompts([str(file)], tokenizer, env_class="gsm8k", max_prompt_length=32).too_long == 1
    assert "longer than" not in caplog.text
    tokenizer.encode(long)
    assert "longer than the specified maximum" in caplog.text, "the test would notice nothing"


def test_no_clean_up_that_transformers_ignores_is_asked_for(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored = folder / "tokenizer_config.json"
    stored.write_text(json.dumps(json.loads(stored.read_text()) | {"clean_up_tokenization_spaces": True}))
    transformers_logging.warning_once.cache_clear()
    transformers_logger = logging.getLogger("transformers")
    transformers_logger.addHandler(caplog.handler)
    try:
        tokenizer = load_tokenizer(str(folder))
        text = tokenizer.decode(tokenizer.encode("it is n't , is it ?"))
    finally:
        transformers_logger.removeHandler(caplog.handler)
    assert (text, caplog.text) == ("it is n't , is it ?", "")
