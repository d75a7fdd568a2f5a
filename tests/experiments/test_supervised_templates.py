"""Chat templates of supervised runs: trained with, stored with the model, and where their turns end."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig

from skyrl.models.reward_model import RewardModel
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


@pytest.mark.parametrize("other", [True, False])
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


def test_a_margin_is_what_the_better_chat_should_score_more(nano: Path, tmp_path: Path) -> None:
    """A new head says 0 of every chat: the first loss is -log sigmoid(-margin)."""
    from tests.supervised_run import pairs, write

    rows = [{**pair, "margin": 2.0} for pair in pairs(32)]
    data = write(tmp_path / "pairs.jsonl", rows)
    for packing in (True, False):
        (tmp_path / str(packing)).mkdir()
        found = train(
            nano,
            tmp_path / str(packing),
            "reward_model",
            train_datasets=(data,),
            eval_datasets=(data,),
            eval_interval=1,
            num_steps=1,
            use_sequence_packing=packing,
        )
        assert found[1]["train/loss"] == pytest.approx(2.1269280, abs=0.2)
