"""A critic's model: the body of a causal language model with a head that returns one number per token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput


class ValueModel(nn.Module):
    """Behaves like a causal language model with a vocabulary of one, whose only logit is the value.

    The body keeps its names (`model.layers...`). The head `<prefix>.weight` is new, with small weights, so that values
    start near 0 and within the noise of the returns. The language model's own head is not part of it.
    """

    def __init__(self, causal_lm: PreTrainedModel, *, prefix: str, seed: int) -> None:
        """Takes over the body of `causal_lm`. The head is drawn from `seed`, in float32 and on the body's device."""
        super().__init__()
        self.config = causal_lm.config
        self.body_name = causal_lm.base_model_prefix
        self.head_name = prefix
        """Name of the head among its modules."""
        body = getattr(causal_lm, self.body_name)
        device = next(body.parameters()).device
        hidden: int = causal_lm.config.get_text_config().hidden_size
        head = nn.Linear(hidden, 1, bias=False, device=device, dtype=torch.float32)
        if device.type != "meta":
            drawn = torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed)) / (hidden + 1)
            with torch.no_grad():
                head.weight.copy_(drawn)
        self.add_module(self.body_name, body)
        self.add_module(prefix, head)
        self._no_split_modules: Sequence[str] = tuple(causal_lm._no_split_modules or ())

    def forward(
        self, input_ids: Tensor, *, logits_to_keep: Tensor | None = None, **inputs: object
    ) -> TokenClassifierOutput:
        """`.logits` (B, N, 1): the values at the N kept columns, by default all of them. The output type is one of
        transformers', because FSDP2 hooks only tensors in types that it knows.
        """
        hidden = getattr(self, self.body_name)(input_ids=input_ids, **inputs).last_hidden_state
        selected = hidden if logits_to_keep is None else hidden[:, logits_to_keep]
        return TokenClassifierOutput(logits=getattr(self, self.head_name)(selected))

    def get_input_embeddings(self) -> nn.Module:
        """Input embeddings of the body, under transformers' name."""
        embeddings: nn.Module = getattr(self, self.body_name).get_input_embeddings()
        return embeddings

    def gradient_checkpointing_enable(self, **settings: object) -> None:
        """Enable gradient checkpointing of the body, under transformers' name."""
        getattr(self, self.body_name).gradient_checkpointing_enable(**settings)
