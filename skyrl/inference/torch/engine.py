"""The embedded engine: samples from a transformers model in this process, CPU or one GPU, no server.

    GenerationRequest --> Job --Scheduler--> DecodeBatch --> Completion

All calls of `generate` share one decoding batch. Requests join it between two steps, and a request is answered as soon
as its own samples are finished. See `decode_batch.py` for the decoding loop.

**Deterministic mode.** The last bits (about 1e-6) of a row of a matrix product depend on the size of the product,
because kernels split the sum differently; over a few tokens that can change a draw. If results have to be equal bit for
bit, every request is therefore decoded in a batch of its own: prompt length, batch size, the steps at which rows leave,
all shapes then follow from the request alone, and with counter-based draws so do tokens and log-probabilities, whatever
else is in flight. The cost is that requests do not share a larger batch. (Padding the batch to a fixed size would not
suffice: elementwise kernels round the last few elements of a tensor differently, so a row's position would matter.)
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Tensor
from transformers import PreTrainedModel

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.errors import ModelError, UserError, WeightSyncError
from skyrl.inference.adapter_shelf import AdapterShelf
from skyrl.inference.adapters import (
    apply_updates,
    linear_layers,
    received_updates,
    refuse_foreign,
    stored_adapter,
    updates_of,
)
from skyrl.inference.engine import (
    Completion,
    EngineLoad,
    GenerationRequest,
    InFlight,
    completion_limit,
    empty_completions,
)
from skyrl.inference.sampling import Drawable
from skyrl.inference.torch.causal_lm import CausalLM
from skyrl.inference.torch.decode_batch import DecodeBatch, Job
from skyrl.inference.torch.prefix_cache import MOST_BYTES
from skyrl.inference.torch.sampling_support import sampling_support
from skyrl.inference.torch.scheduler import Scheduler
from skyrl.inference.weights import received_weights, refuse_beside_adapters, replace_weights
from skyrl.models.files.loading import load_causal_lm, load_config, load_tokenizer
from skyrl.models.files.overrides import varies_with_length
from skyrl.models.low_rank import LowRank, Updates, set_updates
from skyrl.tree import FrozenDict
from skyrl.weight_receiver.incoming_weights import Adapter, IncomingWeights

_log = logging.getLogger(__name__)


class TorchEngine:
    """An `InferenceEngine` over a transformers causal language model, which it must be the only one to use.

    Example: `TorchEngine(AutoModelForCausalLM.from_pretrained(path), tokenizer, max_num_seqs=64)`
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: ChatTokenizer,
        *,
        max_num_seqs: int,
        max_model_len: int | None = None,
        deterministic: bool = False,
        prefix_bytes: int = MOST_BYTES,
        several_turns: bool = True,
        int8: bool = False,
        float32_head: bool = False,
        returns_experts: bool = False,
        max_adapters: int = 0,
    ) -> None:
        """At most `max_num_seqs` samples are decoded together. `max_model_len` is in tokens, prompt and completion
        together; None is the model's `max_position_embeddings`. `prefix_bytes` bounds the memory of the keys and values
        of finished sequences, from which later prompts continue; 0, and deterministic mode, compute every prompt whole.
        Without `several_turns`, no prompt continues an answer, and only common prefixes of prompts are kept. With
        `int8`, the layers' projections compute in eight bits, and everything else in the model's type. With
        `float32_head`, logits are computed in float32. With `returns_experts`, completions report the experts of their
        tokens. At most `max_adapters` of the published adapters are in memory; with 0, none can be published.

        Raises `ModelError` for a model that cannot be sampled from.
        """
        if varies_with_length(model.config):
            raise ModelError(
                "the model's rotary embeddings depend on the longest row of a call: load it with `load_causal_lm`, "
                "which chooses one set of them"
            )
        self._max_model_len = max_model_len or _positions(model)
        self._causal_lm: CausalLM = CausalLM(
            model,
            kept_bytes=0 if deterministic else prefix_bytes,
            keeps_answers=several_turns,
            int8=int8,
            float32_head=float32_head,
            records_experts=returns_experts,
            takes_adapters=max_adapters > 0,
            paged=None if deterministic else (max_num_seqs, self._max_model_len),
        )
        self._device, self._int8 = model.device, int8
        self._tokenizer = copy.deepcopy(tokenizer)  # a fast tokenizer must not serve two threads
        self._eos_ids, self._drawable = _eos_ids(model, tokenizer), Drawable.of(tokenizer)
        self._max_num_seqs = max_num_seqs
        self._is_adapted, self._broken = False, ""
        self.weight_version = 0
        """Version of the weights that the engine samples from; 0 until weights are loaded."""
        self._adapters: AdapterShelf[Updates] = AdapterShelf(max_adapters, self._load_adapter)
        self._scheduler = Scheduler(self._new_batch, max_rows=max_num_seqs, one_job_at_a_time=deterministic)

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """One completion per key, in order. Requests with different adapters share a batch.

        Raises `RunError` for a prompt that is empty or longer than `max_model_len`. If a forward pass fails or its
        logits are not finite, every request in that batch raises the error, and the engine continues with the next.
        """
        self._refuse_if_broken()
        async with nullcontext() if request.adapter is None else self._adapters.using(request.adapter) as adapter:
            return await self._generate(request, adapter)

    async def _generate(self, request: GenerationRequest, adapter: Updates | None) -> tuple[Completion, ...]:
        if request.sampling.additional_kwargs:
            unknown = ", ".join(sorted(request.sampling.additional_kwargs))
            raise UserError(f"sampling_params.additional_kwargs: the torch engine has no setting called {unknown}")
        limit = completion_limit(request, self._max_model_len)
        if limit == 0:
            return empty_completions(request)
        # One job, or several if more samples are requested than are decoded together.
        jobs = [
            Job(
                request=request,
                keys=request.keys[start : start + self._max_num_seqs],
                limit=limit,
                first_index=start,
                adapter=adapter,
            )
            for start in range(0, len(request.keys), self._max_num_seqs)
        ]
        await self._scheduler.complete(jobs)
        drawn = tuple(job.completions[index] for job in jobs for index in range(len(job.keys)))
        if request.sampling.logprobs is not None:
            return drawn
        return tuple(evolve(sample, logprobs=()) for sample in drawn)

    async def pause(self, in_flight: InFlight = "finish") -> None:
        """Returns when nothing is running. Requests made from now on, and those still waiting, wait for `resume`."""
        await self._scheduler.pause(freeze=in_flight != "finish")
        if in_flight == "recompute":
            self._scheduler.requeue()

    async def resume(self) -> None:
        """Takes work again."""
        self._scheduler.resume()

    async def load_weights(self, incoming: IncomingWeights, version: int) -> bool:
        """Copy the weights into the model, compare the parameters with what arrived, and adopt `version`; see
        `InferenceEngine.load_weights`.

        Keys and values of finished sequences are dropped. Samples that a pause keeps retain theirs, which later prompts
        do not reuse.
        """
        if not self._scheduler.idle:
            raise WeightSyncError(f"weights of version {version} came before the engine was paused and idle")
        if isinstance(incoming, Adapter):  # it does not complete the weights below it
            self._refuse_if_broken()
        refuse_beside_adapters(self._adapters.by_name)
        was_kept = self._causal_lm.kept.summary()
        replace = await asyncio.to_thread(self._receive, incoming)
        try:
            await asyncio.to_thread(replace)
        except Exception as error:
            self._broken = (
                f"this engine is out of service: loading weights of version {version} stopped halfway: "
                f"{next(iter(str(error).splitlines()), type(error).__name__)}"
            )
            self._scheduler.fail_all(WeightSyncError(self._broken))
            raise WeightSyncError(self._broken) from error
        self._broken, self.weight_version = "", version
        _log.info("weights of version %d; %s", version, was_kept)
        self._scheduler.set_weights_version(version)
        return True

    async def add_adapter(self, name: str, adapter: Adapter) -> None:
        """Makes an adapter one that requests may name; see `InferenceEngine.add_adapter`."""
        if self._int8:
            raise UserError(f"adapter {name}: an int8 engine takes no adapters beside its weights")
        if self._is_adapted:
            raise UserError(f"adapter {name} fits only the base, and this engine's policy is an adapter beside it")
        refuse_foreign(adapter, linear_layers(self._causal_lm.hf_model))
        await self._adapters.add_adapter(name, adapter)

    async def remove_adapter(self, name: str) -> None:
        """Forgets an adapter; see `InferenceEngine.remove_adapter`."""
        await self._adapters.remove_adapter(name)

    def add_stored_adapter(self, name: str, folder: Path) -> None:
        """Makes the adapter in a folder, in PEFT's format, one that requests may name. Raises `ModelError` if there is
        none that fits.
        """
        stored_adapter(folder, f"adapter {name}", linear_layers(self._causal_lm.hf_model))
        self._adapters.add_stored(name, folder)

    async def current_load(self) -> EngineLoad | None:
        """Load of the engine: the number of samples that wait for places in the batch."""
        return EngineLoad(waiting=self._scheduler.waiting)

    async def sleep(self) -> bool:
        """Moves the model to host memory, where the weights are kept. CUDA graphs and free pages are given up."""
        self._causal_lm.release()
        await self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # other processes, and tensors outside of graphs, cannot use it otherwise
        return False

    async def wake(self) -> None:
        """Moves the model back to its device."""
        await self._move(self._device)
        self._causal_lm.invalidate()

    async def close(self) -> None:
        """Finishes running requests; waiting and later ones raise `RunError`."""
        await self._scheduler.close()
        self._adapters.close()
        self._causal_lm.release()

    async def _move(self, device: torch.device) -> None:
        if self._causal_lm.hf_model.device != device:
            await asyncio.to_thread(self._causal_lm.hf_model.to, device)

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise WeightSyncError(self._broken)

    def _receive(self, incoming: IncomingWeights) -> Callable[[], None]:
        """Waits until all has arrived and been checked. Returns the function that changes the model."""
        if not isinstance(incoming, Adapter):
            return partial(self._replace_weights, received_weights(self._causal_lm.hf_model, incoming))
        if self._int8:
            raise WeightSyncError("an int8 engine takes an adapter only merged into the weights, not separately")
        return partial(self._replace_adapter, received_updates(self._causal_lm.hf_model, incoming))

    def _replace_weights(self, received: Mapping[str, Tensor]) -> None:
        replace_weights(self._causal_lm.hf_model, received)
        set_updates(self._causal_lm.hf_model, {})  # removes all: complete weights include every low-rank update
        self._is_adapted = False
        self._causal_lm.invalidate()

    def _replace_adapter(self, updates: Mapping[str, LowRank]) -> None:
        apply_updates(self._causal_lm.hf_model, updates)
        self._is_adapted = True
        self._causal_lm.invalidate()

    async def _load_adapter(self, number: int, name: str, folder: Path) -> Updates:
        model, device = self._causal_lm.hf_model, self._device
        return await asyncio.to_thread(
            lambda: updates_of(model, stored_adapter(folder, f"adapter {name}"), number, device)
        )

    def _new_batch(self) -> DecodeBatch:
        return DecodeBatch(
            self._causal_lm,
            self._tokenizer,
            eos_ids=self._eos_ids,
            weight_version=self.weight_version,
            drawable=self._drawable,
        )


def load_torch_engine(
    path: str,
    *,
    dtype: str,
    attention: str,
    device: str,
    float32_head: bool = False,
    use_fast_tokenizer: bool = True,
    max_num_seqs: int,
    max_model_len: int | None = None,
    deterministic: bool = False,
    prefix_caching: bool = True,
    several_turns: bool = True,
    overrides: Mapping[str, Any] = FrozenDict(),
    init_seed: int | None = None,
    tokenizer_path: str | None = None,
    returns_experts: bool = False,
    adapters: Mapping[str, str] = FrozenDict(),
    max_adapters: int = 0,
) -> TorchEngine:
    """An engine over its own copy of the model at `path` (folder or hub name), with weights that are stored or drawn
    from `init_seed`. `overrides` replace values of the model's transformers configuration. `tokenizer_path` names a
    tokenizer other than the model's. `adapters` maps the names in requests to folders with adapters in PEFT's format;
    others may be published, with `max_adapters` in memory. Raises `ModelError`.

    `dtype` is torch's name of the type (`float32`), or `int8` for bfloat16 with projections in eight bits. `attention`
    is transformers' name (`sdpa`), `device` is `cpu` or `cuda`. With `float32_head`, logits are computed in float32.
    """
    weights_dtype = torch.bfloat16 if dtype == "int8" else getattr(torch, dtype)
    config = load_config(path, overrides)
    support = sampling_support(config, attention)
    if support.reason:
        _log.warning("engine: %s samples with attention %s: %s", config.model_type, support.attention, support.reason)
    model = load_causal_lm(
        path,
        dtype=weights_dtype,
        attention=support.attention,
        device=torch.device(device),
        overrides=overrides,
        init_seed=init_seed,
    )
    engine = TorchEngine(
        model,
        tokenizer=load_tokenizer(tokenizer_path or path, use_fast=use_fast_tokenizer),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        deterministic=deterministic,
        prefix_bytes=MOST_BYTES if prefix_caching else 0,
        several_turns=several_turns,
        int8=dtype == "int8",
        float32_head=float32_head,
        returns_experts=returns_experts,
        max_adapters=max(max_adapters, len(adapters)),
    )
    for name, folder in adapters.items():
        engine.add_stored_adapter(name, Path(folder).expanduser())
    return engine


def _positions(model: PreTrainedModel) -> int:
    """Largest number of tokens in a sequence of this model. Raises `ModelError` if its configuration has none."""
    positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        raise ModelError(f"{type(model).__name__} does not state its context length: set max_model_len")
    return positions


def _eos_ids(model: PreTrainedModel, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """Every id that ends a completion: the generation config's one or several, and the tokenizer's."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    listed = configured if isinstance(configured, list | tuple) else [configured]
    return tuple(sorted({int(eos) for eos in (*listed, tokenizer.eos_token_id) if eos is not None}))
