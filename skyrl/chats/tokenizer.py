"""The part of a transformers tokenizer that is used here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ChatTokenizer(Protocol):
    """`PreTrainedTokenizerBase`, with a chat template and an end-of-sequence token, as `load_tokenizer` returns it."""

    chat_template: str
    eos_token: str
    eos_token_id: int
    pad_token: str
    pad_token_id: int
    all_special_tokens: list[str]
    all_special_ids: list[int]

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The `AddedToken` of each id that was added to the vocabulary."""

    def __len__(self) -> int: ...

    def __hash__(self) -> int: ...

    def get_vocab(self) -> dict[str, int]:
        """The vocabulary: text of each token -> its id."""

    def encode(self, text: str, /, *, add_special_tokens: bool = ..., **options: object) -> list[int]:
        """Token ids of a text."""

    def __call__(
        self, texts: Sequence[str], /, *, add_special_tokens: bool = ..., **options: object
    ) -> Mapping[str, list[list[int]]]:
        """A mapping with the token ids of each text under `input_ids`."""

    def decode(
        self, token_ids: Sequence[int] | NDArray[Any], /, *, skip_special_tokens: bool = ..., **options: object
    ) -> str:
        """The text of token ids."""

    def apply_chat_template(self, conversation: Sequence[Any], /, **options: object) -> Any:
        """A conversation as text, or as token ids with `tokenize=True`; for several conversations, a list."""

    def save_pretrained(self, folder: str | PathLike[str], /) -> object:
        """Store the tokenizer in a folder, for transformers to load."""
