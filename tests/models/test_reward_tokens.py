"""One tokenization of a chat: what a reward model is trained on is what it scores, over all families of templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from transformers import LlamaConfig, LlamaForSequenceClassification

from skyrl.chats.examples import FORMS
from skyrl.config import RewardModelConfig
from skyrl.data.supervised_rows import load_preferences
from skyrl.envs.services.reward_service import reward_app
from skyrl.errors import DataError
from skyrl.models.saving.reward_model import RewardModel
from tests.chats.corpus import NAMES, tokenizer_of
from tests.supervised_run import write


@pytest.fixture(scope="module")
def scorer() -> Any:
    """A small model with random weights, which scores any chat otherwise."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "num_labels": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(vocab_size=320, pad_token_id=0, max_position_embeddings=2048, **sizes)
    return LlamaForSequenceClassification(config).eval()


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", NAMES)
def test_served_in_process_and_training_scores_are_one(scorer: Any, name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name)
    scorer.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    model = RewardModel(str(tmp_path / "model"))
    client = TestClient(reward_app(model, "rm"), base_url="http://127.0.0.1")
    compared = 0
    for chat, tools in FORMS.values():
        other = [*chat[:-1], {"role": "assistant", "content": "another"}]
        row = {"chosen": [dict(message) for message in chat], "rejected": other}
        try:
            pairs = load_preferences((write(tmp_path / "pairs.jsonl", [row]),), tokenizer, RewardModelConfig(), 2048)
        except DataError:
            continue
        trained = [_score(scorer, ids) for pair in pairs.rows for ids in (pair.chosen, pair.rejected)]
        assert model.scores([chat, other]) == pytest.approx(trained, abs=1e-6)
        if not tools:
            answer = client.post("/score", json={"chats": [list(chat), other]})
            assert answer.json()["scores"] == pytest.approx(trained, abs=1e-6)
            compared += 1
    assert compared >= 3


def _score(scorer: Any, ids: Any) -> float:
    """The value at the last token, as training has it."""
    with torch.inference_mode():
        hidden = scorer.model(input_ids=torch.tensor([ids.tolist()])).last_hidden_state
        return float(scorer.score(hidden[0, -1]))


def test_text_that_no_tokenizer_takes_is_the_fault_of_the_request(scorer: Any, tmp_path: Path) -> None:
    scorer.save_pretrained(tmp_path / "model")
    tokenizer_of("chatml").save_pretrained(tmp_path / "model")
    client = TestClient(reward_app(RewardModel(str(tmp_path / "model")), "rm"), base_url="http://127.0.0.1")
    chat = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "\\ud800"}]'
    answer = client.post("/score", content=f'{{"chats": [{chat}]}}', headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "lone surrogate" in answer.json()["error"]
    response = client.post("/score", json={"chats": [[{"role": "user", "content": "a"}]]})
    assert response.status_code == 400 and "no message is from the assistant" in response.json()["error"]
