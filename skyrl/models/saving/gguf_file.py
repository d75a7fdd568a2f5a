"""Turns a GGUF file, llama.cpp's format of one file for weights, configuration and tokenizer, into a model folder.

transformers reads the file. What it would pass over in silence, and what changes the model's numbers, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.errors import ModelError, UserError
from skyrl.models.files.loading import SAMPLE_TEXT, end_tokens, model_error
from skyrl.models.saving.storing import save_pretrained

_ROTATION = "rope_freqs.weight"
"""Divisors of the rotary frequencies of Llama 3.1 and later, (head size / 2,)."""

_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What all published Llamas that have these divisors were made with, besides the largest divisor."""

_GPT2_RULES = frozenset({"default", "gpt-2", "granite-docling", "jais", "mpt", "olmo"})
"""llama.cpp's names of GPT-2's rule of splitting text before its tokens are looked up."""

_DIGIT_RULES = frozenset({"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"})
"""llama.cpp's names of the rule that cuts out each digit, then splits by GPT-2's rule. transformers takes GPT-2's rule
alone for them, which gives other tokens where several spaces come before a number.
"""


def convert_gguf(file: Path, folder: Path, *, dtype: torch.dtype = torch.float32) -> list[str]:
    """Store the causal language model in `file` as the new `folder`: weights of type `dtype`, configuration, generation
    defaults, tokenizer and chat template. float32 holds every value of any GGUF file exactly; all weights are in the
    host's memory at once. Returns sentences on what the user should know of the result.

    Raises `UserError` if `folder` is not new, `ModelError` for a file that transformers cannot read or would read as
    another model, and `RunError` if writing fails; the folder is complete or does not exist.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists: name a new folder")
    reader = _opened(file)
    tokenizer = _tokenizer(file, reader)
    disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=dtype, output_loading_info=True
        )
    except Exception as error:  # transformers and gguf each raise types of their own
        raise model_error("model", str(file), error) from error
    read, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{file} is incomplete: it has no weights for {missing[0]}")
    config = read.config
    del config.quantization_config  # the stored weights are not quantized
    _rotate_as(reader, config, file)
    _refuse_unread(reader, read, file)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    ends = list(end_tokens(config.get_text_config()))
    for name in ("eos", "eot", "eom"):  # the ends of the text, of a turn and of a message, if there are
        token = _value(reader, f"tokenizer.ggml.{name}_token_id")
        if token is not None and int(token) not in ends:
            ends.append(int(token))
    model.generation_config = GenerationConfig(
        bos_token_id=_value(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=ends or None,
        pad_token_id=_value(reader, "tokenizer.ggml.padding_token_id"),
    )
    _refuse_changed(tokenizer, config, file)
    save_pretrained(read.state_dict(), model, tokenizer, folder)
    return list(_remarks(tokenizer, _value(reader, "tokenizer.ggml.pre")))


def _opened(file: Path) -> GGUFReader:
    """The file's keys and its tensors, which are read when they are used."""
    try:
        reader = GGUFReader(file)
    except Exception as error:  # gguf raises whatever numpy does with the bytes that it finds
        with file.open("rb") as opened:
            magic = opened.read(4)
        reason = "is damaged or incomplete: copy it again" if magic == b"GGUF" else "is not a GGUF file"
        raise ModelError(f"{file} {reason}") from error
    if (parts := int(_value(reader, "split.count") or 1)) > 1:
        raise ModelError(f"{file} is one of {parts} parts: join them first, with llama-gguf-split --merge")
    if _value(reader, "general.architecture") is None:
        raise ModelError(f"{file} does not say which architecture its model has")
    return reader


def _value(reader: GGUFReader, key: str) -> str | int | None:
    """The value of a key; None if the file does not have it."""
    field = reader.get_field(key)
    content: str | int | None = None if field is None else field.contents()
    return content


def _tokenizer(file: Path, reader: GGUFReader) -> ChatTokenizer:
    if _value(reader, "tokenizer.ggml.model") is None:
        raise ModelError(f"{file} has no tokenizer, without which its model reads no text")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # as above
        raise model_error("tokenizer of", str(file), error) from error
    if _value(reader, "tokenizer.ggml.pre") in _DIGIT_RULES:
        split = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(split)
    named: ChatTokenizer = tokenizer
    return named


def _rotate_as(reader: GGUFReader, config: PretrainedConfig, file: Path) -> None:
    """Give `config` the stretched rotary embeddings of the file, which transformers does not read for most models.
    Raises `ModelError` for those that it cannot be given.
    """
    table: Any = getattr(config, "rope_parameters", None) or {}
    tables = [table] if "rope_type" in table else [item for item in table.values() if isinstance(item, Mapping)]
    if any(entry.get("rope_type") != "default" for entry in tables):
        return  # read by transformers
    kind = _value(reader, f"{_value(reader, 'general.architecture')}.rope.scaling.type")
    if kind not in (None, "none"):
        raise ModelError(
            f"{file} stretches rotary embeddings by {kind}, which transformers does not read from GGUF: use the model "
            "in Hugging Face format"
        )
    divisors = next((torch.tensor(tensor.data) for tensor in reader.tensors if tensor.name == _ROTATION), None)
    if divisors is None:
        return
    config.rope_parameters = {**table, **_LLAMA_3, "rope_type": "llama3", "factor": float(divisors.max())}
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    unstretched = table["rope_theta"] ** -(torch.arange(0, size, 2) / size)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    if not torch.allclose(stretched * divisors, unstretched, rtol=1e-4, atol=0):
        raise ModelError(
            f"{file} divides rotary frequencies in a way of its own ({_ROTATION}): use the model in Hugging Face format"
        )


def _refuse_unread(reader: GGUFReader, read: torch.nn.Module, file: Path) -> None:
    """Refuse a file with weights that the model has no place for, such as biases: without them it is another model."""
    config: Any = read.config
    passed_over = {_ROTATION} | ({"output.weight"} if config.tie_word_embeddings else set())
    beyond = f"blk.{config.num_hidden_layers}."  # a block that predicts further tokens, which training does not use
    tensors = [
        tensor for tensor in reader.tensors if tensor.name not in passed_over and not tensor.name.startswith(beyond)
    ]
    in_file = sum(int(item.n_elements) for item in tensors)
    in_model = sum({tensor.data_ptr(): tensor.numel() for tensor in read.state_dict().values()}.values())  # tied once
    if in_file != in_model:
        raise ModelError(
            f"{file} has {in_file:,} weights, of which transformers reads {in_model:,}: use the model in Hugging Face "
            "format"
        )


def _refuse_changed(tokenizer: ChatTokenizer, config: PretrainedConfig, file: Path) -> None:
    """Refuse a tokenizer that reads text differently once it is stored: transformers chooses its class by the model."""
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        stored: Any = AutoTokenizer.from_pretrained(folder)
    if stored.encode(SAMPLE_TEXT) != tokenizer.encode(SAMPLE_TEXT):
        raise ModelError(
            f"the tokenizer of {file} cannot be stored: for a model of type {config.model_type}, transformers builds a "
            f"{type(stored).__name__} whatever is stored"
        )


def _remarks(tokenizer: ChatTokenizer, rule: str | int | None) -> Iterator[str]:
    """Sentences on what the tokenizer lacks; `rule` is the file's name of how text is split before tokens are found."""
    if not tokenizer.chat_template:
        yield "It has no chat template: a run needs a chat_template.jinja in the folder."
    fast: Any = tokenizer
    by_default = isinstance(fast.backend_tokenizer.pre_tokenizer, ByteLevel)
    if rule is not None and by_default and rule not in _GPT2_RULES:
        yield f"Its tokenizer splits text by the rule {rule}, for which transformers takes GPT-2's: compare token ids."
