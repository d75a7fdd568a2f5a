"""Evaluates the policy on prompts that it is not trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from skyrl.config import GeneratorConfig
from skyrl.processes.redaction import redacted_tree
from skyrl.rollout.generator import SkyRLGymGenerator
from skyrl.rollout.measures import count_failures
from skyrl.storage.atomic import atomic_folder
from skyrl.tracking.jsonlines import json_line, sample_records
from skyrl.tracking.source_labels import file_name, source_labels
from skyrl.training.describe import Metrics
from skyrl.training.eval_scores import scores
from skyrl.trajectory import Prompt, TrajectoryGroup
from skyrl.tree import required


class Evaluation:
    """Samples every evaluation prompt under `eval_sampling_params` and reports scores for each data source and for
    all.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        generator: SkyRLGymGenerator,
        config: GeneratorConfig,
        *,
        batch_size: int,
        dump_folder: Path | None,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        """`batch_size` is the number of prompts in flight at a time; answers are written below `dump_folder` if it is
        given.
        """
        self._prompts = prompts
        self._generator = generator
        self._sampling = required(config.eval_sampling_params, "generator.eval_sampling_params")
        self._samples = config.eval_n_samples_per_prompt
        self._batch_size = batch_size
        self._dump_folder = dump_folder
        self._decode = decode

    async def run(self, version: int) -> Metrics:
        """Metrics of `eval_scores.py` under `eval/<data source>/` and `eval/all/`.

        Groups whose environment failed for good have no score: `eval/dropped_groups` counts them, and `eval/failures`,
        with its kinds, counts failed attempts if there were any.
        """
        groups = await self.sample(version)
        metrics = self.measure(groups)
        if self._dump_folder is not None:
            self.dump(self._dump_folder / f"global_step_{version}_evals", version, groups, metrics)
        return metrics

    async def sample(self, version: int) -> tuple[TrajectoryGroup, ...]:
        """A group of rewarded samples for each prompt, in order; `version` is part of the seed of each sample."""
        groups: list[TrajectoryGroup] = []
        tally = self._generator.tally(len(self._prompts) * self._samples)
        for start in range(0, len(self._prompts), self._batch_size):
            groups += await self._generator.generate(
                self._prompts[start : start + self._batch_size],
                sampling=self._sampling,
                samples_per_prompt=self._samples,
                weight_version=version,
                purpose="eval",
                tally=tally,
            )
        return tuple(groups)

    def measure(self, groups: Sequence[TrajectoryGroup]) -> Metrics:
        """The metrics that `run` returns, for groups that `sample` returned."""
        counts = count_failures(groups).items()
        failures = {name.replace("rollout/", "eval/"): count for name, count in counts if count}
        metrics: Metrics = {}
        for source, own in with_all(groups).items():
            metrics |= {f"eval/{source}/{name}": value for name, value in scores(own, self._samples).items()}
        return metrics | failures

    def dump(self, folder: Path, step: int, groups: Sequence[TrajectoryGroup], metrics: Metrics) -> None:
        """Write every sample that has a score, one file per data source, and the metrics."""
        with atomic_folder(folder) as scratch:
            for source, own in by_source(groups).items():
                records = map(redacted_tree, sample_records(step, own, self._decode))
                (scratch / file_name(source, ".jsonl")).write_text("".join(map(json_line, records)), encoding="utf-8")
            (scratch / "aggregated_results.jsonl").write_text(json_line(metrics), encoding="utf-8")


def by_source(groups: Sequence[TrajectoryGroup]) -> dict[str, list[TrajectoryGroup]]:
    """The groups that were not dropped, in order, by the label of their data source."""
    result: dict[str, list[TrajectoryGroup]] = {}
    labels = source_labels(group.prompt.data_source for group in groups)
    for group in groups:
        if not group.dropped:
            result.setdefault(labels[group.prompt.data_source], []).append(group)
    return result


def with_all(groups: Sequence[TrajectoryGroup]) -> dict[str, list[TrajectoryGroup]]:
    """The groups by data source, and all of them together as `all`; empty if every group was dropped."""
    result = by_source(groups)
    return {**result, "all": [group for group in groups if not group.dropped]} if result else {}
