"""Chat templates of supervised runs: trained with, stored with the model, and where their turns end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

from skyrl.models.saving.reward_model import RewardModel
from skyrl.tools.exporting import export
from tests.long_cases import long_except
from tests.supervised_run import train

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ 'a' if m.role == 'assistant' and low else '' }}{{ m.content }}{{ END }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def template_file(folder: Path, end: str) -> str:
    file = folder / "template.jinja"
    file.write_text(TEMPLATE.replace("{{ END }}", end), encoding="utf-8")
    return str(file)


def end_of(nano: Path, *, other: bool) -> tuple[str, int]:
    """A token of the nano tokenizer that ends its generation, or a special one that does not."""
    tokenizer = AutoTokenizer.from_pretrained(nano / "model")
    special = [token for token in tokenizer.all_special_tokens if (token != tokenizer.eos_token) == other]
    return special[0], int(tokenizer.encode(special[0], add_special_tokens=False)[0])


@pytest.mark.parametrize("other", long_except([True, False], True))
def test_the_model_is_stored_with_its_template_and_stops_where_its_turns_end(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], other: bool
) -> None:
    end, token = end_of(nano, other=other)
    file = template_file(tmp_path, end)
    train(nano, tmp_path, chat_template__source="file", chat_template__name_or_path=file, num_steps=1)
    stored = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert stored.chat_template == Path(file).read_text(encoding="utf-8")
    ends = GenerationConfig.from_pretrained(tmp_path / "run" / "model").eos_token_id
    assert token in (ends if isinstance(ends, list) else [ends])
    reported = capsys.readouterr()
    assert (f"ends turns with {end!r} (token {token})" in reported.out + reported.err) == other


def test_a_reward_model_scores_with_the_template_and_the_arguments_of_its_training(nano: Path, tmp_path: Path) -> None:
    end, token = end_of(nano, other=False)
    file = template_file(tmp_path, end)
    train(
        nano,
        tmp_path,
        "reward_model",
        chat_template__source="file",
        chat_template__name_or_path=file,
        chat_template_kwargs={"low": True},
        num_steps=1,
    )
    tokenizer = AutoTokenizer.from_pretrained(nano / "model")
    chat = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "X"}]
    ids = RewardModel(str(tmp_path / "run" / "model")).tokens(chat)
    assert ids == tokenizer.encode(f"[user]b{end}[assistant]aX{end}", add_special_tokens=False) and token in ids


@pytest.mark.long
def test_a_margin_is_what_the_better_chat_should_score_more(nano: Path, tmp_path: Path) -> None:
    """A new head says 0 of every chat: the first loss is -log sigmoid(-margin)."""
    from tests.supervised_run import pairs, write

    rows = [{**pair, "margin": 2.0} for pair in pairs(32)]
    data = write(tmp_path / "pairs.jsonl", rows)
    for packing in (True, False):
        (tmp_path / str(packing)).mkdir()
        records = train(
            nano,
            tmp_path / str(packing),
            "reward_model",
            train_datasets=(data,),
            eval_datasets=(data,),
            eval_interval=1,
            num_steps=1,
            use_sequence_packing=packing,
        )
        assert records[1]["train/loss"] == pytest.approx(2.1269280, abs=0.2)


def test_the_adapter_of_a_reward_model_holds_its_head_and_scores_alike_under_peft(nano: Path, tmp_path: Path) -> None:
    lora: dict[str, Any] = {"model__lora__rank": 4, "model__lora__alpha": 8, "num_epochs": 1}
    train(nano, tmp_path, "reward_model", ckpt_interval=4, **lora)
    chat = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "xyz"}]
    merged = RewardModel(str(tmp_path / "run" / "model"))
    ids = torch.tensor([merged.tokens(chat)])
    export(tmp_path / "run", to=tmp_path / "again", adapter=True)
    for folder in (tmp_path / "run" / "adapter", tmp_path / "again"):
        body = AutoModelForSequenceClassification.from_pretrained(nano / "model", num_labels=1)
        body.config.pad_token_id = 0
        adapted = PeftModel.from_pretrained(body, folder).eval()
        assert adapted.peft_config["default"].task_type == "SEQ_CLS"
        score = adapted(input_ids=ids).logits.item()
        assert score == pytest.approx(merged.scores([chat])[0], abs=1e-5)


def test_a_model_exported_from_a_checkpoint_has_the_template_too(nano: Path, tmp_path: Path) -> None:
    end, token = end_of(nano, other=True)
    file = template_file(tmp_path, end)
    settings: dict[str, Any] = {"chat_template__source": "file", "chat_template__name_or_path": file, "num_steps": 1}
    train(nano, tmp_path, ckpt_interval=1, **settings)
    export(tmp_path / "run", to=tmp_path / "again")
    assert AutoTokenizer.from_pretrained(tmp_path / "again").chat_template == Path(file).read_text(encoding="utf-8")
    assert token in GenerationConfig.from_pretrained(tmp_path / "again").eos_token_id
