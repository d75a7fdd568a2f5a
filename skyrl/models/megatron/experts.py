"""The experts of a layer under Megatron-core, and changes that let its routers and dispatchers run without Transformer
Engine.

Megatron-core's router chooses the experts and its dispatcher sends the tokens to them; the experts themselves are
implemented here and run wherever torch does. Importing this module requires Megatron-core.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor, nn
from torch.nn.functional import pad

from skyrl.models.parallel.expert_parallel import grouped_product, product_of_each

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # Megatron-core leaves it undefined without Transformer Engine


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
