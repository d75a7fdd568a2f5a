"""What this program can do with a model: how its rows run, whether the embedded engine samples from it, what follows.

Only the model's configuration is read; a small copy of it is tried (`learners/row_support.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PretrainedConfig

from skyrl.config.derive.model_overrides import LONGEST_ROW
from skyrl.errors import ModelError
from skyrl.inference.torch.sampling_support import sampling_support
from skyrl.learners.row_support import RowSupport, differences, row_support
from skyrl.models.attention.segment_attention import SEGMENTS, sees_whole_rows
from skyrl.models.files.loading import load_config
from skyrl.models.megatron.layout import ARCHITECTURES


def model_report(path: str, *, longest: int | None) -> Iterator[str]:
    """Lines about the model at `path`, a folder or hub name, in runs whose longest row has `longest` tokens. Raises
    `ModelError` for a model that cannot be trained.
    """
    config = load_config(path, {LONGEST_ROW: longest})
    yield f"{path}: {config.model_type}{_bounds(config)}"
    rows = row_support(config, "sdpa", pack=True, share_prompts=True)
    if not (layout := rows.reason.partition(": rows run ")[2]):
        tried = "sdpa" if rows.attention == SEGMENTS else rows.attention
        result = next(differences(config, tried, pack=rows.pack, share_prompts=rows.share_prompts))
        layout = f"packed with shared prompts, within {result.nats:.1g} nats of each row alone in a small copy"
    yield f"  rows      {layout}"
    try:
        support = sampling_support(config, "sdpa")
        engine = f"attention {support.attention}" + (f": {support.reason}" if support.reason else "")
    except ModelError as error:
        engine = f"refused: {error}"
    yield f"  engine    {engine}"
    # Short and long runs may have other rotary embeddings.
    short, long = (load_config(path, {LONGEST_ROW: length}) for length in (1, None))
    if short.to_dict() != long.to_dict():
        rows_of = "as long as its positions" if longest is None else f"of {longest} tokens"
        yield f"  rotation  one set in all of a run, by trainer.longest_row; here for rows {rows_of}"
    converts = config.model_type in ARCHITECTURES and sees_whole_rows(config)
    yield f"  megatron  {'has a converter' if converts else 'no converter: another strategy trains it'}"
    if settings := ", ".join(_settings(config, rows)):
        yield f"  settings  {settings}"


def _bounds(config: PretrainedConfig) -> str:
    """The bounds of the model's attention, in words."""
    text = config.get_text_config()
    names = {
        "sliding_window": "windows of {} tokens",
        "attention_chunk_size": "chunks of {} tokens",
        "attn_logit_softcapping": "scores capped at {}",
    }
    bounds = [words.format(getattr(text, name)) for name, words in names.items() if getattr(text, name, None)]
    kinds = dict.fromkeys(getattr(text, "layer_types", None) or [])
    layers = [" and ".join(kinds).replace("_", " ")] if len(kinds) > 1 else []
    return "".join(f", {item}" for item in (*layers, *bounds))


def _settings(config: PretrainedConfig, rows: RowSupport) -> Iterator[str]:
    """Fields whose values follow, as a user would write them."""
    if not rows.pack:
        yield "trainer.use_sample_packing = false"
    elif not rows.share_prompts:
        yield "trainer.share_group_prompts = false"
    if rows.attention not in (SEGMENTS, "sdpa"):
        yield f'trainer.attention = "{rows.attention}"'
    if not rows.pack or not sees_whole_rows(config):
        yield "sequence_parallel_size = context_parallel_size = 1"
