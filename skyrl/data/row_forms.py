"""From one row to tokens: the supported forms of rows, distinguished by their columns.

{"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}        also as its JSON text
{"conversations": [{"from": "human", "value": ...}, ...]}                 ShareGPT
{"instruction": ..., "input": ..., "output": ...}                         Alpaca
{"prompt": [messages], "completion": [messages]}                          a chat, of which the completion is learned
{"prompt": "...", "completion": "..."}, {"text": "..."}                   plain text, without a chat template
{"input_ids": [...], "labels": [...]} or masks                            tokenized already
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from skyrl.chats.contents import ALLOW_DROPPED, Blanks, short
from skyrl.chats.masks import ChatMasks, Ids, Mask, Weights
from skyrl.chats.text import Message, text_tokens
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import RewardModelConfig, SFTConfig
from skyrl.data.conversations import messages_of, refuse_media, tools_of, with_system
from skyrl.data.sources import Row
from skyrl.errors import DataError


def learns_all(run: SFTConfig) -> bool:
    """Whether every assistant message is learned, unless its weight says otherwise."""
    return run.train_on_what == "all_assistant_messages"


def chat_in(row: Row, run: SFTConfig) -> list[Message] | None:
    """The messages of a row of supervised fine-tuning; None for a row of tokens or of plain text. Raises `DataError`
    for a row of another form.
    """
    if row.get(run.messages_key) is not None:
        return messages_of(row[run.messages_key], run.messages_key)
    if row.get("conversations") is not None:
        return messages_of(row["conversations"], "conversations")
    if row.get("input_ids") is not None:
        return None
    if isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str):
        instruction = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
        return [{"role": "user", "content": instruction}, {"role": "assistant", "content": row["output"]}]
    prompt, completion = row.get("prompt"), row.get("completion")
    if prompt is not None and completion is not None:
        if isinstance(prompt, str) and isinstance(completion, str):
            return None
        if isinstance(prompt, str) or isinstance(completion, str):
            raise DataError("prompt and completion are not both texts, nor both lists of messages")
        before = [{"weight": 0, **item} for item in messages_of(prompt, "prompt")]
        return [*before, *messages_of(completion, "completion")]
    if isinstance(row.get("text"), str) and row["text"]:
        return None
    raise DataError(
        f"it has neither {run.messages_key} (messages_key), nor conversations, instruction and output, prompt and "
        f"completion, text, or input_ids; its columns are {', '.join(map(str, row))}"
    )


def blanks_of_text(row: Row) -> Blanks:
    """Blanks of a row of plain text; none for a row of tokens."""
    prompt, completion = row.get("prompt"), row.get("completion")
    if row.get("input_ids") is not None:
        return Blanks()
    if prompt is None or completion is None:
        return Blanks(answers=int(not row["text"].strip()))
    return Blanks(int(not prompt.strip()), int(not completion.strip()))


class SupervisedForms:
    """Tokenizes rows of supervised fine-tuning, whatever their form."""

    def __init__(self, tokenizer: ChatTokenizer, run: SFTConfig) -> None:
        """`tokenizer` has the run's chat template."""
        self._tokenizer, self._run, self._has_chats, self._blanks = tokenizer, run, False, Blanks()
        self._masks = ChatMasks(tokenizer, all_messages=learns_all(run), arguments=run.chat_template_kwargs)
        self._completions = ChatMasks(tokenizer, all_messages=True, arguments=run.chat_template_kwargs)
        """Masks of the chats whose first messages are a prompt, if all tokens of the others are learned."""

    @property
    def turn_end(self) -> tuple[str, int | None] | None:
        """The text that ends the turns of the chats so far (see `ChatMasks`); None if there was no chat."""
        return self._masks.turn_end if self._has_chats else None

    @property
    def behind_other_headers(self) -> int:
        """Number of chats so far whose answer does not follow the generation prompt."""
        return self._masks.behind_other_headers + self._completions.behind_other_headers

    @property
    def blanks(self) -> Blanks:
        """Empty prompts and answers so far."""
        return self._masks.blanks + self._completions.blanks + self._blanks

    def __call__(self, row: Row) -> tuple[Ids, Weights]:
        """Token ids and the weight of each in the loss, 0 if it is not learned. Raises `DataError`."""
        refuse_media(row)
        chat = chat_in(row, self._run)
        if chat is not None:
            return self._chat(chat, row)
        if row.get("input_ids") is not None:
            ids, mask = tokenized_row(row, len(self._tokenizer))
            return ids, mask.astype(np.float32)
        self._blanks += blanks_of_text(row)
        if row.get("prompt") is not None and row.get("completion") is not None:
            return self._text(row["prompt"], row["completion"])
        return self._text("", row["text"])

    def _chat(self, messages: list[Message], row: Row) -> tuple[Ids, Weights]:
        run = self._run
        chat = with_system(messages, row.get(run.system_key))
        tools = tools_of(row.get(run.tools_key), run.tools_key)
        learns_tokens = run.train_on_what == "all_tokens"
        begins_with_prompt = learns_tokens and messages[0].get("weight") == 0
        masks = self._completions if begins_with_prompt else self._masks
        ids, weights = masks.weighted(chat, tools, allow_dropped=bool(row.get(ALLOW_DROPPED)))
        self._has_chats = True
        if learns_tokens:
            weights[int(np.argmax(weights > 0)) if begins_with_prompt else 0 :] = 1.0
        return ids, weights

    def _text(self, before: str, learned: str) -> tuple[Ids, Weights]:
        """Plain text, preceded by the tokenizer's beginning-of-sequence tokens and followed by an end-of-sequence
        token.
        """
        eos = self._tokenizer.eos_token_id
        prompt = [*self._prefix_tokens(), *text_tokens(self._tokenizer, before)]
        completion = text_tokens(self._tokenizer, learned)
        completion = completion if completion[-1:] == [eos] else [*completion, eos]
        ids = np.asarray([*prompt, *completion], dtype=np.int64)
        return ids, (np.arange(len(ids)) >= len(prompt)).astype(np.float32)

    def _prefix_tokens(self) -> list[int]:
        """Tokens that the tokenizer puts before a text, such as a beginning-of-sequence token."""
        text_ids = self._tokenizer.encode("a", add_special_tokens=False)
        full_ids = self._tokenizer.encode("a")
        result = [index for index in range(len(full_ids)) if full_ids[index : index + len(text_ids)] == text_ids]
        return list(full_ids[: result[0]]) if result else []


class PreferenceForms:
    """Tokenizes pairs: whole chats, or two answers to one prompt."""

    def __init__(self, tokenizer: ChatTokenizer, run: RewardModelConfig) -> None:
        """`tokenizer` has the run's chat template."""
        self.masks, self._run = ChatMasks(tokenizer, arguments=run.chat_template_kwargs), run

    def __call__(self, row: Row) -> tuple[Ids, Ids, float]:
        """Tokens of the better and of the worse chat, and the margin between them. Raises `DataError`."""
        refuse_media(row)
        run = self._run
        with self.masks.one_prompt():
            chosen, rejected = (self._tokens(row, key) for key in (run.chosen_key, run.rejected_key))
        if np.array_equal(chosen, rejected):
            raise DataError(f"{run.chosen_key} and {run.rejected_key} are the same")
        return chosen, rejected, margin_of(row.get(run.margin_key), run.margin_key)

    def _tokens(self, row: Row, key: str) -> Ids:
        run = self._run
        chat = with_system(preference_chat(row, key, run.prompt_key), row.get(run.system_key))
        tools = tools_of(row.get(run.tools_key), run.tools_key)
        return self.masks(chat, tools, allow_dropped=bool(row.get(ALLOW_DROPPED)))[0]


_IS_CHAT = re.compile(r"""\s*\[\s*\{.*["'](role|from)["']\s*:""", re.DOTALL)
"""A chat as text, in JSON or as Python prints it. A prompt or an answer may be any other text that begins as a list."""


def preference_chat(row: Row, key: str, prompt_key: str) -> list[Message]:
    """The complete chat of one side of a pair. Raises `DataError`."""
    if row.get(key) is None:
        raise DataError(
            f"it has no {key} (named by chosen_key and rejected_key, answers_key, or for single answers with labels, "
            f"which kto takes, completion_key); its columns are {', '.join(map(str, row))}"
        )
    prompt, answer = row.get(prompt_key), row[key]
    before: list[Message] = []
    if isinstance(prompt, str) and not _IS_CHAT.match(prompt):
        before = [{"role": "user", "content": prompt}]
    elif prompt is not None:
        before = messages_of(prompt, prompt_key)
    if isinstance(answer, str) and not _IS_CHAT.match(answer):
        if not before:
            raise DataError(f"{key} is a text and there is no {prompt_key}: give a prompt, or whole chats")
        return [*before, {"role": "assistant", "content": answer}]
    chat = messages_of(answer, key)
    if not before and all(message.get("role") == "assistant" for message in chat):
        raise DataError(
            f"{key} has only messages of the assistant and there is no {prompt_key}: give a prompt, or whole chats"
        )
    return chat if _is_whole(chat, before, key, prompt_key) else [*before, *chat]


def _is_whole(chat: list[Message], before: list[Message], key: str, prompt_key: str) -> bool:
    """Whether the chat includes its prompt, as in UltraFeedback. Raises `DataError` for a chat with another prompt."""
    if not before or chat[0].get("role") == "assistant":
        return not before
    prompt = [item for item in before if item.get("role") != "system"]
    prefix = [entry for entry in chat if entry.get("role") != "system"][: len(prompt)]
    said, asked = ([(m.get("role"), str(m.get("content")).strip()) for m in messages] for messages in (prefix, prompt))
    if said != asked:
        raise DataError(
            f"{key} begins with a message of {chat[0].get('role')}, and not with the {prompt_key} of the row "
            f"({short(prompt[0].get('content') if prompt else None)}): give answers to the prompt, or whole chats"
        )
    return True


def label_of(value: object, key: str) -> bool:
    """Whether a single answer is good. Raises `DataError` for another value."""
    if value in (True, False):  # and so 1 and 0
        return bool(value)
    raise DataError(f"{key} is {short(value)}, not true or false: whether the answer is good")


def margin_of(value: object, key: str) -> float:
    """The margin by which the better chat of a pair should score more; 0 if none is written. Raises `DataError`."""
    if value is None or value == "":
        return 0.0
    try:
        margin = float(value)  # type: ignore[arg-type]  # what is no number raises
    except (TypeError, ValueError):
        margin = float("nan")
    if not 0 <= margin < float("inf"):
        raise DataError(f"{key} is {short(value)}, not a number from 0: by how much the better chat should score more")
    return margin


UNLEARNED = -100
"""The label of a token that is not learned, as in PyTorch's cross entropy."""

_LEARNED = ("loss_mask", "assistant_masks", "completion_mask")
MASKS = (*_LEARNED, "attention_mask")
"""Mask columns of 0 and 1. A token is learned if every mask of its row is 1; padding has attention 0."""


_MASK_NAME = re.compile(r"(?i)masks?$|^labels?$")


def refuse_other_masks(columns: Iterable[str]) -> None:
    """Raises `DataError` if one of the columns of a row of tokens seems to be a mask and is not read as one."""
    known = {"labels", *MASKS, "special_tokens_mask"}  # the last is one that tokenizers add
    if other := next((name for name in columns if _MASK_NAME.search(name) and name not in known), None):
        raise DataError(
            f"the column {other!r} is none of labels, {', '.join(MASKS)}: rename it, or remove it to learn all tokens"
        )


def tokenized_row(row: Row, vocabulary: int) -> tuple[Ids, Mask]:
    """Tokens and mask of a row, without its padding. Raises `DataError` for inconsistent columns."""
    ids = _whole_numbers(row["input_ids"], "input_ids")
    if not len(ids):
        raise DataError("input_ids are empty")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise DataError(f"input_ids go from {ids.min()} to {ids.max()}, and the tokenizer has 0 to {vocabulary - 1}")
    refuse_other_masks(row)
    for names in (("labels", *MASKS), ("labels", *_LEARNED)):
        masked = [name for name in names if name in row]
        if masked and all(row[name] is None for name in masked):
            raise DataError(
                f"{masked[0]} is null: give a row whose tokens are all learned a loss_mask of ones, or put such rows "
                "into a source without this column"
            )
    learned = np.ones(len(ids), dtype=np.bool_)
    if row.get("labels") is not None:
        labels = _parallel_column(ids, row["labels"], "labels")
        learned = labels != UNLEARNED
        if (labels[learned] != ids[learned]).any():
            raise DataError("labels are neither input_ids nor -100; they are not shifted by one, either")
    attended = np.ones(len(ids), dtype=np.bool_)
    for name in (name for name in MASKS if row.get(name) is not None):
        mask = _parallel_column(ids, row[name], name)
        if not ((mask == 0) | (mask == 1)).all():
            raise DataError(f"{name} has other numbers than 0 and 1")
        learned = learned & (mask == 1)
        attended = mask == 1 if name == "attention_mask" else attended
    return ids[attended], learned[attended]


def _parallel_column(ids: Ids, values: object, name: str) -> Ids:
    result = _whole_numbers(values, name)
    if result.shape != ids.shape:
        raise DataError(f"{len(ids)} input_ids have {len(result)} {name}")
    return result


def _whole_numbers(values: object, name: str) -> Ids:
    """The value as a flat array of whole numbers. Raises `DataError` for anything else: nothing is rounded."""
    try:
        result = np.asarray(values)
    except ValueError:  # lists of different lengths
        result = np.empty((0, 0))
    if result.ndim != 1 or not (len(result) == 0 or result.dtype.kind in "iub"):
        raise DataError(f"{name} is {short(values)}, not a list of whole numbers")
    return result.astype(np.int64)
