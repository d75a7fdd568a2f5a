"""The lines of `skyrl doctor` about a run that can start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl.config.foundation.entry import RunConfig


def doctor_report(run: RunConfig) -> Iterator[str]:
    """Lines on the findings, and on what is only known once the run starts. `run` has passed all checks."""
    from skyrl.config.loading.kinds import kind_of
    from skyrl.planning.layout import counted
    from skyrl.tree import get_at

    kind = kind_of(run)
    trainer: Any = get_at(run, kind.trainer)
    sources = len(get_at(run, kind.data))
    model = get_at(run, f"{kind.model}.path")
    processes = kind.trained.ranks(run)
    alone = processes == 1 and trainer.placement.executor != "ray"
    how = "in one process" if alone else f"by {trainer.strategy} in {counted(processes, 'process', 'processes')}"
    yield "The configuration is valid, and this machine has what it names:"
    yield f"  model    {model}, trained on {trainer.device} {how}"
    yield from _rows(run)
    if trainer.device == "cuda":
        yield f"  compute  {trainer.compute_dtype}, attention by {trainer.attention}"
    if slower := _slower_than_the_preset(run):
        yield f'  speed    extends = "preset:cuda" has faster settings for: {", ".join(slower)}'
    yield f"  data     {counted(sources, 'source')}, whose files were read"
    yield f"  folder   {trainer.run_path}, free and writable"
    yield "Lengths of rows, data on the hub, weights and the resources of a cluster are checked when the run starts."


_DO_EVERYTHING = ("llama", "qwen2", "qwen3")
"""Types of models that need not be tried, which takes the import of torch: see docs/models.md."""


def _rows(run: RunConfig) -> Iterator[str]:
    """Lines about what a small copy of the model shows: how its rows run, and how the embedded engine samples. Raises
    `ModelError` if they cannot.
    """
    from skyrl.config.loading.kinds import kind_of, samples_rollouts
    from skyrl.experiments.model_checks import readable_files
    from skyrl.tree import get_at

    files = readable_files(get_at(run, f"{kind_of(run).model}.path"))
    if files is None or files.config.get("model_type") in _DO_EVERYTHING:
        return
    from skyrl.config.derive.engine_backends import backend_of
    from skyrl.config.derive.model_overrides import learner_overrides
    from skyrl.config.derive.sizes import starts_engines
    from skyrl.inference.torch.sampling_support import sampling_support
    from skyrl.learners.row_support import rows_of_run
    from skyrl.models.files.loading import load_config
    from skyrl.tree import required

    tree: Any = run
    trainer, section = tree.trainer, kind_of(run).trained.section(run)
    path, attention = required(section.model.path, "model.path"), required(trainer.attention, "attention")
    config = load_config(path, learner_overrides(trainer, section))
    rows = rows_of_run(trainer, config, attention)
    if rows.reason:
        yield f"  rows     {rows.reason}"
    engine = run.generator.inference_engine if samples_rollouts(run) and starts_engines(run) else None
    if engine is not None and backend_of(engine).is_embedded:
        support = sampling_support(config, attention)
        if support.reason:
            yield f"  engine   samples with attention {support.attention}: {support.reason}"


def _slower_than_the_preset(run: RunConfig) -> list[str]:
    """Paths that have an effect in a run on CUDA and differ from the value in the preset `cuda`."""
    from skyrl.config import load
    from skyrl.config.loading.check import has_effect
    from skyrl.config.loading.kinds import samples_rollouts
    from skyrl.tree import get_at

    if not samples_rollouts(run) or run.trainer.device != "cuda":
        return []
    fast = load(["preset:cuda"])
    paths = sorted(path for path in fast.origins if path != "trainer.device")
    return [path for path in paths if has_effect(run, path) and get_at(run, path) != get_at(fast.config, path)]
