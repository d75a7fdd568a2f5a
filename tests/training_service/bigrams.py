"""A small backend for tests of the training service: a table of bigram logits per model, in NumPy, in memory.

Every method is deterministic, and slow enough nowhere. `calls` lists what was asked, in order.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from attrs import define, field
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from skyrl.errors import RequestError
from skyrl.inference.engine import TopLogprobs
from skyrl.training_service.backend import (
    AdamSettings,
    AdapterSpec,
    PassRequest,
    PassResult,
    SampledSequence,
    SampleRequest,
    SampleResult,
    ServedModel,
)

VOCABULARY = 32

SERVED = ServedModel(
    names=("toy/bigram",), context=64, vocabulary=VOCABULARY, tokenizer="toy/bigram", architecture="toy"
)


@define(eq=False)
class _Model:
    weights: NDArray[np.float64]
    spec: AdapterSpec | None
    gradient: NDArray[np.float64] = field(factory=lambda: np.zeros((VOCABULARY, VOCABULARY)))
    first: NDArray[np.float64] = field(factory=lambda: np.zeros((VOCABULARY, VOCABULARY)))
    second: NDArray[np.float64] = field(factory=lambda: np.zeros((VOCABULARY, VOCABULARY)))
    steps: int = 0


class BigramBackend:
    """Logits of the next token are a row of a table, which is what is trained."""

    def __init__(self) -> None:
        self.models: dict[str, _Model] = {}
        self.samplers: dict[str, NDArray[np.float64]] = {}
        self.calls: list[tuple[str, ...]] = []
        self.hold = threading.Event()
        """Cleared by a test: passes, steps and samples wait."""

        self.hold.set()

    async def create(self, model_id: str, spec: AdapterSpec | None) -> None:
        self.calls.append(("create", model_id))
        seed = 0 if spec is None else spec.seed
        self.models[model_id] = _Model(np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY)) / 10, spec)

    async def passes(self, requests: Sequence[PassRequest]) -> Sequence[PassResult | Exception]:
        await asyncio.to_thread(self.hold.wait)
        self.calls.append(("passes", *(request.model_id for request in requests)))
        return [self._pass(request) for request in requests]

    def _pass(self, request: PassRequest) -> PassResult | Exception:
        if request.loss not in ("cross_entropy", "importance_sampling"):
            return RequestError(f"loss_fn = {request.loss!r} is not a loss")
        if request.loss_config:
            return RequestError(f"loss_fn_config: {', '.join(request.loss_config)} is not a setting of {request.loss}")
        model = self.models[request.model_id]
        outputs, loss = [], 0.0
        for datum in request.data:
            if "target_tokens" not in datum.inputs:
                return RequestError("loss_fn_inputs: target_tokens is missing")
            targets = datum.inputs["target_tokens"].astype(np.int64)
            name = "weights" if request.loss == "cross_entropy" else "advantages"
            weights = datum.inputs.get(name, np.ones(targets.shape)).astype(np.float64)
            table = _log_softmax(model.weights[datum.tokens])
            columns = targets if targets.ndim == 2 else targets[:, None]
            scores = np.take_along_axis(table, columns, 1)
            loss -= float((weights.reshape(columns.shape) * scores).sum())
            outputs.append({"logprobs": scores.reshape(targets.shape).astype(np.float32)})
            if request.backward:
                slopes = np.exp(table) * weights.reshape(columns.shape).sum(1, keepdims=True)
                np.subtract.at(slopes, (np.arange(len(slopes))[:, None], columns), weights.reshape(columns.shape))
                np.add.at(model.gradient, datum.tokens, slopes)
        return PassResult(outputs=outputs, metrics={"loss:sum": loss})

    async def optimizer_step(self, model_id: str, settings: AdamSettings) -> Mapping[str, float]:
        self.calls.append(("step", model_id))
        model = self.models[model_id]
        model.steps += 1
        norm = float(np.linalg.norm(model.gradient))
        model.first = settings.beta1 * model.first + (1 - settings.beta1) * model.gradient
        model.second = settings.beta2 * model.second + (1 - settings.beta2) * model.gradient**2
        first = model.first / (1 - settings.beta1**model.steps)
        second = model.second / (1 - settings.beta2**model.steps)
        model.weights = model.weights - settings.lr * first / (np.sqrt(second) + settings.eps)
        model.gradient = np.zeros_like(model.gradient)
        return {"grad_norm:mean": norm}

    async def save(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        self.calls.append(("save", model_id))
        model = self.models[model_id]
        arrays = {"weights": model.weights}
        if optimizer:
            arrays |= {"gradient": model.gradient, "first": model.first, "second": model.second}
        os.mkdir(folder)
        save_file(arrays, folder / "model.safetensors")
        (folder / "model.json").write_text(json.dumps({"steps": model.steps}))

    async def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        self.calls.append(("load", model_id))
        stored = load_file(folder / "model.safetensors")
        model = _Model(stored["weights"], self.models[model_id].spec)
        if optimizer:
            model.gradient, model.first, model.second = stored["gradient"], stored["first"], stored["second"]
            model.steps = json.loads((folder / "model.json").read_text())["steps"]
        self.models[model_id] = model

    async def unload(self, model_id: str) -> None:
        self.calls.append(("unload", model_id))
        del self.models[model_id]

    async def publish(self, model_id: str, sampler: str) -> None:
        self.calls.append(("publish", model_id))
        self.samplers[sampler] = self.models[model_id].weights

    async def publish_stored(self, folder: Path, sampler: str) -> None:
        self.calls.append(("publish_stored", sampler))
        self.samplers[sampler] = load_file(folder / "model.safetensors")["weights"]

    async def unpublish(self, sampler: str) -> None:
        self.calls.append(("unpublish", sampler))
        del self.samplers[sampler]

    async def sample(self, request: SampleRequest) -> SampleResult:
        await asyncio.to_thread(self.hold.wait)
        base = np.zeros((VOCABULARY, VOCABULARY))
        weights = base if request.sampler is None else self.samplers[request.sampler]
        table = _log_softmax(weights)
        tempered = _log_softmax(weights / request.temperature) if request.temperature else table
        generator = np.random.default_rng(request.seed)
        sequences = tuple(_drawn(request, table, tempered, generator) for _ in range(request.n))
        prompt = np.array(request.prompt)
        scores = (float("nan"), *(float(table[a, b]) for a, b in itertools.pairwise(prompt)))
        top = _top(table[prompt[:-1]], request.topk_prompt_logprobs) if request.topk_prompt_logprobs else None
        return SampleResult(
            sequences=sequences, prompt_logprobs=scores if request.prompt_logprobs else None, prompt_top=top
        )


def _drawn(
    request: SampleRequest, table: NDArray[np.float64], tempered: NDArray[np.float64], generator: np.random.Generator
) -> SampledSequence:
    tokens: list[int] = []
    scores: list[float] = []
    rows: list[int] = []
    last = request.prompt[-1]
    ended = False
    while len(tokens) < (request.max_tokens or 1) and not ended:
        rows.append(last)
        odds = tempered[last]
        token = int(generator.choice(VOCABULARY, p=np.exp(odds))) if request.temperature else int(odds.argmax())
        tokens.append(token)
        scores.append(float(odds[token]))
        ended, last = token in (request.stop_tokens or ()), token
    top = _top(table[rows], request.topk_sample_logprobs) if request.topk_sample_logprobs else None
    return SampledSequence(tokens=tuple(tokens), logprobs=tuple(scores), ended=ended, top=top)


def _top(rows: NDArray[np.float64], k: int) -> TopLogprobs:
    order = np.argsort(-rows, axis=1)[:, :k]
    return TopLogprobs(token_ids=order.astype(np.int32), logprobs=np.take_along_axis(rows, order, 1).astype(np.float32))


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
