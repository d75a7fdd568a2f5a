"""Records of a service for people: the optimizer steps of each model, and samples.

    SERVICE/models/<model>/metrics.jsonl   a line for each step, and what its trackers keep: the folder of a run
    SERVICE/trajectories.jsonl             samples, a line for each

The service does not wait for trackers and samples, and goes on without records if they cannot be written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field, frozen

from skyrl.tracking.jsonlines import JsonLines
from skyrl.tracking.sample_files import BackgroundWriter, Decode
from skyrl.tracking.tracker import Tracker, Trackers
from skyrl.training_service.backend import AdamSettings, PassRequest, PassResult, SampleRequest, SampleResult
from skyrl.training_service.model_queue import QueuedModel
from skyrl.tree.frames import described

SAMPLES = "trajectories.jsonl"
"""Name of the file with the samples."""

_LIKELIHOOD, _POLICY_LOSS, _CRITIC_LOSS = "train/loss", "policy/policy_loss", "critic/critic_loss"
_LOSSES = ((_LIKELIHOOD, "loss"), (_POLICY_LOSS, "policy loss"), (_CRITIC_LOSS, "critic loss"))
"""Metrics of losses, and their labels in a console."""

_log = logging.getLogger(__name__)

OpenTracker = Callable[[QueuedModel], Tracker]
"""Opens the trackers of a model, whose step number `steps` is the first of this session."""


@frozen(kw_only=True)
class PassSummary:
    """Record of a pass with gradient."""

    metric: str
    """Name under which a run records such a loss: a negative log-likelihood, or that of a policy or a critic."""

    loss: float
    """Sum over its tokens."""

    tokens: int
    """Number of tokens with a weight or an advantage other than 0, at least 1."""

    drift: float | None = None
    """Sum of |log-probability - that of the sampler| over these tokens, where the client sends the latter."""

    @property
    def loss_per_token(self) -> float:
        """Mean over the tokens that count."""
        return self.loss / self.tokens


def summary_of(request: PassRequest, result: PassResult) -> PassSummary:
    """The summary of a pass."""
    tokens, drift, positive, sampled = 0, 0.0, True, True
    for datum, outputs in zip(request.data, result.outputs, strict=True):
        factors = datum.inputs.get("weights", datum.inputs.get("advantages"))
        counts = np.ones(len(datum.tokens), bool) if factors is None else factors.reshape(len(factors), -1).any(1)
        tokens += int(counts.sum())
        positive &= factors is None or bool((factors.astype(np.float32) >= 0).all())
        sampled &= "logprobs" in datum.inputs
        if sampled:
            learner, sampler = (item["logprobs"].astype(np.float32) for item in (outputs, datum.inputs))
            drift += float(np.abs(learner - sampler)[counts].sum())
    likelihood = request.loss == "cross_entropy" and positive
    return PassSummary(
        metric=_CRITIC_LOSS if request.loss == "ppo_critic" else _LIKELIHOOD if likelihood else _POLICY_LOSS,
        loss=float(result.metrics["loss:sum"]),
        tokens=max(1, tokens),
        drift=drift if sampled else None,
    )


@define
class _Step:
    """Passes of a model since its last step."""

    since: float = field(factory=time.monotonic)
    passes: list[PassSummary] = field(factory=list)

    def metrics(self) -> dict[str, float]:
        """Metrics under the names that runs give them."""
        metrics = {"timing/step": time.monotonic() - self.since}
        for name, _ in _LOSSES:
            if own := [entry for entry in self.passes if entry.metric == name]:
                metrics[name] = sum(entry.loss for entry in own) / sum(entry.tokens for entry in own)
        if own := [item for item in self.passes if item.drift is not None]:
            drift = sum(element.drift or 0.0 for element in own)
            metrics["policy/rollout_train_logprobs_abs_diff_mean"] = drift / sum(item.tokens for item in own)
        if self.passes:
            metrics["train/learned_tokens"] = float(sum(entry.tokens for entry in self.passes))
        return metrics


class ServiceRecords:
    """The records of a running service. All calls come from its loop."""

    def __init__(self, open_tracker: OpenTracker, folder: Path, decode: Decode, *, samples_per_step: int) -> None:
        """`samples_per_step` bounds the samples kept of each step of each model; -1 keeps all."""
        self._open, self._decode, self._most = open_tracker, decode, samples_per_step
        self._trackers: dict[str, Tracker] = {}
        self._steps: dict[str, _Step] = {}
        self._kept: dict[str, tuple[int, int]] = {}
        self._file, self._samples = folder / SAMPLES, JsonLines(folder / SAMPLES)
        self._writer, self._closing = BackgroundWriter(), ThreadPoolExecutor(thread_name_prefix="trackers")

    def passed(self, model: QueuedModel, summary: PassSummary) -> None:
        """Note a pass, which belongs to the model's next step."""
        self._steps.setdefault(model.id, _Step()).passes.append(summary)

    def stepped(self, model: QueuedModel, settings: AdamSettings, metrics: Mapping[str, float]) -> None:
        """Record the step that `model.steps` counts already."""
        step = self._steps.pop(model.id, _Step())
        self._steps[model.id] = _Step()
        norm = {"train/grad_norm": metrics["grad_norm:mean"]} if "grad_norm:mean" in metrics else {}
        if model.id not in self._trackers:
            self._trackers[model.id] = Trackers(())  # if they cannot be opened
            with _report_failures():
                self._trackers[model.id] = self._open(model)
        with _report_failures():
            self._trackers[model.id].log(model.steps, {**step.metrics(), **norm, "train/lr": settings.lr})

    def close_model(self, model_id: str) -> None:
        """Close the trackers of a model that was unloaded."""
        self._steps.pop(model_id, None)
        self._kept.pop(model_id, None)
        if (tracker := self._trackers.pop(model_id, None)) is not None:
            self._closing.submit(tracker.close)

    def sampled(self, source: str, step: int, number: int, request: SampleRequest, result: SampleResult) -> None:
        """Record samples of a model's weights after `step`; `number` tells its requests apart. A request that only
        scores its prompt has none.
        """
        before = self._kept.get(source, (step, 0))
        kept = before[1] if before[0] == step else 0
        count = len(result.sequences) if self._most < 0 else min(len(result.sequences), self._most - kept)
        if request.prompt_logprobs or count <= 0:
            return
        self._kept[source] = (step, kept + count)

        def write() -> None:
            with _report_failures():
                self._file.touch(mode=0o600)
                self._samples.extend(sample_lines(source, step, number, request, result, self._decode)[:count])

        with _report_failures():
            self._writer.submit(write)

    def close(self) -> None:
        """Write everything that is pending, and close all trackers."""
        for model_id in list(self._trackers):
            self.close_model(model_id)
        self._closing.shutdown()
        self._writer.close()


def sample_lines(
    source: str, step: int, number: int, request: SampleRequest, result: SampleResult, decode: Decode
) -> Sequence[Mapping[str, Any]]:
    """The samples of a request as `trajectories.jsonl` of a run has them, with the reward that only the client knows
    left open.
    """
    prompt = decode(request.prompt)
    shared = {
        "step": step,
        "group": number,
        "source": source,
        "prompt_id": blake2b(prompt.encode(), digest_size=4).hexdigest(),
        "prompt": [{"role": "prompt", "content": prompt}],
        "reward": None,
        "weight_version": step,
    }
    return [
        {
            **shared,
            "sample": index,
            "response": decode(sequence.tokens),
            "stop_reason": "stop" if sequence.ended else "length",
            "response_ids": list(sequence.tokens),
        }
        for index, sequence in enumerate(result.sequences)
    ]


class StepLines:
    """A tracker that says each step of a model in a line, for a console that many models share."""

    def __init__(self, model_id: str, say: Callable[[str], None]) -> None:
        self._model_id, self._say = model_id, say

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        names = (*_LOSSES, ("train/grad_norm", "gradient norm"))
        values = [f"{label} {metrics[name]:.4g}" for name, label in names if name in metrics]
        self._say("  ".join([f"{self._model_id} step {step}", *values]))

    def close(self) -> None:
        """Does nothing: no resource is held."""


@contextmanager
def _report_failures() -> Iterator[None]:
    """Report a failure of what is recorded, which is no reason to end the service."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # a tracker of the user's own may raise anything
        _log.warning("a step or a sample could not be recorded, and the service goes on: %s", described(error))
