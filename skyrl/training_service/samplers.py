"""Snapshots of models under names, and samples from them: the sampling part of a `Backend` over inference engines.

    publish --adapter alone--> engines <-- sample, by any number of clients at once
    publish_weights --all weights, one version at a time-->

Adapters are published side by side, while samples are drawn. All weights of a model replace those of the snapshot
before, of which no copy is kept: requests for it are then refused.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from attrs import evolve

from skyrl.config import SamplingParams
from skyrl.errors import ConfigError, ModelError, RequestError, UserError, WeightSyncError
from skyrl.inference.adapters import stored_adapter
from skyrl.inference.engine import MOST_TOP_LOGPROBS, GenerationRequest, InferenceEngine, SampleKey
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.training_service.backend import SampledSequence, SampleRequest, SampleResult
from skyrl.weight_receiver.incoming_weights import Adapter

_UNLIMITED = 2**31 - 1


class Samplers:
    """Implements `publish`, `publish_stored`, `unpublish` and `sample` of a `Backend`.

    Example: `Samplers(engine, max_model_len=4096, vocabulary=len(tokenizer))`
    """

    def __init__(
        self, engines: InferenceEngine | InferenceEngineClient, *, max_model_len: int, vocabulary: int, snapshots: Path
    ) -> None:
        """`max_model_len` is in tokens, prompt and completion together; `vocabulary` is the number of tokens. In
        `snapshots`, each adapter is stored in a folder of its sampler's name, for engines that start later.
        """
        self._engines, self._max_model_len, self._vocabulary = engines, max_model_len, vocabulary
        self._snapshots = snapshots
        self._adapters: set[str] = set()
        self._holds_base = True
        """Whether the engines hold the base model's weights, beside which adapters are computed."""
        self._current: str | None = None
        """Name of the snapshot whose weights the engines hold, unless these are the base model's or were forgotten."""
        self._replaced: set[str] = set()
        self._changes = asyncio.Lock()
        """Held while engines get or forget snapshots, so that a new engine misses none."""

    async def publish(self, sampler: str, adapter: Adapter) -> None:
        """Makes an adapter a sampler of this name. Raises `RequestError` if the name is taken or it does not fit."""
        async with self._changes:
            self._refuse_taken(sampler)
            if not self._holds_base:
                raise RequestError(
                    f"sampler {sampler}: the engines hold all weights of another model, and an adapter fits only the "
                    "base"
                )
            try:
                await self._engines.add_adapter(sampler, adapter)
            except (UserError, WeightSyncError) as error:
                raise RequestError(f"sampler {sampler}: {error}") from error
            self._adapters.add(sampler)

    async def publish_stored(self, sampler: str, folder: Path) -> None:
        """Makes the adapter in a folder, in PEFT's format, a sampler of this name. Raises as `publish`."""
        try:
            adapter = await asyncio.to_thread(stored_adapter, folder, f"sampler {sampler}")
        except ModelError as error:
            raise RequestError(str(error)) from error
        await self.publish(sampler, adapter)

    async def publish_weights(self, sampler: str, transfer: Callable[[], Awaitable[None]]) -> None:
        """Makes all weights of a model, which `transfer` sends to the engines, a sampler of this name.

        `transfer` pauses the engines, so that running samples are finished first. The sampler that was published this
        way before is replaced: its requests are refused from now on, and so are the base model's.
        """
        self._refuse_taken(sampler)
        if self._adapters:
            raise RequestError(
                f"sampler {sampler}: the engines hold adapters ({', '.join(sorted(self._adapters))}), which fit only "
                "the base: delete these samplers first"
            )
        async with self._changes:
            self._holds_base = False
            await transfer()
            if self._current is not None:
                self._replaced.add(self._current)
            self._current = sampler

    async def unpublish(self, sampler: str) -> None:
        """Forgets a sampler, once its running samples are drawn; nothing happens if there is none of this name."""
        self._replaced.discard(sampler)
        if sampler == self._current:
            self._current = None
        async with self._changes:
            if sampler in self._adapters:
                self._adapters.discard(sampler)
                await self._engines.remove_adapter(sampler)

    @asynccontextmanager
    async def admitting(self, engine: InferenceEngine) -> AsyncIterator[None]:
        """Publish all adapters on an engine that has started; it has to be among the engines at the end of the block.

        One that is not stored any more is left out: it is published only as long as its last samples are drawn.
        """
        async with self._changes:
            for sampler in sorted(self._adapters):
                with suppress(ModelError):
                    adapter = await asyncio.to_thread(stored_adapter, self._snapshots / sampler, f"sampler {sampler}")
                    await engine.add_adapter(sampler, adapter)
            yield

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Samples of one prompt. Raises `RequestError` for a request that cannot be answered, which changes nothing."""
        engine_request = self._request(request)
        try:
            completions = await self._engines.generate(engine_request)
        except RequestError:
            raise
        except UserError as error:
            raise RequestError(str(error)) from error
        scores = completions[0].prompt_scores
        return SampleResult(
            sequences=tuple(
                SampledSequence(
                    tokens=item.token_ids,
                    logprobs=item.logprobs,
                    ended=item.stop_reason == "stop",
                    top=item.top_logprobs,
                )
                for item in completions
            ),
            prompt_logprobs=(math.nan, *scores.logprobs) if scores is not None and request.prompt_logprobs else None,
            prompt_top=None if scores is None else scores.top,
        )

    def _request(self, request: SampleRequest) -> GenerationRequest:
        self._refuse_unknown(request.sampler)
        self._refuse_unfit(request)
        try:
            sampling = SamplingParams(
                max_generate_length=_UNLIMITED if request.max_tokens is None else request.max_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                stop=request.stop or None,
            )
        except ConfigError as error:
            names = {"max_generate_length": "max_tokens"}  # of requests, where they differ
            wrong = "; ".join(f"{names.get(item.path, item.path)}: {item.message}" for item in error.problems)
            raise RequestError(f"the sampling parameters are not valid: {wrong}") from error
        # nothing but the seed and the place among the samples: equal weights draw alike under any name
        key = SampleKey(run_seed=request.seed, weight_version=0, prompt_id="sample", sample_index=0)
        return GenerationRequest(
            prompt_ids=request.prompt,
            sampling=sampling,
            keys=tuple(evolve(key, sample_index=index) for index in range(request.n)),
            adapter=request.sampler if request.sampler in self._adapters else None,
            end_ids=request.stop_tokens,
            scores_prompt=request.prompt_logprobs or request.topk_prompt_logprobs > 0,
            prompt_top_logprobs=request.topk_prompt_logprobs,
            top_logprobs=request.topk_sample_logprobs,
        )

    def _refuse_taken(self, sampler: str) -> None:
        if sampler in self._adapters or sampler in self._replaced or sampler == self._current:
            raise RequestError(f"there is a sampler {sampler} already: choose another name")

    def _refuse_unknown(self, sampler: str | None) -> None:
        if sampler is None and not self._holds_base:
            raise RequestError("the base model is not held any more: the engines hold all weights of another model")
        if sampler in self._replaced:
            raise RequestError(
                f"sampler {sampler} was replaced by {self._current}: engines hold one version of all weights at a time"
            )
        if sampler is not None and sampler not in self._adapters and sampler != self._current:
            raise RequestError(f"there is no sampler {sampler}: it was never published, or was deleted", status=404)

    def _refuse_unfit(self, request: SampleRequest) -> None:
        """Raises `RequestError` for what would fail inside an engine, with everything that shares the batch."""
        length = len(request.prompt)
        if length == 0:
            raise RequestError("the prompt is empty: there is nothing to continue", param="prompt")
        if length >= self._max_model_len:
            raise RequestError(
                f"the prompt has {length} tokens, and the model holds {self._max_model_len}, of which one is sampled",
                param="prompt",
            )
        if not all(0 <= token < self._vocabulary for token in request.prompt):
            raise RequestError(f"tokens of a prompt are between 0 and {self._vocabulary - 1}", param="prompt")
        if request.n < 1:
            raise RequestError(f"{request.n} samples are requested: ask for at least 1", param="num_samples")
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
            if not 0 <= getattr(request, name) <= min(MOST_TOP_LOGPROBS, self._vocabulary):
                raise RequestError(f"{name} is between 0 and {MOST_TOP_LOGPROBS}", param=name)
        if any(not 0 <= token < self._vocabulary for token in request.stop_tokens or ()):
            raise RequestError(f"tokens of a stop are between 0 and {self._vocabulary - 1}", param="stop")
