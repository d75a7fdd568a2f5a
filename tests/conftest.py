"""A model, a tokenizer and data small enough that a whole run takes a second."""

from __future__ import annotations

import json
import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.inference.vllm_host import Host

# `nohup pytest` and `pytest &` start with these signals ignored, and every run that a test starts inherits that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A test leaves the handlers of signals as they were: processes that later tests start would inherit ignored ones,
    which a shell cannot trap.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    changed = [number.name for number in numbers if signal.getsignal(number) != before[number]]
    for number, handler in before.items():
        signal.signal(number, handler)
    assert not changed, f"the handlers of {', '.join(changed)} are others than before"


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    """The process that has imported vLLM; its tests carry the mark `xdist_group("vllm")`, so that there is one."""
    with Host() as host:
        yield host


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that refuses connections. It is bound, so that no other test's server gets it meanwhile; a server that
    allows the address to be reused, as asyncio's do, may still listen there.
    """
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/`, `adapter/` for its q_proj, `mixture/` of experts, `train.jsonl` (24 rows),
    `validation.jsonl` (6 rows) and `reward.py`.
    """
    folder = tmp_path_factory.mktemp("nano")
    _save_model(folder / "model")
    _save_adapter(folder / "adapter")
    _save_mixture(folder / "mixture", folder / "model")
    letters = random.Random(0).choices("abcdefgh", k=30)
    rows = [
        {
            "prompt": [{"role": "user", "content": letter}],
            "reward_spec": {"method": "rule", "ground_truth": letter},
            "data_source": "letters",
        }
        for letter in letters
    ]
    for name, part in (("train", rows[:24]), ("validation", rows[24:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    (folder / "reward.py").write_text(
        "def in_ascii(completion, ground_truth, **others):\n"
        "    return float(bool(completion) and completion.isascii())\n",
        encoding="utf-8",
    )
    return folder


def _save_model(folder: Path) -> None:
    import torch
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    tokenizer = Qwen2Tokenizer(
        vocab={symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))},
        merges=[],
        unk_token="<|unknown|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template="{% for message in messages %}{{ message['content'] }}<|end|>{% endfor %}",
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.3,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _save_mixture(folder: Path, like: Path) -> None:
    """A model with 4 experts in each of 2 layers, of which a token meets 2, and the tokenizer and sizes of another."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    config: Any = AutoConfig.from_pretrained(like)
    names = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads max_position_embeddings "
        "initializer_range tie_word_embeddings eos_token_id pad_token_id"
    )
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"head_dim": 8}  # which transformers' class takes without saying so
    mixture = Qwen3MoeConfig(
        **{name: getattr(config, name) for name in names.split()},
        **sizes,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    )
    Qwen3MoeForCausalLM(mixture).save_pretrained(folder)
    AutoTokenizer.from_pretrained(like).save_pretrained(folder)


def _save_adapter(folder: Path) -> None:
    """An adapter of rank 4 and alpha 8 that has learned something, as PEFT stores one."""
    import torch
    from safetensors.torch import save_file

    draws = torch.Generator().manual_seed(0)
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight": 0.2
        * torch.randn(shape, generator=draws)
        for layer in range(2)
        for part, shape in (("A", (4, 32)), ("B", (32, 4)))
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
