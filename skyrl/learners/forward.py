"""Forward passes that compute log-probabilities or values of a batch's tokens, in padded rows or one packed row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from skyrl.algorithms.linear_logprobs import (
    collision_entropy,
    collision_entropy_of_logits,
    linear_logprobs,
    logprobs_of_logits,
)
from skyrl.algorithms.target_logprobs import likeliest
from skyrl.batch import STUDENT_IDS, TrainingBatch
from skyrl.errors import ModelError, RunError
from skyrl.learners.distillation import TeacherLoss
from skyrl.learners.row_layouts import MicroBatch, RowLayout, local_stretch, packed, padded
from skyrl.models import output_head
from skyrl.models.attention.segment_attention import takes_lengths, takes_segments
from skyrl.models.attention.shared_rows import RowSharing
from skyrl.models.output_head import has_plain_head, in_place_of_the_head
from skyrl.models.routers import Routers


@attrs.frozen(kw_only=True, eq=False)
class Outputs:
    """Outputs of a role's forward pass over a batch."""

    values: Tensor
    """(B, L) with gradient, 0 where `loss_mask` is false: log-probabilities in nats, or a critic's values."""

    entropy: Tensor | None = None
    """(B, L) in nats, of the distribution that each selected token was drawn from, 0 elsewhere: Shannon's, or the
    collision entropy where a role asks for it."""

    numbers: dict[str, Tensor] = attrs.field(factory=dict)
    """Metrics by name, a number for each selected token."""

    sums: dict[str, Tensor] = attrs.field(factory=dict)
    """Scalars by name that add up over micro-batches."""

    token_costs: Tensor | None = None
    """(B, L) with gradient: what is added to the loss at each selected token, weighed by `loss_weights`, whatever the
    objective is. None: nothing."""


PARITY = "parity/"
"""Beginning of the names of sums that are not logged, but compared: see `by_engine`."""


@attrs.frozen(kw_only=True)
class ForwardOptions:
    """Options of forward passes, from the findings of `probe_forward` and from the configuration."""

    pack: bool
    """Join the rows into one, without padding; each attends only to itself."""

    segmented: bool
    """Whether the model's attention accepts the segments of a packed row."""

    lengths_given: bool
    """Whether the model's attention accepts the lengths of the rows in a packed row."""

    share_prompts: bool
    """Place neighbouring rows with one prompt behind a single copy of it, if the attention accepts segments."""

    plain_head: bool
    """Whether the model's logits are the product of hidden states and a matrix."""

    row_sharing: RowSharing | None = None
    """The ranks that each compute a part of a packed row. None: every rank computes whole rows."""

    routers: Routers | None = None
    """The routers of the model's experts, if they are transformers' and are measured or replayed."""

    routed: bool = False
    """Whether routers are measured or replayed, so that they must know which tokens they route."""

    replays: bool = False
    """Whether routers replay the choices of the engine."""

    measures: bool = False
    """Whether passes without gradient, too, compute the numbers that an update logs."""

    def layout(self, batch: TrainingBatch) -> RowLayout:
        """The layout of the rows in the model's input."""
        if not self.pack:
            return padded(batch, routed=self.routed)
        row = packed(
            batch,
            segmented=self.segmented,
            lengths_given=self.lengths_given,
            share_prompts=self.share_prompts,
            routed=self.routed,
        )
        return row if self.row_sharing is None else local_stretch(row, self.row_sharing)

    def prepare(self, batch: TrainingBatch) -> MicroBatch:
        """The rows with their layout; `batch` is on the host. Raises `RunError` if experts are to be replayed but the
        engine returned none.
        """
        if self.replays and batch.routed_experts is None and batch.loss_mask.any():
            raise RunError(
                "moe_enable_routing_replay: the batch does not record which experts its tokens were routed to; "
                "engines report them with enable_return_routed_experts"
            )
        layout = self.layout(batch if self.replays else attrs.evolve(batch, routed_experts=None))
        rows = attrs.evolve(batch, routed_experts=None).with_selected()
        engines = () if rows.engines is None else tuple(rows.pick(rows.engines).unique().tolist())
        return MicroBatch(rows=rows, layout=layout, engines=tuple(engine for engine in engines if engine >= 0))

    def answer(self, model: nn.Module, layout: RowLayout) -> Tensor:
        """The model's logits at the kept columns, or its output in place of them."""
        if self.routers is not None:
            self.routers.begin(layout.routed, measured=torch.is_grad_enabled())
        logits: Tensor = model(**layout.inputs, use_cache=False).logits
        return logits


ForwardFn = Callable[[Any, MicroBatch, ForwardOptions], Outputs]
"""A role's forward pass over the rows of a micro-batch."""


def compute_logprobs(
    model: nn.Module,
    micro: MicroBatch,
    options: ForwardOptions,
    *,
    temperature: float,
    entropy_gradient: bool = False,
    measured: bool = True,
    compile_it: bool = False,
    float32_head: bool = False,
    teachers: TeacherLoss | None = None,
    collisions: bool = False,
) -> Outputs:
    """A policy's `ForwardFn`: log-probability of every token that `loss_mask` selects. While the policy learns, also
    the entropy of the distribution that the token was drawn from, and the distance, in nats, between its
    log-probability and the engine's.

    `model` is a transformers causal language model. The entropy has a gradient only with `entropy_gradient`. `measured`
    False leaves out entropy and distance, for tokens that were not sampled. `compile_it` runs what follows the logits
    through `torch.compile`. With `float32_head`, logits are computed in float32 from 16-bit weights. With `teachers`,
    while the model learns, the divergence from them is a cost of the tokens of rows that carry what they said; whole
    distributions need `options.plain_head`. With `collisions`, which goes with `measured` False, the entropy is the
    collision entropy, without gradient.
    """
    batch, layout = micro.rows, micro.layout
    updates = options.measures or torch.is_grad_enabled()
    learns, collides = measured and updates, collisions and updates
    distills = updates and teachers is not None and teachers.reads(batch)
    targets = layout.local(batch.pick(batch.input_ids))
    settings: dict[str, Any] = {"temperature": temperature, "with_entropy": learns, "compile_it": compile_it}
    settings["entropy_gradient"] = entropy_gradient
    if options.plain_head:

        def read_head(hidden: Tensor, weight: Tensor) -> Tensor:
            picked = layout.pick(hidden)
            states, matrix = (picked.float(), weight.float()) if float32_head else (picked, weight)
            columns = linear_logprobs(states, matrix, targets, **settings)
            if collides:
                return _columns(columns[0], collision_entropy(states, matrix, temperature=temperature))
            if teachers is None or not distills:
                return _columns(*columns)
            return _columns(*columns, *teachers.columns(states, matrix, batch, layout))

        with in_place_of_the_head(model, read_head):
            columns = options.answer(model, layout)
    else:
        with output_head.float32_head(model) if float32_head else nullcontext():
            logits = layout.pick(options.answer(model, layout))
        columns = _columns(*logprobs_of_logits(logits, targets, **settings))
        if collides:
            columns = _columns(columns[:, 0], collision_entropy_of_logits(logits, temperature=temperature))
        if teachers is not None and distills:
            columns = _columns(*columns.unbind(1), *teachers.columns_of_logits(logits, batch, layout))
    joined = layout.join(columns)
    if collides:
        return Outputs(values=batch.scatter(joined[:, 0]), entropy=batch.scatter(joined[:, 1]))
    return _outputs(joined, micro, learns=learns, teachers=teachers if distills else None)


def _outputs(columns: Tensor, micro: MicroBatch, *, learns: bool, teachers: TeacherLoss | None) -> Outputs:
    """The outputs of columns (N, C): log-probability; entropy, if the model `learns`, which also measures the distance
    from the engine's log-probabilities in nats; what the cost of `teachers` is computed from.
    """
    batch = micro.rows
    logprobs, *others = columns.unbind(1)
    outputs = Outputs(values=batch.scatter(logprobs))
    if learns:
        entropy, *others = others
        numbers, sums = {"policy_entropy": entropy.detach()}, {}
        if batch.rollout_logprobs is not None:
            distance = (logprobs.detach() - batch.pick(batch.rollout_logprobs)).abs()
            numbers["rollout_train_logprobs_abs_diff"] = distance
            if batch.engines is not None:
                sums = by_engine(distance, batch.pick(batch.engines), micro.engines)
        outputs = attrs.evolve(outputs, entropy=batch.scatter(entropy), numbers=numbers, sums=sums)
    if teachers is None:
        return outputs
    cost, numbers = teachers.cost(others)
    return attrs.evolve(outputs, token_costs=batch.scatter(cost), numbers=outputs.numbers | numbers)


def by_engine(distance: Tensor, engines: Tensor, numbers: Sequence[int]) -> dict[str, Tensor]:
    """Sum of distances (N,) in nats and number of tokens of each engine, with `engines` (N,) the engine of each token:
    scalars `parity/<number>/nats` and `parity/<number>/tokens`, which `RolloutParity` reads. They are double, and the
    host does not wait for them.
    """
    result = {}
    for number in numbers:
        own = engines == number
        result[f"{PARITY}{number}/nats"] = torch.where(own, distance, 0.0).double().sum()
        result[f"{PARITY}{number}/tokens"] = own.double().sum()
    return result


def read_hidden(model: nn.Module, micro: MicroBatch, options: ForwardOptions) -> Tensor:
    """(N, H): the last hidden states, which the output matrix is multiplied with, at all selected tokens. Needs
    `options.plain_head`.
    """
    layout = micro.layout
    with in_place_of_the_head(model, lambda hidden, weight: layout.pick(hidden)):
        return layout.join(options.answer(model, layout))


def read_token_logprobs(
    model: nn.Module, micro: MicroBatch, options: ForwardOptions, *, count: int, temperature: float
) -> Tensor:
    """(N, 2, count + K) float32, at all selected tokens: ids, all of which float32 holds, and log-probabilities of the
    `count` likeliest tokens, followed by those of the K tokens that rows carry as `STUDENT_IDS`.
    """
    layout, student_ids = micro.layout, micro.rows.extras.get(STUDENT_IDS)
    also = layout.local(
        micro.rows.pick(micro.rows.input_ids)[:, None][:, :0] if student_ids is None else student_ids.values
    ).long()

    def table(ids: Tensor, logprobs: Tensor, others: Tensor) -> Tensor:
        return torch.stack([torch.cat([ids, also], -1).float(), torch.cat([logprobs, others], -1)], 1)

    def read_head(hidden: Tensor, weight: Tensor) -> Tensor:
        states = layout.pick(hidden)
        return table(*likeliest(states, weight, count, also, temperature=temperature))

    if options.plain_head:
        with in_place_of_the_head(model, read_head):
            return layout.join(options.answer(model, layout))
    logs = (layout.pick(options.answer(model, layout)).float() / temperature).log_softmax(-1)
    values, ids = logs.topk(count)
    return layout.join(table(ids, values, logs.gather(-1, also)))


def _columns(*columns: Tensor | None) -> Tensor:
    """Stacks columns: (n,) each -> (n, columns)."""
    return torch.stack([column for column in columns if column is not None], dim=1)


def read_values(model: nn.Module, micro: MicroBatch, options: ForwardOptions) -> Outputs:
    """A critic's `ForwardFn`: the value of the state in which each selected token was sampled, without the token.

    `model` has one logit.
    """
    layout = micro.layout
    values = layout.join(layout.pick(options.answer(model, layout)).float().squeeze(-1))
    return Outputs(values=micro.rows.scatter(values), numbers={"critic_values": values.detach()})


@torch.no_grad()
def probe_forward(
    model: Any,
    *,
    pack: bool,
    share_prompts: bool,
    device: torch.device,
    packing_field: str = "trainer.use_sample_packing",
    row_sharing: RowSharing | None = None,
) -> ForwardOptions:
    """Check on a few tokens that the model is causal and that packed rows do not see each other, also if each rank of
    `row_sharing` computes a part of the row. Returns the options of its forward passes.

    A model declares neither property, and both fail silently. Raises `ModelError`, which names `packing_field`.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.arange(1, 15, device=device) * 7919 % vocabulary
    expected = _logits(model, ids[5:])
    if _differ(_logits(model, ids[5:-2]), expected[:-2]):
        raise ModelError("this model's output at a token depends on later tokens: it is not a causal language model")
    options = ForwardOptions(
        pack=pack,
        segmented=pack and takes_segments(model),
        lengths_given=pack and takes_lengths(model),
        share_prompts=False,
        plain_head=False,
        row_sharing=row_sharing,
    )
    if not pack:
        return attrs.evolve(options, plain_head=has_plain_head(model, device))
    layout = options.layout(_probe(ids, (5, 9))).to(device)
    if _differ(layout.join(layout.pick(options.answer(model, layout)))[-9:], expected):
        raise ModelError(
            f"rows of this model attend to each other when they are packed into one: set {packing_field} = false"
        )
    return attrs.evolve(options, share_prompts=share_prompts, plain_head=has_plain_head(model, device))


def _probe(ids: Tensor, lengths: tuple[int, ...]) -> TrainingBatch:
    """Rows of these lengths on the host. All tokens of a row except the first are selected, and the one after it."""
    ids = ids.cpu()
    rows = torch.nn.utils.rnn.pad_sequence(list(ids.split(lengths)), batch_first=True)
    rows = torch.nn.functional.pad(rows, (0, 1))
    sizes = torch.tensor(lengths)
    mask = torch.arange(rows.shape[1]).expand_as(rows) <= sizes.unsqueeze(1)
    mask = mask & (torch.arange(rows.shape[1]) > 0)
    return TrainingBatch(
        input_ids=rows,
        lengths=sizes,
        loss_mask=mask,
        rollout_logprobs=torch.zeros(rows.shape),
        rewards=torch.zeros(rows.shape),
        groups=torch.arange(len(rows)),
    )


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    return logits


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether logits differ by more than rounding: a small part of their spread, larger in 16 bits than in 32."""
    bound = 1e-2 if one.dtype == torch.float32 else 0.25
    return bool((one.float() - other.float()).abs().max() > bound * other.float().std().clamp(min=1e-6))
