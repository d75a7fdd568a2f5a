"""Mixtures of experts under Megatron-core, without Transformer Engine: routers that report their loads and can replay
the choices of an engine, and the experts.

Megatron-core's router chooses the experts and its dispatcher sends the tokens to them; the experts themselves are
implemented here and run wherever torch does.

Backward may recompute a layer after the forward passes of later micro-batches. A router's information about its tokens
is therefore an argument of the layer's call, not a global state. Importing this module requires Megatron-core.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig, TransformerLayer
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn
from torch.nn.functional import pad

from skyrl.models.megatron.modules import RowsOfTokens
from skyrl.models.parallel.expert_parallel import grouped_product, product_of_each
from skyrl.models.routers import RoutedTokens, RowLoads, loads_by_rows, row_loads

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # Megatron-core leaves it undefined without Transformer Engine

Choose = Callable[..., tuple[Tensor, Tensor]]
"""Megatron-core's choice of the best experts: scores (T, E), K and groups of experts -> scores (T, K) and indices."""


LoadWatch = Callable[[int, RowLoads, Tensor], Tensor]
"""Receives the loads of a router while a model learns: layer, counted from 0 over the layers with experts, loads, and
the weights of rows (B,) -> scalar cost of the layer's router, whose gradient is added to the router's."""


class ReplayedChoices:
    """Stands in for Megatron-core's `RouterReplay`, which replays all tokens or none."""

    chosen: Tensor | None = None
    """(T, K) int64: experts that an engine chose; -1 if it chose none. None: the router chooses."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Choose
    ) -> tuple[Tensor, Tensor]:
        """Scores (T, E) -> scores of the chosen experts (T, K), and their indices (T, K)."""
        values, chosen = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.chosen is None:
            return values, chosen
        chosen = torch.where(self.chosen >= 0, self.chosen, chosen)
        return scores.gather(1, chosen), chosen


class WatchedRouter(TopKRouter):  # type: ignore[misc]  # Megatron-core has no types
    """Megatron-core's router, extended to replay choices and report its loads."""

    watch: LoadWatch | None = None
    """Receives the loads in training. None: loads are not measured."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        """Takes the arguments with which Megatron-core makes a router."""
        super().__init__(config=config, pg_collection=pg_collection)
        self.router_replay = ReplayedChoices()
        self.rows: RowsOfTokens | None = None

    @property
    def layer(self) -> int:
        """Index of its layer among the layers with experts, counted from 0 over all pipeline stages."""
        return sum(self.config.moe_layer_freq[: self.layer_number - 1])

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits (S, B, E) -> weights of experts (S x B, E), and a mask of the chosen ones (S x B, E)."""
        rows = self.rows
        tokens = None if rows is None else rows.routed
        replayed = None if tokens is None else tokens.replayed
        self.router_replay.chosen = None if replayed is None else replayed[:, self.layer].long()
        weights, chosen = super().routing(logits, padding_mask)
        if rows is None or tokens is None or rows.row_weights is None:
            return weights, chosen
        if self.watch is not None and torch.is_grad_enabled():  # without gradient, backward recomputes the layer later
            cost = self.watch(self.layer, self._loads(tokens, logits, chosen), rows.row_weights)
            weights = moe_utils.MoEAuxLossAutoScaler.apply(weights, cost)
        return weights, chosen

    def _loads(self, tokens: RoutedTokens, logits: Tensor, chosen: Tensor) -> RowLoads:
        """Loads of this rank's tokens; the balance uses the choices of all ranks that share the rows."""
        exact = logits.reshape(-1, logits.shape[-1]).float()
        probabilities = exact.softmax(-1)
        if self.score_function == "sigmoid":
            probabilities = exact.sigmoid() / exact.sigmoid().sum(-1, keepdim=True)
        seen = loads_by_rows(tokens, exact, probabilities, chosen.float())
        return row_loads(seen.unsqueeze(0), tokens.lengths, _sum_over_ranks)


class GroupedExperts(nn.Module):
    """This rank's experts of a layer, all in two parameters: one kernel for all experts if `moe_grouped_gemm` is set,
    or one product per expert.
    """

    def __init__(self, count: int, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        """`count` experts, whose matrices are cut over the ranks of Megatron-core's expert tensor group."""
        super().__init__()
        self._count = count
        self._activation = config.activation_func
        self._product = grouped_product if config.moe_grouped_gemm else product_of_each
        inner = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        self.gate_up = self._parameter(2 * inner, config.hidden_size, config.params_dtype)
        self.down = self._parameter(config.hidden_size, inner, config.params_dtype)

    def forward(self, tokens: Tensor, counts: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Tokens (N, H) in order of experts, tokens of each expert (experts,), and router weights (N,) -> weighted
        outputs (N, H), partial sums if matrices are cut; and None for the bias.
        """
        sizes = counts.to(tokens.device)
        gate, up = self._product(tokens, self._matrices(self.gate_up), sizes).chunk(2, -1)
        inner = self._activation(gate) * up * weights.unsqueeze(-1)
        return self._product(inner.to(tokens.dtype), self._matrices(self.down), sizes), None

    def _parameter(self, rows: int, columns: int, dtype: torch.dtype) -> nn.Parameter:
        parameter = nn.Parameter(torch.empty(self._count * rows, columns, dtype=dtype))
        parameter.allreduce = False  # type: ignore[attr-defined]  # Megatron-core's mark of experts' parameters
        return parameter

    def _matrices(self, parameter: Tensor) -> Tensor:
        return parameter.view(self._count, -1, parameter.shape[1])


class UnevenAllGather(MoEAllGatherTokenDispatcher):  # type: ignore[misc]  # Megatron-core has no types
    """Megatron-core's all-gather dispatcher for ranks with different numbers of tokens: all pad to the largest."""

    routing_map: Tensor

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (..., H), their experts and weights (N, experts) -> tokens (most, H) and weights (most, experts)."""
        tokens, weights = super().dispatch_preprocess(hidden_states, routing_map, probs)
        most = torch.tensor(len(tokens), device=tokens.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.tp_ep_group)
        below = (0, 0, 0, int(most) - len(tokens))
        self.routing_map = pad(self.routing_map, below)
        return pad(tokens, below), pad(weights, below)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Outputs (most, H) without padding -> (..., H)."""
        own = hidden_states[: self.hidden_shape.numel() // self.hidden_shape[-1]]
        shaped: Tensor = super().combine_postprocess(own)
        return shaped


class RoutedMixture(MoELayer):  # type: ignore[misc]  # Megatron-core has no types
    """A layer's experts and their router, which keeps its rows when backward recomputes it."""

    moe_layer_recompute: bool

    def __init__(self, config: TransformerConfig, layer_number: int | None = None) -> None:
        """Takes the arguments with which Megatron-core makes a mixture of experts."""
        submodules = MoESubmodules(experts=ModuleSpec(module=GroupedExperts), router=WatchedRouter)
        super().__init__(config, submodules, layer_number)
        self.rows: RowsOfTokens | None = None
        self._is_recomputed = self.moe_layer_recompute
        self.moe_layer_recompute = False  # recomputed here, because Megatron-core would lose the rows

    def forward(self, hidden_states: Tensor, **options: object) -> tuple[Tensor, None]:
        """Outputs of the experts: (S, B, H) -> (S, B, H), and None for the bias."""
        rows, mix = self.rows, super().forward

        def computed(hidden: Tensor) -> tuple[Tensor, None]:
            self.router.rows = rows
            mixed: tuple[Tensor, None] = mix(hidden, **options)
            return mixed

        if self._is_recomputed:
            recomputed: tuple[Tensor, None] = tensor_parallel.checkpoint(computed, False, hidden_states)
            return recomputed
        return computed(hidden_states)


class RoutedLayer(TransformerLayer):  # type: ignore[misc]  # Megatron-core has no types
    """Megatron-core's layer, extended to pass the rows to its mixture of experts."""

    def forward(
        self, *args: object, packed_seq_params: RowsOfTokens | None = None, **options: object
    ) -> tuple[Tensor, Tensor | None]:
        """Takes the arguments with which Megatron-core calls a layer."""
        self.mlp.rows = packed_seq_params
        mixed: tuple[Tensor, Tensor | None] = super().forward(*args, packed_seq_params=packed_seq_params, **options)
        return mixed


def sparse_layer(config: TransformerConfig, *, head_norms: bool) -> ModuleSpec:
    """Megatron-core's specification of a layer with experts."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=head_norms, normalization="RMSNorm"
    )
    layer.module, layer.submodules.mlp = RoutedLayer, RoutedMixture
    return layer


def let_token_counts_differ(gpt: nn.Module, config: TransformerConfig) -> None:
    """Replace dispatchers that assume equal numbers of tokens on all ranks."""
    if config.moe_token_dispatcher_type != "allgather":
        return
    for layer in gpt.decoder.layers:  # type: ignore[union-attr]  # a list of modules
        if layer.is_moe_layer:
            mixture = layer.mlp
            mixture.token_dispatcher = UnevenAllGather(
                mixture.num_local_experts,
                mixture.local_expert_indices,
                config=config,
                pg_collection=moe_utils.get_default_pg_collection(),
            )


def local_tokens(tokens: RoutedTokens, shape: tuple[int, int], parts: int, part: int) -> RoutedTokens:
    """The tokens that rank `part` of `parts` routes under sequence parallelism. `tokens` are numbered row by row in an
    input of `shape` (B, L), the result column by column as in Megatron-core, padded so that `parts` divides L.
    """
    rows, length = shape
    share = -(-length // parts)
    row, column = tokens.positions // length, tokens.positions % length - part * share
    own = (column >= 0) & (column < share)
    replayed = tokens.replayed
    if replayed is not None:
        columns = replayed.unflatten(0, shape).transpose(0, 1)
        columns = pad(columns, (*(0, 0) * (columns.ndim - 1), 0, share * parts - length), value=-1)
        replayed = columns[part * share : (part + 1) * share].flatten(0, 1)
    return attrs.evolve(tokens, rows=tokens.rows[own], positions=(column * rows + row)[own], replayed=replayed)


def _sum_over_ranks(chosen: Tensor) -> Tensor:
    """The sum over the ranks that compute parts of the same rows."""
    group = parallel_state.get_tensor_and_context_parallel_group()
    if group.size() > 1:
        chosen = chosen.clone()
        dist.all_reduce(chosen, group=group)
    return chosen
