"""A tokenizer for a chat template without a model: bytes, and the special tokens that the template contains."""

from __future__ import annotations

import re
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import ChatTemplateConfig
from skyrl.models.files.chat_templates import with_template

END = "<|endoftext|>"

_SPELLED = re.compile(r"<[|\uff5c][^|\uff5c<>{}]+[|\uff5c]>|<(?:start|end)_of_turn>|\[/?INST\]|</?s>")
"""Spellings of special tokens in published templates."""


def stand_in_tokenizer(config: ChatTemplateConfig) -> ChatTokenizer:
    """A tokenizer with one token per byte and special token. Raises `ConfigError` for an unusable template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END)
    chat_tokenizer = with_template(fast, config)
    tokenizer: Any = chat_tokenizer  # transformers' own methods beside those of a `ChatTokenizer`
    spelled = dict.fromkeys(_SPELLED.findall(tokenizer.chat_template))
    tokenizer.add_special_tokens({"additional_special_tokens": list(spelled)})
    return chat_tokenizer
