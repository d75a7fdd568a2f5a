"""Runs that learn from preferences without a reward model: DPO and its kin (`kind = "preference"`)."""

from collections.abc import Mapping
from typing import Literal

import attrs

from skyrl.config.settings.learners import OptimizerConfig
from skyrl.config.settings.supervised_root import SupervisedConfig
from skyrl.tree import FREE, IDENTITY, field, frozen
from skyrl.tree.validators import fraction, fraction_below_one, non_negative, positive, rule_of_one_field

PreferenceLossName = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sigmoid_norm",
    "simpo",
    "orpo",
    "sft",
]
"""Losses of pairs, under TRL's names."""


@attrs.frozen(kw_only=True)
class PreferenceLossFacts:
    """What a loss reads."""

    fields: tuple[str, ...] = ("beta",)
    """Fields of `PreferenceConfig`."""

    reference: bool = True
    """Whether it compares the policy with a reference."""

    divergence: bool = False
    """Whether it is defined for every f-divergence."""

    whole_batch: bool = False
    """Whether the loss of a pair depends on the other pairs of the batch, so that the policy scores it first."""

    averages: bool = False
    """Whether the reward of an answer is a mean over its tokens, and not their sum."""


_SMOOTHED = ("beta", "label_smoothing")

PREFERENCE_LOSSES: Mapping[str, PreferenceLossFacts] = {
    "sigmoid": PreferenceLossFacts(fields=_SMOOTHED, divergence=True),
    "hinge": PreferenceLossFacts(divergence=True),
    "ipo": PreferenceLossFacts(divergence=True),
    "robust": PreferenceLossFacts(fields=_SMOOTHED, divergence=True),
    "exo_pair": PreferenceLossFacts(fields=_SMOOTHED, divergence=True),
    "nca_pair": PreferenceLossFacts(),
    "bco_pair": PreferenceLossFacts(),
    "sppo_hard": PreferenceLossFacts(),
    "aot": PreferenceLossFacts(fields=_SMOOTHED, whole_batch=True),
    "aot_unpaired": PreferenceLossFacts(fields=_SMOOTHED, whole_batch=True),
    "apo_zero": PreferenceLossFacts(),
    "apo_down": PreferenceLossFacts(),
    "discopop": PreferenceLossFacts(fields=("beta", "discopop_tau"), divergence=True),
    "sigmoid_norm": PreferenceLossFacts(divergence=True),
    "simpo": PreferenceLossFacts(fields=(*_SMOOTHED, "simpo_gamma"), reference=False, averages=True),
    "orpo": PreferenceLossFacts(reference=False, averages=True),
    "sft": PreferenceLossFacts(fields=(), reference=False),
}
"""Name -> what the loss reads."""

_losses = rule_of_one_field(lambda value: bool(value) and len(set(value)) == len(value), "distinct names")
_weights = rule_of_one_field(lambda value: all(weight > 0 for weight in value), "positive numbers")


@frozen
class PreferenceConfig(SupervisedConfig):
    """Preferences without a reward model (`kind = "preference"`): DPO and its kin, on pairs of a better and a worse
    answer.
    """

    rows_of_an_item = 2

    kind: Literal["preference"] = field(default="preference", metadata=IDENTITY)
    """Kind of run, which decides the tree that a file is read into."""

    optimizer_config: OptimizerConfig = OptimizerConfig(lr=1e-6)
    """How the weights are updated. One batch is one optimizer step."""

    loss_type: tuple[PreferenceLossName, ...] = field(default=("sigmoid",), validator=_losses)
    """Losses of a pair, added up: sigmoid is DPO, with `sft` the negative log-likelihood of the chosen answer; CPO is
    sigmoid and sft with `reference_free`, MPO is sigmoid, bco_pair and sft, ORPO is orpo and sft. See
    docs/preferences.md."""

    loss_weights: tuple[float, ...] | None = field(default=None, validator=_weights)
    """Weight of each of `loss_type`. None: 1 each."""

    beta: float = field(default=0.1, validator=positive)
    """Strength of the tie to the reference: the reward of an answer is `beta` times its log-ratio, so that a larger
    `beta` moves the policy less. For ipo it is the paper's tau; for orpo, the weight of the odds ratio (lambda)."""

    label_smoothing: float = field(default=0.0, validator=fraction_below_one)
    """Share of pairs that are assumed to be labelled the wrong way round, below 0.5: the conservative loss for sigmoid,
    simpo, aot and aot_unpaired, the unbiased one for robust, and the epsilon of exo_pair."""

    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    """Divergence between policy and reference that the loss is derived from (f-DPO, arXiv:2309.16240)."""

    f_alpha_divergence_coef: float = 0.5
    """Alpha of the alpha divergence; 1 is the reverse KL."""

    ld_alpha: float | None = field(default=None, validator=fraction)
    """Weight of the tokens of an answer beyond the length of the shorter one of its pair (LD-DPO, arXiv:2409.06411), so
    that length alone is preferred less. None: 1."""

    discopop_tau: float = field(default=0.05, validator=positive)
    """Temperature at which discopop goes from its exponential to its logistic part."""

    simpo_gamma: float = field(default=0.5, validator=non_negative)
    """Margin by which `beta` times the mean log-probability of the chosen answer should exceed the other's in simpo."""

    reference_free: bool = False
    """Compare with no reference: its log-probabilities count as 0."""

    ref_model_path: str | None = field(default=None, metadata=IDENTITY)
    """Folder or hub name of the reference. None: the weights that training starts from. Where an adapter is trained
    that starts from zero, these are the policy's own without the adapter, and no second model is loaded."""

    precompute_ref_log_probs: bool = False
    """Compute the log-probabilities of the reference once, for all rows, before training, and store them; the reference
    leaves the device then. They are used again by any run with the same reference and rows."""

    ref_log_probs_path: str | None = field(default=None, metadata=FREE)
    """Folder of the stored log-probabilities of references. None: `ref_log_probs` in the run's folder."""

    prompt_key: str = "prompt"
    """Column of the chat, or of the user's text, before both answers. A row without it has whole chats, which begin
    with the same messages."""

    chosen_key: str = "chosen"
    """Column of the better answer, or of the better whole chat."""

    rejected_key: str = "rejected"
    """Column of the worse one."""

    @property
    def facts(self) -> tuple[PreferenceLossFacts, ...]:
        """What each of the losses reads."""
        return tuple(PREFERENCE_LOSSES[name] for name in self.loss_type)

    @property
    def compares(self) -> bool:
        """Whether the policy is compared with a reference."""
        return not self.reference_free and any(loss.reference for loss in self.facts)

    @property
    def reference_is_policy(self) -> bool:
        """Whether the reference is the policy without its adapter."""
        lora = self.model.lora
        return self.ref_model_path is None and lora.rank > 0 and lora.path is None
