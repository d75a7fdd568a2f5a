"""A GGUF file becomes a folder with the model and tokenizer that transformers reads from it, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from numpy.typing import ArrayLike
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from skyrl.cli.main import cli
from skyrl.models.files.loading import load_tokenizer

F32, F16, Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGED = ["Ġt", "he", "Ġthe", "ĠĠ", "12"]
VOCABULARY = [*SPECIAL, *sorted(ByteLevel.alphabet()), *MERGED]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
TEXT = "the answer to 12 + 34\n is Ü"


def llama(*, tied: bool = True, heads: int = 4, rotation: Mapping[str, object] | None = None) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
        rope_parameters=None if rotation is None else dict(rotation),
    )
    return LlamaForCausalLM(config)


def write(
    file: Path,
    model: LlamaForCausalLM,
    *,
    kind: GGMLQuantizationType = F32,
    architecture: str = "llama",
    tokenizer: bool = True,
    template: bool = True,
    rule: str = "gpt-2",
    more: Callable[[GGUFWriter], object] = lambda writer: None,
    without: Sequence[str] = (),
) -> Path:
    """Writes the file as llama.cpp's converter does."""
    config: Any = model.config
    writer = GGUFWriter(file, architecture)
    writer.add_name("Small")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(rule)
        writer.add_token_list(VOCABULARY)
        writer.add_token_types([TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in VOCABULARY])
        writer.add_token_merges(["Ġ t", "h e", "Ġt he", "Ġ Ġ", "1 2"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
        writer.add_unk_token_id(0)
    if tokenizer and template:
        writer.add_chat_template(TEMPLATE)
    more(writer)
    for name, tensor in model.state_dict().items():
        stored = stored_name(name)
        if stored in without or (stored == "output.weight" and config.tie_word_embeddings):
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        rotated = next((count for part, count in heads.items() if part in name), None)
        values = (interleaved(tensor, rotated) if rotated else tensor).numpy()
        type_ = kind if tensor.dim() == 2 else F32
        writer.add_tensor(stored, quantize(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def stored_name(name: str) -> str:
    stem, _, leaf = name.rpartition(".")
    block = ""
    if stem.startswith("model.layers."):
        number, _, stem = stem.removeprefix("model.layers.").partition(".")
        block = f"blk.{number}."
    return f"{block}{NAMES[stem]}.{leaf}"


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """The rows in the order of llama.cpp's rotary embeddings."""
    rest = weight.shape[1:]
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *rest).swapaxes(1, 2).reshape(weight.shape)


def convert(file: Path, folder: Path, *words: str) -> str:
    result = CliRunner().invoke(cli, ["model", "from-gguf", str(file), str(folder), *words])
    assert result.exit_code == 0, result.output
    return result.output


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(torch.arange(40)[None]).logits
    return output


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("tied", "kind"), [(True, F32), (False, F32), (True, F16), (False, Q8_0), (True, Q8_0)])
def test_the_folder_holds_the_model_that_transformers_reads(
    tied: bool, kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    model = llama(tied=tied)
    file = write(tmp_path / "model.gguf", model, kind=kind)
    assert f"model in {tmp_path / 'lm'}" in convert(file, tmp_path / "lm")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "lm", output_loading_info=True)
    stored, report = loaded
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    assert not any(report.values())
    assert stored.config.tie_word_embeddings == tied
    assert stored.dtype == torch.float32
    assert not hasattr(stored.config, "quantization_config")
    assert torch.equal(logits(stored), logits(read))
    assert torch.allclose(logits(stored), logits(model), atol={F32: 1e-6, F16: 1e-3, Q8_0: 1e-2}[kind])
    tokenizer, reference = (
        load_tokenizer(str(tmp_path / "lm")),
        AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name),
    )
    assert tokenizer.encode(TEXT) == reference.encode(TEXT)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode(" the<|im_end|>")) == 2
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)


def test_all_tokens_that_end_an_answer_are_kept_and_weights_take_half_the_space(tmp_path: Path) -> None:
    def ends(writer: GGUFWriter) -> None:
        writer.add_eot_token_id(0)
        writer.add_eom_token_id(2)

    convert(write(tmp_path / "model.gguf", llama(), more=ends), tmp_path / "lm", "--dtype", "bfloat16")
    assert GenerationConfig.from_pretrained(tmp_path / "lm").eos_token_id == [2, 0]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "lm").dtype == torch.bfloat16


def test_the_rotation_of_llama_3_is_recognized_in_its_divisors(tmp_path: Path) -> None:
    stretched = llama(rotation=LLAMA_3)
    plain: Any = llama()
    rotary: Any = stretched.model.rotary_emb
    divisors = (plain.model.rotary_emb.inv_freq / rotary.inv_freq).numpy()
    assert divisors.max() > 7
    convert(write(tmp_path / "model.gguf", stretched, more=adding("rope_freqs.weight", divisors)), tmp_path / "lm")
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "lm")
    assert stored.config.rope_parameters == LLAMA_3
    assert torch.equal(logits(stored), logits(stretched))


@pytest.mark.parametrize(
    ("rule", "tokens"),
    [("gpt-2", ["a", "Ġ", "Ġ", "12"]), ("smollm", ["a", "ĠĠ", "1", "2"]), ("starcoder", ["a", "ĠĠ", "1", "2"])],
)
def test_text_is_split_by_the_rule_that_the_file_names(rule: str, tokens: list[str], tmp_path: Path) -> None:
    output = convert(write(tmp_path / "model.gguf", llama(), rule=rule), tmp_path / "lm")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "lm")
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  12")) == tokens
    assert "splits text" not in output


def test_what_the_tokenizer_lacks_is_said(tmp_path: Path) -> None:
    output = convert(write(tmp_path / "bare.gguf", llama(), template=False, rule="poro-chat"), tmp_path / "lm")
    assert "It has no chat template: a run needs a chat_template.jinja in the folder." in output
    assert "splits text by the rule poro-chat, for which transformers takes GPT-2's" in output


def adding(name: str, values: ArrayLike) -> Callable[[GGUFWriter], object]:
    return lambda writer: writer.add_tensor(name, np.asarray(values, np.float32))


STRETCHED: Mapping[str, Any] = {"more": lambda writer: writer.add_string("llama.rope.scaling.type", "yarn")}
PART: Mapping[str, Any] = {"more": lambda writer: writer.add_uint16("split.count", 3)}
REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "an unknown architecture": ({"architecture": "rwkv6"}, "does not read its architecture from GGUF files"),
    "no causal model": ({"architecture": "t5encoder"}, "it is not a causal language model"),
    "no tokenizer": ({"tokenizer": False}, "has no tokenizer, without which its model reads no text"),
    "no final norm": ({"without": ["output_norm.weight"]}, "is incomplete: it has no weights for model.norm.weight"),
    "biases": ({"more": adding("blk.0.attn_q.bias", np.zeros(64))}, "weights, of which transformers reads"),
    "another rotation": (STRETCHED, "stretches rotary embeddings by yarn, which transformers does not read from GGUF"),
    "odd divisors": ({"more": adding("rope_freqs.weight", np.linspace(1, 7, 8))}, "in a way of its own"),
    "a part": (PART, "is one of 3 parts: join them first"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_would_be_another_model_is_refused(case: str, tmp_path: Path) -> None:
    options, reason = REFUSED[case]
    refused(write(tmp_path / "model.gguf", llama(), **options), tmp_path / "lm", reason)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    model_bytes = write(tmp_path / "model.gguf", llama()).read_bytes()
    for content, reason in (
        (b"", "is not a GGUF file"),
        (b"PK\3\4 a wheel", "is not a GGUF file"),
        (model_bytes[:100], "is damaged or incomplete: copy it again"),
        (model_bytes[:-5000], "is damaged or incomplete: copy it again"),
    ):
        (tmp_path / "other.gguf").write_bytes(content)
        refused(tmp_path / "other.gguf", tmp_path / "lm", reason)


def test_an_existing_folder_is_not_replaced(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", llama())
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "config.json").write_text("{}")
    refused(file, tmp_path / "lm", "exists: name a new folder")
    assert (tmp_path / "lm" / "config.json").read_text() == "{}"


def refused(file: Path, folder: Path, reason: str) -> None:
    result = CliRunner().invoke(cli, ["model", "from-gguf", str(file), str(folder)])
    message = str(result.exception)
    assert type(result.exception).__name__ in ("ModelError", "UserError"), result.output
    assert reason in message
    assert len(message.splitlines()) == 1
