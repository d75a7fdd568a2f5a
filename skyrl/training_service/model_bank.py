"""The models of a training service that learn: many LoRA adapters on one frozen base, or all weights of one model.

Rows of several models go through the base in one pass, each stretch of rows with the updates of its own adapter
(`algorithms/stretch_updates.py`), so that a model's result is that of the model alone, up to rounding. The same
requests in the same composition give the same bits.

A pass changes a model only if it ends well: gradients are collected apart, and added when loss and gradient are finite.
If the joint pass of several models is not finite, or fails, each model is computed alone, because NaN of one model may
reach the rows of others: no client's weights spoil another client's results.

Several ranks (`BankRanks`) hold the same models. The sequences of a pass are cut over them, and gradients are summed,
so that all take the same optimizer steps: the number of ranks changes no result beyond rounding. What one of them finds
out alone, such as too little memory, all of them learn before they go on. If the base is sharded over them, they wait
for each other in every layer: a rank without sequences goes through the layers, too, and a failure of one ends the
service, whose journal has what was acknowledged.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, count, pairwise, product, starmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from attrs import define, evolve, frozen
from safetensors import SafetensorError
from torch import Tensor, nn

from skyrl.algorithms.stretch_updates import StretchUpdate, updated
from skyrl.algorithms.target_logprobs import target_logprobs
from skyrl.batch import to_device
from skyrl.config.derive.model_overrides import learner_overrides
from skyrl.config.settings.learners import ShardedModelConfig
from skyrl.config.settings.run_basics import RunBasics
from skyrl.errors import ModelError, PassError, RequestError, RunError, UserError
from skyrl.learners.forward import compute_logprobs
from skyrl.learners.fsdp2 import Fsdp2
from skyrl.learners.offloading import HOST
from skyrl.learners.ranks import ALONE, Ranks
from skyrl.learners.row_layouts import RowLayout
from skyrl.learners.schedule import recompute_activations
from skyrl.learners.strategy import ModelSource
from skyrl.learners.whole_rows import whole_rows
from skyrl.learners.workers.model_worker import ModelWorker
from skyrl.learners.workers.roles import causal_lm
from skyrl.models.files.naming import named_weights
from skyrl.models.files.stored_weights import StoredWeights
from skyrl.models.lora import adaptable_layers
from skyrl.models.output_head import in_place_of_the_head
from skyrl.models.saving.storing import Export
from skyrl.processes.gather_or_cancel import gather_or_cancel
from skyrl.processes.handles import Group, Handle
from skyrl.storage.atomic import atomic_folder
from skyrl.training_service.adapter_layout import FACTORS, AdapterLayout, adapter_layout
from skyrl.training_service.backend import AdamSettings, AdapterSpec, Array, Datum, PassRequest, PassResult
from skyrl.training_service.loss_functions import LOSSES, TARGETS, loss_tokens, refuse_unusable, settings_of
from skyrl.training_service.trained_state import Tensors, TrainedState, all_finite
from skyrl.tree import required
from skyrl.weight_receiver.incoming_weights import Adapter

P = ParamSpec("P")
R = TypeVar("R")

_OPTIMIZER = "optimizer.safetensors"


@define
class _Model:
    """One model of a client."""

    layout: AdapterLayout | None
    """None: all weights of the base are trained."""

    state: TrainedState
    """On the device, on the host, or, without tensors, in `stored`."""

    stored: Path | None = None
    """File of the state while the model rests on the disk."""

    @property
    def is_critic(self) -> bool:
        """Whether it has a value head."""
        return self.layout is not None and self.layout.spec.value_head

    def value_head(self, gradients: Tensors) -> Tensor | None:
        """The value head of a critic (1, hidden). Autograd adds its gradient to `gradients`, which may be missing."""
        if self.layout is None or (head := self.layout.value_head(self.state.weights[FACTORS])) is None:
            return None
        head = head.detach()
        if gradients:
            head.requires_grad_().grad = self.layout.value_head(gradients[FACTORS])
        return head

    def updates(self, gradients: Tensors, dtype: torch.dtype) -> list[tuple[str, StretchUpdate]]:
        """Each adapted layer with its update, on no rows yet; the tensors of its gradients may be missing."""
        if self.layout is None:
            return []
        factors = self.layout.factors(self.state.weights[FACTORS].to(dtype))
        update = partial(StretchUpdate, start=0, stop=0, scale=self.layout.scale)
        if not gradients:
            return [(layer, update(a=a, b=b)) for layer, a, b in factors]
        return [
            (layer, update(a=a, b=b, for_a=for_a, for_b=for_b))
            for (layer, a, b), (_, for_a, for_b) in zip(factors, self.layout.factors(gradients[FACTORS]), strict=True)
        ]


@define
class _Pass:
    """One request while it is computed."""

    request: PassRequest
    model: _Model
    gradients: Tensors
    updates: list[tuple[str, StretchUpdate]]
    value_head: Tensor | None
    settings: Mapping[str, float]
    outputs: list[Mapping[str, Array]]
    """Outputs of each sequence; empty for those that another rank computes."""

    loss: Tensor | float = 0.0
    """The sum of the losses of all tokens, in double."""


@frozen(kw_only=True, eq=False)
class _Stretch:
    """Sequences of one request in a micro-batch."""

    of: _Pass
    rows: range
    """Numbers of the sequences in the request."""

    @property
    def data(self) -> Sequence[Datum]:
        """The sequences."""
        return self.of.request.data[self.rows.start : self.rows.stop]


class ModelBank(ModelWorker):
    """The models that learn, on one rank. Methods are called one after the other; those that a client got wrong raise
    `RequestError` and change nothing.
    """

    def __init__(
        self,
        run: RunBasics,
        section: ShardedModelConfig,
        *,
        ranks: Ranks = ALONE,
        tokens_per_pass: int,
        full: bool = False,
        resident: int | None = None,
        rest_in: Path | None = None,
    ) -> None:
        """Loads the model of `section`, a table of `run`.

        `ranks` says which of the ranks this is; each has a shard of the base, or all of it if `fsdp_config.fsdp_size`
        is 1. `tokens_per_pass` bounds the tokens that go through the model together on a rank, unless a single sequence
        has more. `full`: one model, all of whose weights are trained, in place of
        adapters. `resident` is the number of adapters on the device, None for all; the others, those used least
        recently, rest on the host, or in a folder within `rest_in`, which `close` removes.

        Raises as `ModelWorker`, and `UserError` for a strategy that cuts the model into parts.
        """
        assert ranks.size == 1 or not full, "all weights of a model are trained by one rank"
        read = partial(compute_logprobs, temperature=1.0, measured=False)
        self._dtype: torch.dtype = getattr(torch, required(run.compute_dtype, run.path_of("compute_dtype")))
        self._sharded = ranks.size > 1 and section.fsdp_config.fsdp_size != 1
        self._source = causal_lm(run, section)
        source = _cast_source(self._source, self._dtype) if self._sharded else self._source
        super().__init__(run, section, source, read, ranks=ranks if self._sharded else ALONE, role="base")
        if not isinstance(self.strategy, Fsdp2):
            raise UserError(f"{run.path_of('strategy')}: models of a training service learn under fsdp2 only")
        self._computing = self.strategy.computing
        self._path = required(section.model.path, section.path_of("model.path"))
        self._overrides = learner_overrides(run, section)
        self._tokens_per_pass, self._full, self._resident = tokens_per_pass, full, resident
        self._rest = None if rest_in is None else TemporaryDirectory(dir=rest_in, prefix="models-")
        self._models: dict[str, _Model] = {}  # the model used last at the end
        self._files = count()
        transformer: Any = self.model
        self._text_config = transformer.config.get_text_config()
        self._adaptable = adaptable_layers(self.model)
        self._layers = {name: layer for name, (_, layer) in self._adaptable.items()}
        self._head = next((name for name, (part, _) in self._adaptable.items() if part == "unembed"), None)
        if full:
            self.model.requires_grad_(True)
        elif self._sharded:
            # Backward passes go through all layers, whichever have adapters: ranks wait for each other in each.
            embedding = transformer.get_input_embeddings()
            embedding.register_forward_hook(lambda *passed: passed[-1].requires_grad_())
        else:
            _convert(self.model, self._dtype)
        if run.recompute_activations:
            recompute_activations(self.model, use_reentrant=False, draws=False)
        self._peers = ranks
        if ranks.size > 1:
            ranks.join(self.device)  # once more if the base is sharded over them

    def create(self, model_id: str, spec: AdapterSpec | None) -> None:
        """A new model; see `Backend.create`."""
        if model_id in self._models:
            raise RequestError(f"the model {model_id} exists already", status=409)
        if (spec is None) is not self._full:
            scope = "all weights of one model: ask for no adapter" if self._full else "adapters only: ask for one"
            raise RequestError(f"this service trains {scope}", param="lora_config")
        if spec is None:
            if self._models:
                raise RequestError("all weights of the model are in use by another client", status=409)
            weights: Tensors = dict(self.model.named_parameters())
            self._models[model_id] = _Model(layout=None, state=TrainedState(weights=weights))
            return
        if spec.value_head and not self._options.plain_head:
            raise RequestError("the model's output head is no plain product: no value head can take its place")
        layout = adapter_layout(spec, self._adaptable, hidden=self._text_config.hidden_size)
        self._models[model_id] = _Model(
            layout=layout, state=TrainedState(weights={FACTORS: layout.initial_vector().to(self.device)})
        )
        self._let_rest()

    def passes(self, requests: Sequence[PassRequest]) -> list[PassResult | Exception]:
        """Passes of different models, each with its own outcome; see `Backend.passes`. With several ranks, outputs of
        sequences that another rank computes are empty.
        """
        outcomes: dict[int, PassResult | Exception] = {}
        for index, request in enumerate(requests):
            try:
                self._refuse_unusable(request)
            except RequestError as error:
                outcomes[index] = error
        for backward, critic in product((True, False), repeat=2):
            chosen = [index for index, item in enumerate(requests) if item.backward is backward]
            chosen = [index for index in chosen if index not in outcomes]
            chosen = [index for index in chosen if self._models[requests[index].model_id].is_critic is critic]
            for some in _chunks(self._resident or len(chosen), chosen):
                outcomes |= zip(some, self._outcomes([requests[index] for index in some]), strict=True)
        return [outcomes[index] for index in range(len(requests))]

    def optimizer_step(self, model_id: str, settings: AdamSettings) -> dict[str, float]:
        """One Adam step of a model; see `Backend.optimizer_step`."""
        _refuse_settings(settings)
        return {"grad_norm:mean": self._awake(model_id).state.step(settings)}

    def save(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        """Write a model into a new folder; see `Backend.save`. Raises `RunError` if writing fails."""
        model = self._awake(model_id)
        if self._peers.rank > 0:
            return  # the model of rank 0 is the same
        try:
            with atomic_folder(folder) as scratch:
                if model.layout is None:
                    export = Export(like=self._path, folder=scratch, overrides=self._overrides)
                    export.write(dict(named_weights(self.model)), scratch)
                else:
                    model.layout.write(model.state.weights[FACTORS], scratch, like=self._path)
                if optimizer:
                    model.state.write(scratch / _OPTIMIZER, weights=False)
        except (OSError, SafetensorError) as error:
            raise RunError(f"the model {model_id} cannot be stored in {folder}: {error}") from error

    def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        """Replace a model's weights by stored ones; see `Backend.load`."""
        model = self._awake(model_id)
        weights = self._stored_weights(model, folder)
        state = TrainedState.read(folder / _OPTIMIZER, weights) if optimizer else TrainedState(weights=weights)
        if model.layout is None:
            state.weights = _copy_weights(model.state.weights, weights)
        model.state = state

    def unload(self, model_id: str) -> None:
        """Forget a model; see `Backend.unload`. After a model that was trained as a whole, the base is as it was
        loaded.
        """
        model = self._find(model_id)
        if model.stored is not None:
            model.stored.unlink(missing_ok=True)
        if model.layout is None:
            _copy_weights(model.state.weights, dict(self._source.load(self.device).named_parameters()))
        del self._models[model_id]

    def adapter(self, model_id: str) -> Adapter:
        """A copy of a model's adapter, for engines: on the host if they are in other processes."""
        model = self._awake(model_id)
        assert model.layout is not None
        vector = model.state.weights[FACTORS]
        return model.layout.adapter(vector if self._peers.size == 1 else vector.to(HOST))

    def weights(self) -> tuple[tuple[str, Tensor], ...]:
        """Name and value of every weight of the base, which are those of the model that is trained as a whole."""
        return tuple(named_weights(self.model))

    def close(self) -> None:
        """Leave the process group and remove what rests on the disk."""
        if self._rest is not None:
            self._rest.cleanup()
        if self._peers.size > 1:
            self._peers.leave()
            self._peers = ALONE
        super().close()

    def _find(self, model_id: str) -> _Model:
        if model_id not in self._models:
            raise RequestError(f"there is no model {model_id}: it was never created, or unloaded", status=404)
        return self._models[model_id]

    def _awake(self, model_id: str) -> _Model:
        """The model, on the device, as the one that was used last."""
        model = self._find(model_id)
        self._models[model_id] = self._models.pop(model_id)
        if model.stored is not None:
            model.state = TrainedState.read(model.stored)
            model.stored.unlink()
            model.stored = None
        if model.layout is not None:
            model.state.to(self.device)
        self._let_rest()
        return model

    def _let_rest(self) -> None:
        """Move all adapters but the `resident` ones that were used last away from the device."""
        for model in list(self._models.values())[: -self._resident] if self._resident else ():
            if self._rest is None:
                model.state.to(HOST)
            elif model.stored is None:
                model.stored = Path(self._rest.name, f"{next(self._files)}.safetensors")
                model.state.write(model.stored, weights=True)
                model.state = TrainedState(weights={})

    def _stored_weights(self, model: _Model, folder: Path) -> Tensors:
        """Weights in a folder, for a model. Raises `RequestError` if they are another model's."""
        if model.layout is not None:
            return {FACTORS: model.layout.read(folder).to(self.device)}
        stored = StoredWeights(str(folder), table="")
        try:
            shapes = {name: weight.shape for name, weight in model.state.weights.items()}
            return {name: stored.rows(name, range(shape[0]), shape).to(self.device) for name, shape in shapes.items()}
        except ModelError as error:
            raise RequestError(str(error)) from error

    def _refuse_unusable(self, request: PassRequest) -> None:
        critic, text = self._find(request.model_id).is_critic, self._text_config
        longest = getattr(text, "max_position_embeddings", None)
        refuse_unusable(request, vocabulary=text.vocab_size, longest=longest, value_head=critic)

    def _outcomes(self, requests: Sequence[PassRequest]) -> list[PassResult | Exception]:
        """Passes that are all with or all without gradient, and all or none of critics: together, or each alone if that
        does not end well.
        """
        passes: list[_Pass] = []
        error: Exception | None = None
        try:
            passes = self._computed(requests)
        except (RuntimeError, RequestError) as caught:  # such as too little memory, or an unreadable disk
            if self._sharded:
                raise PassError(f"a rank failed, and the others wait for its shard of the base: {caught}") from caught
            error = caught
        error = self._error_of_ranks(error)
        if error is not None and len(requests) == 1:
            return [error]
        if error is None:
            self._sum_over_ranks(passes)
        if error is not None or (len(passes) > 1 and not all(map(_is_finite, passes))):
            return [outcome for request in requests for outcome in self._outcomes([request])]
        return [self._concluded(item) for item in passes]

    def _error_of_ranks(self, error: Exception | None) -> Exception | None:
        """The error of this rank; with several ranks, the first error of any of them, on each of them."""
        if self._peers.size == 1:
            return error
        texts: list[str | None] = [None] * self._peers.size
        dist.all_gather_object(texts, None if error is None else f"{type(error).__name__}: {error}")
        return next((RuntimeError(text) for text in texts if text is not None), None)

    def _sum_over_ranks(self, passes: Sequence[_Pass]) -> None:
        """Make losses and gradients those of all sequences."""
        if self._peers.size == 1:
            return
        losses = torch.tensor([float(pass_.loss) for pass_ in passes], dtype=torch.float64, device=self.device)
        for summed in (losses, *(gradient for pass_ in passes for gradient in pass_.gradients.values())):
            dist.all_reduce(summed)
        for pass_, loss in zip(passes, losses.tolist(), strict=True):
            pass_.loss = loss

    def _concluded(self, pass_: _Pass) -> PassResult | Exception:
        """The result of a pass, whose gradient is added to the model's."""
        if not _is_finite(pass_):
            return RequestError(
                f"the loss or the gradient of {pass_.request.loss} is not finite: nothing was added to the model's "
                "gradients. Its weights have diverged, or the inputs are too large: load a saved state, or lower the "
                "learning rate"
            )
        pass_.model.state.add(pass_.gradients)
        return PassResult(outputs=pass_.outputs, metrics={"loss:sum": float(pass_.loss)})

    def _computed(self, requests: Sequence[PassRequest]) -> list[_Pass]:
        learns = requests[0].backward
        if self._full:
            self.model.zero_grad(set_to_none=True)  # of a pass that failed
        passes = [self._begin_pass(request) for request in requests]
        with torch.set_grad_enabled(learns), self._computing():
            for stretches in self._micro_batches(passes):
                if stretches:
                    self._compute(stretches)
                elif self._sharded:
                    self._accompany()
        if self._full and learns:
            [pass_] = passes
            pass_.gradients = {
                name: weight.grad for name, weight in pass_.model.state.weights.items() if weight.grad is not None
            }
            self.model.zero_grad(set_to_none=True)
        return passes

    def _begin_pass(self, request: PassRequest) -> _Pass:
        model = self._awake(request.model_id)
        gradients: Tensors = {}
        if request.backward and model.layout is not None:
            gradients = {FACTORS: torch.zeros_like(model.state.weights[FACTORS])}
        return _Pass(
            request=request,
            model=model,
            gradients=gradients,
            updates=model.updates(gradients, self._dtype),
            value_head=model.value_head(gradients),
            settings=settings_of(request),
            outputs=[{}] * len(request.data),
        )

    def _micro_batches(self, passes: Sequence[_Pass]) -> Iterator[list[_Stretch]]:
        """The sequences of all passes that this rank computes, in order, as many together as the bound of tokens
        allows, at least one.
        """
        lengths = [len(datum.tokens) for pass_ in passes for datum in pass_.request.data]
        first = [*accumulate((len(pass_.request.data) for pass_ in passes), initial=0)]
        for rows in dealt(lengths, self._tokens_per_pass, self._peers.size)[self._peers.rank]:
            spans = [
                (pass_, range(max(rows.start, start) - start, min(rows.stop, stop) - start))
                for pass_, (start, stop) in zip(passes, pairwise(first), strict=True)
            ]
            yield [_Stretch(of=pass_, rows=span) for pass_, span in spans if span]

    def _compute(self, stretches: Sequence[_Stretch]) -> None:
        """One pass of some sequences through the model: adds to the outputs, losses and gradients of each request."""
        data = [datum for stretch in stretches for datum in stretch.data]
        tokens_of = [[torch.from_numpy(datum.tokens.astype("int64")) for datum in item.data] for item in stretches]
        rows = whole_rows(tokens_of, self._options)
        layout, lengths = rows.layout.to(self.device), [len(element.tokens) for element in data]
        row_spans = list(starmap(range, pairwise(rows.starts)))
        tokens = [sum(len(datum.tokens) for datum in entry.data) for entry in stretches]
        positions = list(starmap(range, pairwise(accumulate(tokens, initial=0))))
        updates = defaultdict[str, list[StretchUpdate]](list)
        of_head: list[StretchUpdate] = []
        for item, inputs, picked in zip(stretches, row_spans, positions, strict=True):
            for layer, update in item.of.updates:
                is_head = layer == self._head and self._options.plain_head
                rows_of_input = picked if is_head else inputs
                moved = evolve(update, start=rows_of_input.start, stop=rows_of_input.stop)
                (of_head if is_head else updates[layer]).append(moved)
        targets = to_device(_targets(data), self.device)
        with updated(self._layers, updates):
            heads = [(item.of.value_head, picked) for item, picked in zip(stretches, positions, strict=True)]
            values = [(head, picked) for head, picked in heads if head is not None]
            outputs = self._values(layout, values) if values else self._logprobs(layout, targets, of_head)
            computed = [
                entry[:, : datum.inputs[TARGETS].shape[1]] if datum.inputs[TARGETS].ndim > 1 else entry[:, 0]
                for entry, datum in zip(outputs.split(lengths), data, strict=True)
            ]
            total = self._losses(stretches, computed)
            if total.requires_grad:
                total.backward()

    def _accompany(self) -> None:
        """A pass over one token, for ranks that need this one's shard of each layer."""
        layout = whole_rows([[torch.zeros(1, dtype=torch.int64)]], self._options).layout.to(self.device)
        logprobs = self._logprobs(layout, torch.zeros(1, 1, dtype=torch.int64, device=self.device), [])
        if logprobs.requires_grad:
            logprobs.sum().backward()

    def _logprobs(self, layout: RowLayout, targets: Tensor, of_head: Sequence[StretchUpdate]) -> Tensor:
        """(N, K) float32 in nats, of the targets (N, K) of all tokens."""
        if self._options.plain_head:

            def read(hidden: Tensor, weight: Tensor) -> Tensor:
                return target_logprobs(layout.pick(hidden), weight, targets, of_head)

            with in_place_of_the_head(self.model, read):
                return self._options.answer(self.model, layout)
        logits = layout.pick(self._options.answer(self.model, layout)).float()
        return logits.gather(-1, targets) - logits.logsumexp(-1, keepdim=True)

    def _values(self, layout: RowLayout, heads: Sequence[tuple[Tensor, range]]) -> Tensor:
        """(N, 1) float32: the values of all tokens, each by the value head of its range."""

        def read(hidden: Tensor, weight: Tensor) -> Tensor:
            picked = layout.pick(hidden).float()
            return torch.cat([(picked[rows.start : rows.stop] * head).sum(-1, keepdim=True) for head, rows in heads])

        with in_place_of_the_head(self.model, read):
            return self._options.answer(self.model, layout)

    def _losses(self, stretches: Sequence[_Stretch], computed: Sequence[Tensor]) -> Tensor:
        """The sum of all losses; adds losses and outputs to the requests. `computed`: see `loss_tokens`."""
        on_host = [tensor.detach().float().cpu().numpy() for tensor in computed]
        total, row = computed[0].new_zeros(()), 0
        for stretch in stretches:
            after = row + len(stretch.data)
            pass_ = stretch.of
            loss = LOSSES[pass_.request.loss]
            losses = loss.compute(loss_tokens(stretch.data, computed[row:after], pass_.settings))
            pass_.loss = pass_.loss + losses.detach().double().sum()
            pass_.outputs[stretch.rows.start : stretch.rows.stop] = (
                {loss.output: values} for values in on_host[row:after]
            )
            total, row = total + losses.sum(), after
        return total


class BankRanks:
    """All ranks of the models that learn, as one. Methods are called one after the other."""

    def __init__(self, ranks: Group[ModelBank]) -> None:
        self._ranks = ranks

    async def call(self, method: Callable[Concatenate[ModelBank, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of a method on rank 0, after every rank has run it. Raises the `RequestError` of the ranks, and
        `RunError` if only some of them refuse: their models are not the same any more.
        """
        return (await self._call_ranks(method, *args, **kwargs))[0]

    async def passes(self, requests: Sequence[PassRequest]) -> list[PassResult | Exception]:
        """See `Backend.passes`."""
        return [_whole(shares) for shares in zip(*await self._call_ranks(ModelBank.passes, requests), strict=True)]

    async def _call_ranks(
        self, method: Callable[Concatenate[ModelBank, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        async def outcome(rank: Handle[ModelBank]) -> R | RequestError:
            try:
                return await rank.call(method, *args, **kwargs)
            except RequestError as error:
                return error

        outcomes = await gather_or_cancel([outcome(rank) for rank in self._ranks.handles])
        results = [item for item in outcomes if not isinstance(item, RequestError)]
        refusals = [entry for entry in outcomes if isinstance(entry, RequestError)]
        if refusals and results:
            raise RunError(f"some ranks of the models that learn failed, and the others did not: {refusals[0]}")
        if refusals:
            raise refusals[0]
        return results


def _whole(shares: Sequence[PassResult | Exception]) -> PassResult | Exception:
    """The result of a pass from those of its ranks, which all succeeded or all failed."""
    results = [share for share in shares if isinstance(share, PassResult)]
    if len(results) < len(shares):
        return next(share for share in shares if isinstance(share, Exception))
    outputs = [next(filter(None, item)) for item in zip(*(result.outputs for result in results), strict=True)]
    return PassResult(outputs=outputs, metrics=results[0].metrics)


def dealt(lengths: Sequence[int], most: int, ranks: int) -> list[list[range]]:
    """For each rank, the rows of its micro-batches, in order: about equally many tokens for all ranks, and at most
    `most` in a micro-batch, unless a row alone has more.
    """
    ends = [*accumulate(lengths)]
    per_rank = -(-ends[-1] // (ranks * most))
    while True:
        parts = ranks * per_rank
        part_of = [(end - length / 2) * parts // ends[-1] for end, length in zip(ends, lengths, strict=True)]
        cuts = [bisect_left(part_of, part) for part in range(parts + 1)]
        rows = [range(*item) for item in pairwise(cuts)]
        if all(len(row) < 2 or sum(lengths[row.start : row.stop]) <= most for row in rows):
            return [rows[rank * per_rank : (rank + 1) * per_rank] for rank in range(ranks)]
        per_rank += 1


def _cast_source(source: ModelSource, dtype: torch.dtype) -> ModelSource:
    """The source of a model whose parameters, which never change, have the type in which it computes."""
    return evolve(
        source,
        load=lambda device: _convert(source.load(device), dtype),
        meta_model=lambda: _convert(source.meta_model(), dtype),
    )


def _convert(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _is_finite(pass_: _Pass) -> bool:
    return math.isfinite(pass_.loss) and all_finite(pass_.gradients)


def _copy_weights(parameters: Tensors, weights: Tensors) -> Tensors:
    """The parameters, which the base computes with, after they got the values of `weights`."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return parameters


def _targets(data: Sequence[Datum]) -> Tensor:
    """(N, K) int64: the targets of all tokens, row after row; 0 after those of a token with fewer than K."""
    rows = [torch.from_numpy(datum.inputs[TARGETS].astype("int64")).view(len(datum.tokens), -1) for datum in data]
    most = max(targets.shape[1] for targets in rows)
    return torch.cat([torch.nn.functional.pad(targets, (0, most - targets.shape[1])) for targets in rows])


def _chunks(count: int, items: Sequence[int]) -> Iterator[Sequence[int]]:
    """The items in order, at most `count` at a time."""
    for start in range(0, len(items), max(count, 1)):
        yield items[start : start + count]


def _refuse_settings(settings: AdamSettings) -> None:
    """Raises `RequestError` for a setting of Adam that is out of its range."""
    for name in ("lr", "eps", "weight_decay", "max_grad_norm"):
        value = getattr(settings, name)
        if not (math.isfinite(value) and value >= 0):
            raise RequestError(f"adam_params: {name} = {value} is not a number of at least 0", param="adam_params")
    for name in ("beta1", "beta2"):
        value = getattr(settings, name)
        if not 0 <= value < 1:
            raise RequestError(f"adam_params: {name} = {value} is not between 0 and 1", param="adam_params")
