"""Makes small models from scratch, for examples and new tasks: a byte tokenizer, a miniature Qwen2, and a supervised
warm start.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

# Threads of torch that spin while they wait can stall a shared machine. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from skyrl.config import SFTConfig, compose
from skyrl.processes.progress import reported_wait
from skyrl.starter.stopping import stopped_in_words
from skyrl.storage.atomic import atomic_folder, write_file
from skyrl.storage.modes import follow_umask

with reported_wait("the import of torch and transformers"):
    import torch
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
    from transformers.utils import logging

    from skyrl.experiments.sft import SFTExp

Conversation = Sequence[dict[str, str]]

CHAT_TEMPLATE = """\
{%- for message in messages %}{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""

TOOL_TEMPLATE = """\
{%- if tools %}{{- '<|system|>' }}{% for tool in tools %}{{- tool['function']['name'] }}{% endfor %}{{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}{{- '<|' + message['role'] + '|>' + message['content'] }}
{%- for call in message['tool_calls'] or [] %}{{- '<tool_call>' + call['function'] | tojson + '</tool_call>' }}
{%- endfor %}{{- '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""
"""`CHAT_TEMPLATE` with the names of tools in a system message, and tool calls in the Hermes format."""


def seeded(seed: int) -> random.Random:
    """A generator for the data; torch's generator, for the weights, gets the same seed."""
    torch.manual_seed(seed)
    return random.Random(seed)


def byte_tokenizer(length: int, words: Sequence[str] = (), template: str = CHAT_TEMPLATE, **options: Any) -> Any:
    """A tokenizer with one token for each byte, four special tokens, and one token for each of `words`, wherever it
    occurs.

    The class is Qwen2's because transformers builds that pipeline for the tokenizer of a Qwen2 model, whatever was
    saved. `length` is the longest sequence in tokens.
    """
    tokenizer = Qwen2Tokenizer(
        vocab={character: index for index, character in enumerate(sorted(ByteLevel.alphabet()))},
        merges=[],
        unk_token=None,  # type: ignore[arg-type]  # no byte is unknown
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=template,
        model_max_length=length,
        **options,
    )
    tokenizer.add_tokens(list(words))
    return tokenizer


def small_qwen2(tokenizer: Any, hidden_size: int, layers: int) -> Any:
    """A Qwen2 with random weights: 0.5 million for hidden size 128 and 2 layers, 3.0 million for 256 and 4."""
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=None,
        **special,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **special)
    return model


def warm_start(
    model: Any, tokenizer: Any, draw: Callable[[], Conversation], *, steps: int, batch_size: int, lr: float
) -> None:
    """Train on conversations that `draw` makes, with a `kind = "sft"` run of skyrl in a temporary folder.

    Only what the assistant says is learned. The learning rate rises over 20 steps and falls to 0 over the last 100.
    """
    with TemporaryDirectory() as folder:
        save(model, tokenizer, Path(folder) / "fresh")
        with Path(folder, "rows.jsonl").open("w") as rows:
            rows.writelines(json.dumps({"messages": list(draw())}) + "\n" for _ in range(steps * batch_size))
        run = {
            "kind": "sft",
            "model.path": f"{folder}/fresh",
            "train_datasets": (f"{folder}/rows.jsonl",),
            "train_on_what": "all_assistant_messages",
            "sampler": "sequential",
            "batch_size": batch_size,
            "micro_train_batch_size_per_gpu": batch_size,
            "optimizer_config.lr": lr,
            "optimizer_config.adam_betas": (0.9, 0.95),
            "optimizer_config.weight_decay": 0.0,
            "optimizer_config.scheduler": "warmup_stable_decay",
            "optimizer_config.warmup_start_ratio": 1 / 20,
            "optimizer_config.num_warmup_steps": 19,
            "optimizer_config.num_decay_steps": 100,
            "device": "cpu",
            "run_path": f"{folder}/run",
        }
        SFTExp(compose([], run, SFTConfig).config).run()
        model.load_state_dict(type(model).from_pretrained(f"{folder}/run/model").state_dict())


def write_rows(path: Path, rows: Iterable[object]) -> None:
    """Write rows as JSON lines."""
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows))


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model and its tokenizer into a folder, in the form that transformers loads."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    follow_umask(folder)


def make_task(
    training: Sequence[object],
    validation: Sequence[object],
    example: Callable[[random.Random], Conversation] | None = None,
    *,
    validation_rows: int = 128,
    training_rows: int = 1024,
    steps: int = 0,
    words: Sequence[str] = (),
    template: str = CHAT_TEMPLATE,
) -> None:
    """Make the folders `data` and `model` of a new task, which get their names when both are complete.

    Each row of a file is drawn from those of `training` or `validation`, which have none in common. The model has
    learned in `steps` steps from the conversations of `example`, if any.
    Ctrl-C and SIGTERM end the process with one line. Use it in the main thread only.
    """
    if made := [name for name in ("data", "model") if Path(name).exists()]:
        raise SystemExit(f"already there: {' and '.join(made)}. Remove both (rm -r data model) to make them again")
    rng = seeded(0)
    with stopped_in_words(), made_whole(Path("data")) as data, made_whole(Path("model")) as folder:
        write_rows(data / "train.jsonl", rng.choices(training, k=training_rows))
        write_rows(data / "validation.jsonl", rng.choices(validation, k=validation_rows))
        tokenizer = byte_tokenizer(length=64, words=words, template=template)
        model = small_qwen2(tokenizer, hidden_size=128, layers=2)
        if example is not None:
            warm_start(model, tokenizer, lambda: example(rng), steps=steps, batch_size=64, lr=2e-3)
        save(model, tokenizer, folder)


def make_once(base: Path, make: Callable[[Path], None]) -> None:
    """Make the folder `base` with `make`, unless it exists."""
    if not base.exists():
        print(f"making {base}")
        with stopped_in_words(), made_whole(base) as folder:
            make(folder)


def train(config: Path, *settings: str) -> NoReturn:
    """Replace this process by `skyrl run`, with the arguments of this command after `settings`, so signals reach the
    run itself.
    """
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "skyrl.cli", "run", str(config), *settings, *sys.argv[1:]])


@contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """A folder to fill; it is renamed to `out` when complete, and removed if anything fails before."""
    if out.exists():
        raise SystemExit(f"{out} exists already: remove it to create it again")
    logging.disable_progress_bar()
    with atomic_folder(out) as partial:
        yield partial
