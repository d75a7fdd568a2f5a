"""The part of an engine that runs inside vLLM's workers: it receives weights, and makes the workers draw by the keys of
samples and report the log-probabilities that the learner computes.

vLLM mixes `WorkerExtension` into its worker class (`worker_extension_cls`), so `self` is a worker there; this module is
imported in vLLM's processes. Calls come by name through `collective_rpc`, with only plain data as arguments.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from skyrl.errors import WeightSyncError
from skyrl.inference.sampling import Drawable
from skyrl.inference.vllm.environment import end_with_host
from skyrl.inference.vllm.in_place import ReadBack, in_place_obstacle, load_in_place, repairable, without_reloading
from skyrl.inference.vllm.keyed_draws import Sampler, draw_by_keys
from skyrl.models.files.naming import stored_names
from skyrl.weight_receiver import vllm_native
from skyrl.weight_receiver.incoming_weights import (
    IncomingWeights,
    VLLMNativeWeights,
    Weights,
    acknowledgement,
    from_plain,
    with_worker_rank,
)

_log = logging.getLogger(__name__)

_GREEDY = 1e-5
"""Temperature below which vLLM samples greedily."""

end_with_host()


class WorkerExtension:
    """Methods that are added to vLLM's workers, for weights and for sampling. Their names begin with `skyrl`, to avoid
    clashes.
    """

    model_config: Any
    vllm_config: Any
    model_runner: Any
    parallel_config: Any
    rank: int
    reload_weights: Any

    def skyrl_patch_sampler(self, count: int | None = None, holes: Sequence[int] = ()) -> None:
        """Makes the worker draw by the keys of samples, only tokens that the tokenizer knows, and report
        log-probabilities of the tempered distribution, before top-k, top-p and min-p.

        `count` and `holes` are those of `Drawable`; without them, the tokenizer is loaded here.
        """
        sampler = self.model_runner.sampler
        if not hasattr(sampler, "topk_topp_sampler"):
            raise RuntimeError("skyrl needs vLLM's first model runner: leave VLLM_USE_V2_MODEL_RUNNER unset")
        if not getattr(sampler, "skyrl_prepared", False):  # every run that uses a server prepares it
            config, trusted = self.model_config, bool(self.model_config.trust_remote_code)
            drawable = (
                drawable_of(config.tokenizer, revision=config.tokenizer_revision, trusted=trusted)
                if count is None
                else Drawable(count, tuple(holes))
            )
            report_tempered_logprobs(sampler, drawable)
            gather_without_ranks(sampler)
            draw_by_keys(sampler, self.model_runner)
            accept_text_model_names(self.model_runner.get_model())
            sampler.skyrl_prepared = True

    def skyrl_update_group(self) -> str:
        """Class name of the transfer engine through which others send weights to this worker; empty without one."""
        return vllm_native.group_holder(self)

    def skyrl_load_weights(self, incoming: Mapping[str, Any] | IncomingWeights, tied: Mapping[str, str]) -> str:
        """Replaces all weights by those that arrive. Returns their acknowledgement, or why that stopped halfway.
        The next complete load then replaces all weights.

        `incoming` is plain data, or the set itself if it comes from this process. `tied` maps the second name of each
        tied weight to its first.
        """
        received = from_plain(incoming) if isinstance(incoming, Mapping) else incoming
        worker_index = self.parallel_config.data_parallel_index * self.parallel_config.world_size + self.rank
        reason = in_place_obstacle(self)
        if reason and not getattr(self, "skyrl_logged_reason", False):
            self.skyrl_logged_reason = True
            _log.info("vLLM rebuilds its layers for new weights: %s", reason)
        in_place = not reason
        must_copy = isinstance(received, VLLMNativeWeights) and not in_place
        needs_read_back = in_place and not getattr(self, "skyrl_read_back", False)
        read_back = ReadBack(self.model_runner.get_model()) if needs_read_back else None

        def named(weights: Weights) -> Weights:
            all_names = under_all_names(weights, tied, copied=must_copy)
            expanded = stored_names(all_names, self.model_config.hf_text_config.model_type)  # as in files of the model
            return read_back.record(expanded) if read_back else expanded

        try:
            with repairable(self), read_back or nullcontext():
                if isinstance(received, VLLMNativeWeights):
                    with without_reloading() if in_place else nullcontext():
                        vllm_native.receive(self, worker_index, received, named)
                else:
                    with with_worker_rank(received, worker_index).open() as weights:
                        if in_place:
                            load_in_place(self, named(weights))
                        else:
                            self.reload_weights(weights_iterator=named(weights))
            if read_back:
                read_back.compare(may_go_nowhere=tied)
                self.skyrl_read_back = True
        except WeightSyncError as error:
            return str(error)
        self._skyrl_renew_packed()
        return acknowledgement(received)

    def _skyrl_renew_packed(self) -> None:
        """Rebuilds the packed copy of the embedding with which a tied head computes on a CPU, and the packed weights
        with which experts do: reloading does neither.
        """
        for module in self.model_runner.get_model().modules():
            if any(base.__name__ == "ParallelLMHead" for base in type(module).__mro__):
                module.quant_method.process_weights_after_loading(module)
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None and next(module.parameters()).device.type == "cpu":
                kernel.fused_experts.process_weights_after_loading(module)


def accept_text_model_names(model: torch.nn.Module) -> None:
    """Makes a multimodal model of vLLM accept weights and adapters of its language model under their own names.

    A multimodal checkpoint has them below `model.language_model.`; a learner, which is the language model alone, below
    `model.`.
    """
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    if inside := getattr(mapper, "orig_to_new_prefix", {}).get("model.language_model."):
        model.hf_to_vllm_mapper = mapper | type(mapper)(orig_to_new_prefix={"model.": inside})  # the longer one first


def under_all_names(weights: Weights, tied: Mapping[str, str], *, copied: bool) -> Weights:
    """Each weight with its whole shape, a tied one under its second names too: vLLM would not update a head that is not
    among them.

    Tensors are `copied` where vLLM keeps those of a layer until all of them have arrived, in memory that its transfer
    uses again.
    """
    names: dict[str, list[str]] = {}
    for second, first in tied.items():
        names.setdefault(first, [first]).append(second)
    first_of = {name: first for first, group in names.items() for name in group}
    for name, tensor in weights:
        kept = tensor.clone() if copied else tensor
        for item in names.get(first_of.get(name, name), [name]):
            yield item, kept


def drawable_of(tokenizer: str, *, revision: str | None, trusted: bool) -> Drawable | None:
    """The tokens of the tokenizer with this name; None, with a warning, if it cannot be loaded here."""
    try:
        return Drawable.of(AutoTokenizer.from_pretrained(tokenizer, revision=revision, trust_remote_code=trusted))
    except Exception as error:  # noqa: BLE001 - it may be a tokenizer of vLLM alone, of which nothing is known
        _log.warning("rows of the vocabulary without a token may be drawn: the tokenizer %s: %s", tokenizer, error)
        return None


def report_tempered_logprobs(sampler: Sampler, drawable: Drawable | None = None) -> None:
    """Makes a vLLM sampler return log softmax(logits / temperature), with penalties, before top-p, top-k and min-p, and
    draw only from the tokens that are `drawable` (None: from all).

    vLLM itself offers only logits before the temperature or after the cut. Greedy rows are reported at temperature 1.
    """
    draw = sampler.sample

    def sample(logits: Tensor, metadata: Any, logprobs_mode_override: str | None = None) -> tuple[Tensor, Any]:
        needs_logprobs = metadata.max_num_logprobs is not None
        # before `draw`, which overwrites logits
        scores = tempered_logprobs(logits, metadata.temperature) if needs_logprobs else None
        if drawable is not None:
            drawable.leave(logits)
        tokens, processed = draw(logits, metadata, logprobs_mode_override)
        return tokens, processed if scores is None else scores

    sampler.sample = sample


def gather_without_ranks(sampler: Sampler) -> None:
    """Makes a vLLM sampler that is asked for log-probabilities of the drawn tokens alone not count how many tokens are
    likelier: nothing reads these ranks, and vLLM compiles a function for them at its start.

    Asked for more, which the tokens of a prompt are, it normalizes what it is given: of a prompt, vLLM passes logits in
    the mode of `arguments.py`. Log-probabilities of drawn tokens stay what they are, because they are normalized.
    """
    gather = sampler.gather_logprobs
    kind = importlib.import_module("vllm.v1.outputs").LogprobsTensors

    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> tuple[Tensor, ...]:
        if num_logprobs:
            gathered: tuple[Tensor, ...] = gather(logprobs.log_softmax(-1), num_logprobs, token_ids)
            return gathered
        drawn = token_ids.unsqueeze(-1)
        tensors: tuple[Tensor, ...] = kind(drawn.int(), logprobs.gather(-1, drawn), torch.zeros_like(token_ids))
        return tensors

    sampler.gather_logprobs = gather_logprobs


def tempered_logprobs(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """log softmax(logits / temperature): (R, V), (R,) or None if all rows are greedy -> (R, V), float32, in nats."""
    if temperature is None:
        return logits.log_softmax(-1, dtype=torch.float32)
    divisor = torch.where(temperature < _GREEDY, 1.0, temperature)
    return (logits.float() / divisor.unsqueeze(1)).log_softmax(-1)
