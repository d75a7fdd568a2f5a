"""Losses of pairs, their gradients and measurements as TRL 1.16 computes them on random ragged batches, as JSON.

    python -m tests.algorithms.trl_preferences tests/reference/trl_preferences.json 2 0

writes the stored cases: two batches from seed 0. The interpreter needs `trl==1.16.*`; a trainer's own method computes
each loss, from log-probabilities in place of a model's.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import DPOTrainer, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

SETTINGS: tuple[dict[str, Any], ...] = (
    *({"loss_type": [name]} for name in ("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot")),
    *({"loss_type": [name]} for name in ("aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm", "sft")),
    *(
        {"loss_type": [name], "label_smoothing": 0.1, "beta": 0.3}
        for name in ("robust", "exo_pair", "aot", "aot_unpaired")
    ),
    *(
        {"loss_type": [loss], "f_divergence_type": kind}
        for loss in ("sigmoid", "ipo", "hinge")
        for kind in ("forward_kl", "js_divergence", "alpha_divergence")
    ),
    {"loss_type": ["sigmoid"], "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0},
    *({"loss_type": [loss], "ld_alpha": alpha} for loss in ("sigmoid", "aot") for alpha in (0.0, 0.4)),
    {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    *({"loss_type": [loss], "use_weighting": True} for loss in ("sigmoid", "discopop", "apo_zero")),
    {"loss_type": ["sigmoid"], "reference_free": True, "label_smoothing": 0.2},  # CPO's
    {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "reference_free": True},
    {"loss_type": ["simpo"], "beta": 2.0},
    {"loss_type": ["simpo"], "beta": 2.0, "simpo_gamma": 1.0, "label_smoothing": 0.1},
    {"loss_type": ["orpo"]},
)
"""Settings under our names, which are TRL's. Losses without a reference are those of its CPO and ORPO trainers."""

LABELLED: tuple[dict[str, Any], ...] = (
    {"loss_type": "kto"},
    {"loss_type": "kto", "beta": 0.5, "desirable_weight": 1.33, "undesirable_weight": 0.7},
    {"loss_type": "apo_zero_unpaired", "beta": 0.3},
)
"""Settings of losses of single answers."""

DEFAULTS: dict[str, Any] = {
    "beta": 0.1,
    "label_smoothing": 0.0,
    "discopop_tau": 0.05,
    "simpo_gamma": 0.5,
    "f_divergence_type": "reverse_kl",
    "f_alpha_divergence_coef": 0.5,
    "ld_alpha": None,
    "loss_weights": None,
    "reference_free": False,
    "use_weighting": False,
}


class Untouched(torch.nn.Module):
    """A model that a trainer only asks what it is."""

    is_gradient_checkpointing = False


def batch_of(generator: torch.Generator) -> dict[str, Any]:
    """Log-probabilities of pairs of answers of 1 to 6 tokens behind prompts of 1 to 3, chosen answers first."""
    pairs = int(torch.randint(2, 5, (), generator=generator))
    prompts = torch.randint(1, 4, (pairs,), generator=generator).repeat(2)
    answers = torch.randint(1, 7, (2 * pairs,), generator=generator)
    width = int((prompts + answers).max())
    columns = torch.arange(width)
    mask = (columns >= prompts.unsqueeze(1)) & (columns < (prompts + answers).unsqueeze(1))
    logprobs = -torch.rand(mask.shape, generator=generator) * 4 - 0.01
    reference = logprobs + torch.randn(mask.shape, generator=generator)
    return {
        "mask": mask.int().tolist(),
        "squares": rounded(torch.where(mask, logprobs.roll(1, 0) - 0.1, 0.0)),  # log sum p^2, for WPO
        **{
            name: rounded(torch.where(mask, tensor, 0.0))
            for name, tensor in (("logprobs", logprobs), ("ref", reference))
        },
    }


def rounded(values: Tensor) -> Any:
    """As numbers that JSON keeps short."""
    return json.loads(json.dumps(values.tolist()), parse_float=lambda text: float(f"{float(text):.7g}"))


def by_trl(batch: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Loss, gradient of each token, and measurements."""
    settings = SimpleNamespace(**{**DEFAULTS, **changes})
    mask = torch.tensor(batch["mask"])
    logprobs = torch.tensor(batch["logprobs"], requires_grad=True)
    by_cpo = settings.reference_free or settings.loss_type[0] in ("simpo", "orpo")
    loss, measured = (_without_reference if by_cpo else _with_reference)(settings, mask, logprobs, batch)
    loss.backward()
    assert logprobs.grad is not None
    return {"loss": loss.item(), "gradient": rounded(logprobs.grad * mask), **measured}


def _with_reference(settings: Any, mask: Tensor, logprobs: Tensor, batch: Any) -> tuple[Tensor, dict[str, float]]:
    def gathered(values: Tensor) -> Tensor:
        return values

    width, metrics = mask.shape[1], defaultdict[str, Any](list)
    reference = torch.tensor(batch["ref"])
    nothing = torch.zeros(len(mask), width - 1)
    predicted = SimpleNamespace(
        log_probs=logprobs[:, 1:],
        entropy=nothing,
        mean_logits=nothing,
        is_top1=nothing.bool(),
        log_sum_sq_probs=torch.tensor(batch["squares"])[:, 1:],
    )
    output = SimpleNamespace(log_probs=reference[:, 1:])
    trainer = SimpleNamespace(
        model=Untouched(),
        ref_model=lambda **_: output,
        accelerator=SimpleNamespace(device="cpu", gather=gathered, gather_for_metrics=gathered),
        args=SimpleNamespace(discopop_tau=settings.discopop_tau, gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        use_weighting=settings.use_weighting,
        precompute_ref_logps=False,
        loss_types=settings.loss_type,
        loss_weights=settings.loss_weights or [1.0] * len(settings.loss_type),
        ld_alpha=settings.ld_alpha,
        beta=settings.beta,
        label_smoothing=settings.label_smoothing,
        f_divergence_type=settings.f_divergence_type,
        f_alpha_divergence_coef=settings.f_alpha_divergence_coef,
        _metrics={"train": metrics},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"input_ids": mask, "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    loss = DPOTrainer._compute_loss(trainer, lambda **_: predicted, inputs, False)
    ours = {"chosen_reward": "rewards/chosen", "rejected_reward": "rewards/rejected", "margin": "rewards/margins"}
    ours |= {"accuracy": "rewards/accuracies", "chosen_logprob": "logps/chosen", "rejected_logprob": "logps/rejected"}
    return loss, {name: metrics[trl_name][0] for name, trl_name in ours.items()}


def _without_reference(settings: Any, mask: Tensor, logprobs: Tensor, _: Any) -> tuple[Tensor, dict[str, float]]:
    answers = (logprobs * mask).sum(1)
    averages = settings.loss_type[0] in ("simpo", "orpo")
    chosen, rejected = (answers / mask.sum(1) if averages else answers).chunk(2)
    trainer = SimpleNamespace(
        alpha=0.0,
        loss_type=settings.loss_type[0],
        beta=settings.beta,
        label_smoothing=settings.label_smoothing,
        simpo_gamma=settings.simpo_gamma,
        accelerator=SimpleNamespace(device="cpu"),
    )
    if settings.loss_type == ["orpo"]:
        losses, better, worse, *_ = ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)
        losses = -losses
    else:
        losses, better, worse = CPOTrainer.cpo_loss(trainer, chosen, rejected)
    loss = losses.mean()
    if "sft" in settings.loss_type:
        half = len(mask) // 2
        loss = loss + settings.loss_weights[1] * -logprobs[:half][mask[:half].bool()].mean()
    rewards = {"chosen_reward": better.mean().item(), "rejected_reward": worse.mean().item()}
    return loss, {**rewards, "accuracy": (better > worse).float().mean().item()}


def labelled_by_trl(batch: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Loss, gradient of each token, and measurements of KTO, where every other answer is good; the sums of mismatched
    answers are those of the batch, turned by one.
    """

    def gathered(values: Tensor) -> Tensor:
        return values

    settings = SimpleNamespace(**{"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, **changes})
    mask, width = torch.tensor(batch["mask"]), len(batch["mask"][0])
    metrics = defaultdict[str, Any](list)
    logprobs, reference = torch.tensor(batch["logprobs"], requires_grad=True), torch.tensor(batch["ref"])
    nothing = torch.zeros(len(mask), width - 1)
    predicted = SimpleNamespace(log_probs=logprobs[:, 1:], entropy=nothing, mean_logits=nothing)
    output = SimpleNamespace(log_probs=reference[:, 1:])

    def reference_of(**_: Any) -> Any:
        return output

    trainer = SimpleNamespace(
        model=Untouched(),
        ref_model=reference_of,
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=gathered),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        calculate_KL=settings.loss_type == "kto",
        loss_type=settings.loss_type,
        beta=settings.beta,
        desirable_weight=settings.desirable_weight,
        undesirable_weight=settings.undesirable_weight,
        _compute_kl_logps=lambda model, _: (reference if model is reference_of else logprobs).detach().sum(1).roll(1),
        _metrics={"train": metrics},
        _total_train_tokens=0,
        _tp_size=1,
    )
    labels = torch.arange(len(mask)) % 2 == 0
    inputs = {"input_ids": mask, "attention_mask": torch.ones_like(mask), "completion_mask": mask, "label": labels}
    loss = KTOTrainer._compute_loss(trainer, lambda **_: predicted, inputs, False)
    loss.backward()
    assert logprobs.grad is not None
    ours = {"chosen_reward": "rewards/chosen", "rejected_reward": "rewards/rejected", "margin": "rewards/margins"}
    ours |= {"baseline": "kl", "chosen_logprob": "logps/chosen", "rejected_logprob": "logps/rejected"}
    measured = {name: metrics[trl_name][0] for name, trl_name in ours.items()}
    return {"loss": loss.item(), "gradient": rounded(logprobs.grad * mask), **measured}


def main(file: str, count: int, seed: int) -> None:
    """Write the cases of some batches."""
    generator = torch.Generator().manual_seed(seed)
    batches = [batch_of(generator) for _ in range(count)]
    cases = [{"settings": settings, "results": [by_trl(batch, settings) for batch in batches]} for settings in SETTINGS]
    labelled = [
        {"settings": settings, "results": [labelled_by_trl(batch, settings) for batch in batches]}
        for settings in LABELLED
    ]
    content = {"batches": batches, "cases": cases, "labelled": labelled}
    Path(file).write_text(json.dumps(content) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
