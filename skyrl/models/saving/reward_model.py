"""A reward model: storing it as transformers' sequence classifier with one label, and scoring chats with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from transformers import AutoModelForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from skyrl.chats.masks import ChatMasks
from skyrl.errors import DataError, ModelError
from skyrl.models.files.loading import load_config, load_tokenizer, max_positions, model_error, model_source
from skyrl.models.saving.storing import ModelFolder, save_pretrained

TOKENS_AT_A_TIME = 8192
"""Largest number of tokens, padding included, that are scored together."""


@frozen(kw_only=True)
class RewardModelExport(ModelFolder):
    """Stores body and head. It runs where the weights are gathered, so it can be pickled."""

    def __call__(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Store `weights`, whole tensors by name in their own shapes, gathered in the memory of the host.

        Raises `RunError` if writing fails.
        """
        gathered = {name: weight.detach().to("cpu", copy=True) for name, weight in weights}
        tokenizer = self.tokenizer()
        config = load_config(self.like, self.overrides)
        config.num_labels = 1
        config.get_text_config().pad_token_id = tokenizer.pad_token_id
        config.pad_token_id = tokenizer.pad_token_id
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        save_pretrained(gathered, model, tokenizer, self.folder)


class RewardModel:
    """Scores chats with a reward model. Only one thread at a time computes."""

    def __init__(self, path: str, device: str = "cpu") -> None:
        """`path` is a folder or a hub name of a sequence classifier with one label. Raises `ModelError`."""
        disable_progress_bar()
        source = model_source(path, weights=True)
        self._masks = ChatMasks(load_tokenizer(path))
        try:
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                source,
                config=load_config(path),
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except Exception as error:  # transformers, its hub client and safetensors each raise types of their own
            raise model_error("model", path, error) from error
        self._model, report = loaded
        if report["missing_keys"] or self._model.config.num_labels != 1:
            raise ModelError(
                f"{path} is not a reward model: it has no head that outputs one number (train one with "
                "kind = reward_model)"
            )
        self._model.to(device).eval()
        self._device = torch.device(device)
        self._most = max_positions(path)
        self._lock = threading.Lock()

    def tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens by which a chat is scored: the same as in training, up to the last assistant message.

        Parts of an answer that the chat template drops are not scored. Raises `DataError`.
        """
        ids: list[int] = self._masks(messages, allow_dropped=True)[0].tolist()
        if not ids or (self._most is not None and len(ids) > self._most):
            raise DataError(f"a chat has {len(ids)} tokens, but the reward model takes 1 to {self._most}")
        return ids

    def scores(
        self, chats: Sequence[Sequence[Mapping[str, Any]]], given_up: Callable[[], bool] = lambda: False
    ) -> list[float]:
        """A score for each chat; higher is better. Raises `DataError` for a chat that cannot be scored.

        Once `given_up()` is true, the scores are not wanted any more, and the rest is left out.
        """
        rows = [self.tokens(chat) for chat in takewhile(lambda _: not given_up(), chats)]
        result: list[float] = []
        with self._lock, torch.inference_mode():
            for group in takewhile(lambda _: not given_up(), _groups(rows)):
                result += self._score(group)
        return result

    def _score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self._device)
        last = torch.tensor([len(row) - 1 for row in rows], device=self._device)
        hidden = getattr(self._model, self._model.base_model_prefix)(input_ids=ids, use_cache=False).last_hidden_state
        values = self._model.score(hidden[torch.arange(len(rows), device=self._device), last])
        scores: list[float] = values.float().squeeze(-1).tolist()
        return scores


def _groups(rows: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    group: list[Sequence[int]] = []
    for row in rows:
        if group and max(len(row), *map(len, group)) * (len(group) + 1) > TOKENS_AT_A_TIME:
            yield group
            group = []
        group.append(row)
    if group:
        yield group
