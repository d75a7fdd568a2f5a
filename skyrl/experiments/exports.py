"""Exports of trained models: a policy as it was served, or the model of a supervised run with the chat template that it
was trained with and the token that ends turns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyrl.chats.masks import ChatMasks
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import SupervisedConfig
from skyrl.config.derive.model_overrides import learner_overrides
from skyrl.config.loading.kinds import kind_of
from skyrl.config.settings.learners import LearnerConfig
from skyrl.config.settings.run_basics import RunBasics
from skyrl.errors import DataError
from skyrl.models.files.chat_templates import with_defaults, with_template
from skyrl.models.files.loading import generation_ends, load_tokenizer
from skyrl.models.saving.reward_model import RewardModelExport
from skyrl.models.saving.storing import Export
from skyrl.tree import required


def policy_export(run: RunBasics, section: LearnerConfig, folder: Path) -> Export:
    """Function that takes the gathered weights of the policy in this table, and stores them in the folder."""
    return Export(
        like=required(section.model.path, section.path_of("model.path")),
        tokenizer_path=run.tokenizer_path,
        use_fast_tokenizer=not run.disable_fast_tokenizer,
        folder=folder,
        overrides=learner_overrides(run, section),
    )


def export_of(run: SupervisedConfig, folder: Path) -> Export | RewardModelExport:
    """Function that takes the gathered weights and stores them in the folder."""
    start: dict[str, Any] = {
        "like": required(run.model.path, "model.path"),
        "overrides": learner_overrides(run, run),
        "tokenizer_path": run.tokenizer_path,
        "use_fast_tokenizer": not run.disable_fast_tokenizer,
    }
    tokenizer = chat_tokenizer(run)
    template = tokenizer.chat_template if run.chat_template.name_or_path else None
    if kind_of(run).trained.scores:  # every user scores chats with the variables of its training
        if run.chat_template_kwargs:
            template = with_defaults(tokenizer.chat_template, run.chat_template_kwargs)
        return RewardModelExport(**start, folder=folder, chat_template=template)
    end = new_turn_end(run, tokenizer)
    return Export(**start, folder=folder, chat_template=template, turn_end=end)


def chat_tokenizer(run: SupervisedConfig) -> ChatTokenizer:
    """The tokenizer of the model, with the configured chat template."""
    path, fast = required(run.model.path, "model.path"), not run.disable_fast_tokenizer
    tokenizer = load_tokenizer(run.tokenizer_path or path, use_fast=fast, table="")
    return with_template(tokenizer, run.chat_template, "chat_template")


def new_turn_end(run: SupervisedConfig, tokenizer: ChatTokenizer) -> int | None:
    """The token that ends turns in the chat template, if the model's generation does not stop at it yet."""
    try:
        _, token = ChatMasks(tokenizer, arguments=run.chat_template_kwargs).turn_end
    except DataError:  # a template without answers: the run has tokenized rows or text
        return None
    known = (*generation_ends(required(run.model.path, "model.path")), tokenizer.eos_token_id)
    return None if token in known else token
