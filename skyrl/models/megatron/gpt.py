"""A transformers decoder rebuilt from Megatron-core's modules, with the call signature of the transformers model.

Importing this module requires Megatron-core; `skyrl.learners.megatron.package` reports an error if it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear, pad, silu
from transformers import PretrainedConfig
from transformers.modeling_outputs import TokenClassifierOutput

from skyrl.errors import ModelError
from skyrl.models.attention.segment_attention import Segments, sees_whole_rows
from skyrl.models.attention.shared_rows import RowSharing
from skyrl.models.megatron.layout import DecoderSizes, Mixture
from skyrl.models.megatron.modules import MegatronNorm, RowAttention, RowsOfTokens
from skyrl.models.megatron.routers import LoadWatch, WatchedRouter, let_token_counts_differ, local_tokens, sparse_layer
from skyrl.models.output_head import PlainHead
from skyrl.models.routers import RoutedTokens, refuse_other_layers


def transformer_config(
    config: PretrainedConfig,
    sizes: DecoderSizes,
    dtype: torch.dtype,
    overrides: Mapping[str, Any],
    experts: Mapping[str, object],
    *,
    field: str,
) -> TransformerConfig:
    """Megatron-core's settings for the decoder of a transformers configuration, computing in `dtype` on the current
    groups of ranks. `overrides` are further fields, some of them set by the user at the path `field`; `experts` are the
    fields for a model with experts.

    Raises `ModelError` for a model with parts that have no converter, for overrides of fields that follow from the
    model, and for settings that Megatron-core refuses.
    """
    _refuse_what_is_not_converted(config)
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    derived: dict[str, Any] = {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "ffn_hidden_size": sizes.intermediate,
        "num_attention_heads": sizes.heads,
        "num_query_groups": sizes.groups,
        "kv_channels": sizes.head_size,
        "layernorm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "qk_layernorm": sizes.head_norms,
        "add_qkv_bias": sizes.attention_bias,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "perform_initialization": False,
        "use_cpu_initialization": True,
    }
    if mixture := sizes.mixture:
        derived |= {**_mixture(config, sizes, mixture), **experts}
    _refuse_overrides(overrides, derived, field)
    if mixture and tensor > 1 and not overrides.get("sequence_parallel", True):
        raise ModelError(f"{field}.sequence_parallel: Megatron-core requires it for experts with tensor parallelism")
    balanced = str(experts["moe_router_load_balancing_type"]).endswith("aux_loss") and mixture
    unless_said = {"moe_aux_loss_coeff": config.router_aux_loss_coef} if balanced else {}
    try:
        megatron = TransformerConfig(**derived, **{**unless_said, **overrides})
    except (ValueError, AssertionError) as error:
        raise ModelError(f"{field.rpartition('.')[0]}: Megatron-core does not take it: {error}") from error
    # Megatron-core refuses this with its all-gather dispatcher, which is replaced by one that supports it
    megatron.variable_seq_lengths = pipeline > 1
    return megatron


def _mixture(config: PretrainedConfig, sizes: DecoderSizes, mixture: Mixture) -> dict[str, object]:
    return {
        "num_moe_experts": mixture.experts,
        "moe_ffn_hidden_size": mixture.inner,
        "moe_layer_freq": [int(layer in mixture.layers) for layer in range(sizes.layers)],
        "moe_router_topk": mixture.per_token,
        "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),  # if weights do not sum to 1
        "moe_enable_routing_replay": False,  # Megatron-core's replay; ours can replay some of the tokens
    }


def _refuse_what_is_not_converted(config: PretrainedConfig) -> None:
    """Raises `ModelError` for models that Megatron-core would compute differently."""
    if not sees_whole_rows(config):
        raise ModelError("strategy = megatron needs layers that see the whole sequence, without windows or chunks")
    biased = config.model_type != "qwen2" and getattr(config, "attention_bias", False)
    if biased or getattr(config, "mlp_bias", False):
        raise ModelError("strategy = megatron has no converter for a model with biases on its output projections")
    if config.hidden_act != "silu":
        raise ModelError(
            f"strategy = megatron has no converter for the activation {config.hidden_act!r}, only for silu"
        )


def _refuse_overrides(overrides: Mapping[str, Any], derived: Mapping[str, Any], field: str) -> None:
    known = {attribute.name for attribute in fields(TransformerConfig)}
    for name in overrides:
        if name in derived:
            raise ModelError(f"{field}.{name} follows from the model and the rest of its table: leave it out")
        if name not in known:
            raise ModelError(f"{field}.{name}: Megatron-core's TransformerConfig has no such field")


class VocabularyHead(PlainHead):
    """The output matrix, whose rows are divided over the ranks of a one-dimensional mesh."""

    def __init__(self, matrix: nn.Parameter, vocabulary: int, mesh: DeviceMesh | None) -> None:
        """`matrix` holds this rank's rows, with padding rows last; `mesh` is None if it holds all rows."""
        super().__init__()
        self._matrix = [matrix]  # in a list: it is a parameter of another module
        self._vocabulary, self._mesh = vocabulary, mesh

    @property
    def parameter(self) -> nn.Parameter:
        """This rank's rows, including padding."""
        return self._matrix[0]

    @property
    def matrix(self) -> Tensor:
        """(vocabulary, H) without padding, distributed if several ranks divide it."""
        [matrix] = self._matrix
        if self._mesh is None:
            return matrix[: self._vocabulary]
        first = self._mesh.get_local_rank() * len(matrix)
        own = matrix[: max(min(self._vocabulary - first, len(matrix)), 0)]
        shape = torch.Size((self._vocabulary, matrix.shape[1]))
        return DTensor.from_local(
            own, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=(matrix.shape[1], 1)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., H), the same on every rank -> logits of the whole vocabulary (..., vocabulary) on every rank."""
        [matrix] = self._matrix
        if self._mesh is None:
            return linear(hidden, self.matrix)
        own = linear(tensor_parallel.copy_to_tensor_model_parallel_region(hidden), matrix)
        logits: Tensor = tensor_parallel.gather_from_tensor_model_parallel_region(own)
        return logits[..., : self._vocabulary]


class MegatronDecoder(nn.Module):
    """One pipeline stage on one tensor-parallel rank. The last stage returns logits, the others return hidden states
    for the next stage.
    """

    relays = False
    """Whether every call runs all stages and every stage gets the logits, for callers that do not know of pipelines."""

    routed: RoutedTokens | None = None
    """Tokens of the next call that this rank's routers see (`own_tokens`). None: routers are neither measured nor
    replayed."""

    row_weights: Tensor | None = None
    """(B,): share of each row of the next call in the loss. None: the call is not for training."""

    before_head: Callable[[], None] | None = None
    """Called before the output matrix is read, because no module of Megatron-core reads it."""

    def __init__(
        self,
        meta_model: Any,
        sizes: DecoderSizes,
        megatron: TransformerConfig,
        device: torch.device,
        *,
        is_critic: bool,
    ) -> None:
        """`meta_model` is the transformers model, or the model with a value head, on the meta device. The weights of
        this module are uninitialized.
        """
        super().__init__()
        self.config = meta_model.config
        self._megatron, self._sizes, self._device = megatron, sizes, device
        self._tensor = megatron.tensor_model_parallel_size
        self.gpt = self._build(is_critic).to(device)
        self._width = 1 if is_critic else sizes.vocabulary
        rotary = meta_model.model.rotary_emb
        self._rotary = type(rotary)(config=self.config).to(device)
        self._head: nn.Module | None = None
        if self.is_last and is_critic:
            self._head = self.gpt.value_head
        elif self.is_last:
            tied = sizes.tied
            matrix = self.gpt.shared_embedding_or_output_weight() if tied else self.gpt.output_layer.weight
            group = parallel_state.get_tensor_model_parallel_group()
            mesh = DeviceMesh.from_group(group, device.type) if self._tensor > 1 else None
            self._head = VocabularyHead(matrix, sizes.vocabulary, mesh)
        padding: int | None = meta_model.model.embed_tokens.padding_idx
        if self.is_first and padding is not None:
            keep = partial(self._keep_embedding_of, padding)
            self.gpt.embedding.register_forward_hook(keep, with_kwargs=True)

    @property
    def is_first(self) -> bool:
        """Whether this stage has the embeddings."""
        return bool(self.gpt.pre_process)

    @property
    def is_last(self) -> bool:
        """Whether this stage has the output head."""
        return bool(self.gpt.post_process)

    @property
    def head_parameter(self) -> nn.Parameter:
        """This rank's part of the output matrix, or the critic's head; only on the last stage."""
        head: Any = self._head
        parameter: nn.Parameter = head.parameter if isinstance(head, VocabularyHead) else head.weight
        return parameter

    def get_input_embeddings(self) -> nn.Module:
        """Embeddings on the meta device, from which callers read the size of the vocabulary."""
        with torch.device("meta"):
            return nn.Embedding(self._sizes.vocabulary, self._sizes.hidden)

    def get_output_embeddings(self) -> nn.Module | None:
        """The output head on the last stage of a policy, else None."""
        return self._head if isinstance(self._head, VocabularyHead) else None

    def named_parameters_of_all(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this stage under Megatron's names, with layers counted over all stages."""
        return ((self._name_among_all(name), parameter) for name, parameter in self.gpt.named_parameters())

    def expert_biases(self) -> dict[str, Tensor]:
        """Biases (experts,) float32 that routers add to the scores of experts before choosing, under Megatron's names
        for the layers of this stage; empty for a model without them.
        """
        named = ((name, buffer) for name, buffer in self.gpt.named_buffers() if name.endswith(".expert_bias"))
        return {self._name_among_all(name): buffer for name, buffer in named}

    @torch.no_grad()
    def move_expert_biases(self) -> None:
        """Move each expert's bias by its load, over all ranks, in the passes since the last step. Collective."""
        routers = self._biased_routers()
        if routers:
            loads, biases = (
                torch.stack([getattr(router, name) for router in routers])
                for name in ("local_tokens_per_expert", "expert_bias")
            )
            moved = get_updated_expert_bias(loads, biases, self._megatron.moe_router_bias_update_rate)
            for router, bias in zip(routers, moved, strict=True):
                router.expert_bias.copy_(bias)

    def forget_expert_loads(self) -> None:
        """Count the loads of experts from zero."""
        for router in self._biased_routers():
            router.local_tokens_per_expert.zero_()

    def _biased_routers(self) -> list[Any]:
        return [module for module in self.gpt.modules() if getattr(module, "expert_bias", None) is not None]

    def watch_routers(self, watch: LoadWatch) -> None:
        """Report the loads of this stage's routers in training to `watch` from now on."""
        for module in self.gpt.modules():
            if isinstance(module, WatchedRouter):
                module.watch = watch

    def local_tokens(self, tokens: RoutedTokens, shape: tuple[int, int]) -> RoutedTokens:
        """The tokens of an input of `shape` (B, L) that the routers of this rank see. Raises `ModelError` if replayed
        choices have another number of layers.
        """
        refuse_other_layers(tokens, 0 if self._sizes.mixture is None else len(self._sizes.mixture.layers))
        parts = self._tensor if self._megatron.sequence_parallel else 1
        part = parallel_state.get_tensor_model_parallel_rank() if parts > 1 else 0
        return local_tokens(tokens, shape, parts, part)

    def _keep_embedding_of(
        self, padding: int, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, Tensor], embedded: Tensor
    ) -> None:
        """Give the embedding of the padding token no gradient, as torch's embeddings do. `embedded` (T, B, H), where T
        is a share of the tokens under sequence parallelism.
        """
        is_padding = kwargs["input_ids"].eq(padding).T.unsqueeze(-1)
        if self._megatron.sequence_parallel:
            is_padding = is_padding.chunk(self._tensor)[parallel_state.get_tensor_model_parallel_rank()]
        if embedded.requires_grad:
            embedded.register_hook(lambda gradient: gradient.masked_fill(is_padding, 0))

    def _name_among_all(self, name: str) -> str:
        """Megatron's name of a part of this stage, with layers counted over all stages."""
        head, layers, rest = name.partition("decoder.layers.")
        if not layers:
            return name
        number, _, rest = rest.partition(".")
        return f"{head}{layers}{int(number) + self.gpt.decoder.layers[0].layer_number - 1}.{rest}"

    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        logits_to_keep: Tensor | None = None,
        segments: Segments | None = None,
        row_sharing: RowSharing | None = None,
        use_cache: bool = False,
    ) -> TokenClassifierOutput:
        """`.logits` (B, N, V) at the N kept columns, by default all of them. On stages before the last, `.logits` are
        hidden states (T, B, H), where T is a share of the tokens under sequence parallelism.
        """
        assert not use_cache, "a learner keeps no cache"
        tokens = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(tokens, device=input_ids.device).unsqueeze(0)
        padding = -tokens % self._tensor if self._megatron.sequence_parallel else 0
        rows = RowsOfTokens(
            tokens=tokens,
            rotation=self._rotary(torch.empty(0, device=input_ids.device), position_ids),
            segments=segments,
            row_sharing=row_sharing,
            routed=self.routed,
            row_weights=self.row_weights,
        )
        if self.relays:
            self._receive(input_ids.shape[0], tokens + padding)
        hidden = self.gpt(
            input_ids=pad(input_ids, (0, padding)),
            position_ids=None,
            attention_mask=None,
            packed_seq_params=rows,
        )
        answer: Any = self._logits(hidden, tokens, logits_to_keep) if self.is_last else hidden
        if self.relays:
            kept = tokens if logits_to_keep is None else len(logits_to_keep)
            answer = self._pass_on(answer, (input_ids.shape[0], kept, self._width))
        return TokenClassifierOutput(logits=answer)

    def _logits(self, hidden: Tensor, tokens: int, kept: Tensor | None) -> Tensor:
        if self._megatron.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        hidden = hidden.transpose(0, 1)
        if self.before_head is not None:
            self.before_head()
        assert self._head is not None
        logits: Tensor = self._head(hidden[:, :tokens] if kept is None else hidden[:, kept])
        return logits

    def _build(self, is_critic: bool) -> GPTModel:
        layers = get_num_layers_to_build(self._megatron)
        first = get_transformer_layer_offset(self._megatron)
        specs = [self._layer(number) for number in range(first, first + layers)]
        stage = parallel_state.get_pipeline_model_parallel_rank()
        is_last = stage == self._megatron.pipeline_model_parallel_size - 1
        try:
            gpt = GPTModel(
                self._megatron,
                TransformerBlockSubmodules(layer_specs=specs, layer_norm=MegatronNorm),
                vocab_size=self._sizes.padded_vocabulary(self._tensor),
                max_sequence_length=getattr(self.config, "max_position_embeddings", 0) or 0,
                pre_process=stage == 0,
                post_process=is_last,
                share_embeddings_and_output_weights=self._sizes.tied and not is_critic,
                position_embedding_type="none",
            )
        except ImportError as error:  # a package for the flexible dispatcher is missing
            raise ModelError(f"megatron_config.moe_token_dispatcher_type: {error}") from error
        gpt._postprocess = lambda hidden_states, **_: hidden_states
        let_token_counts_differ(gpt, self._megatron)
        if is_last and is_critic:
            del gpt.output_layer
            gpt.value_head = nn.Linear(self._sizes.hidden, 1, bias=False, dtype=self._megatron.params_dtype)
        return gpt

    def _layer(self, number: int) -> ModuleSpec:
        """Megatron-core's specification of a layer with our modules; `number` counts from 0 over all stages."""
        mixture, norms = self._sizes.mixture, self._sizes.head_norms
        if mixture is not None and number in mixture.layers:
            layer = sparse_layer(self._megatron, head_norms=norms)
        else:
            layer = get_gpt_layer_local_spec(qk_layernorm=norms, normalization="RMSNorm")
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = MegatronNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = RowAttention
        if norms:
            attention.q_layernorm = attention.k_layernorm = MegatronNorm
        return layer

    def _receive(self, rows: int, tokens: int) -> None:
        """Receive the hidden states of the previous stage."""
        if self.is_first:
            return
        share = self._tensor if self._megatron.sequence_parallel else 1
        shape = (tokens // share, rows, self._sizes.hidden)
        hidden = torch.empty(shape, dtype=self._megatron.params_dtype, device=self._device)
        dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        self.gpt.set_input_tensor(hidden)

    def _pass_on(self, answer: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Send hidden states to the next stage, and the logits of the last stage to all stages."""
        if not self.is_last:
            dist.send(answer.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
            answer = torch.empty(shape, dtype=self._megatron.params_dtype, device=self._device)
        answer = answer.contiguous()
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(answer, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        return answer
