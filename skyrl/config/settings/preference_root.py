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
    "kto",
    "apo_zero_unpaired",
]
"""Losses of pairs, and of single answers with labels, under TRL's names."""


@attrs.frozen(kw_only=True)
class PreferenceLossFacts:
    """Facts about a loss: its settings, its rows, and whether it compares with a reference."""

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

    unpaired: bool = False
    """Whether a row is one answer with a label, and not a pair."""


_SMOOTHED = ("beta", "label_smoothing")
_WEIGHTS = ("desirable_weight", "undesirable_weight")

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
    "kto": PreferenceLossFacts(fields=("beta", *_WEIGHTS), unpaired=True),
    "apo_zero_unpaired": PreferenceLossFacts(fields=("beta", *_WEIGHTS), unpaired=True),
}
"""Name -> what the loss reads."""

_losses = rule_of_one_field(lambda value: bool(value) and len(set(value)) == len(value), "distinct names")
_weights = rule_of_one_field(lambda value: all(weight > 0 for weight in value), "positive numbers")


@frozen
class PreferenceConfig(SupervisedConfig):
    """Preferences without a reward model (`kind = "preference"`): DPO and its kin, on pairs of a better and a worse
    answer; KTO, on single answers with labels.
    """

    kind: Literal["preference"] = field(default="preference", metadata=IDENTITY)
    """Kind of run, which decides the tree that a file is read into."""

    optimizer_config: OptimizerConfig = OptimizerConfig(lr=1e-6)
    """How the weights are updated. One batch is one optimizer step."""

    loss_type: tuple[PreferenceLossName, ...] = field(default=("sigmoid",), validator=_losses)
    """Losses of a pair, added up: sigmoid is DPO, with `sft` the negative log-likelihood of the chosen answer; CPO is
    sigmoid and sft with `reference_free`, MPO is sigmoid, bco_pair and sft, ORPO is orpo and sft. kto
    and apo_zero_unpaired stand alone: their rows are single answers with labels. See docs/preferences.md."""

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

    desirable_weight: float = field(default=1.0, validator=positive)
    """Weight of answers labelled as good. KTO recommends that this times their number is 1 to 1.33 times the same
    product of the others."""

    undesirable_weight: float = field(default=1.0, validator=positive)
    """Weight of answers labelled as bad."""

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

    completion_key: str = "completion"
    """Column of the single answer of kto and apo_zero_unpaired, or of the whole chat that ends with it."""

    label_key: str = "label"
    """Column that says whether this answer is good: true or false."""

    @property
    def facts(self) -> tuple[PreferenceLossFacts, ...]:
        """Facts about each of the losses."""
        return tuple(PREFERENCE_LOSSES[name] for name in self.loss_type)

    @property
    def unpaired(self) -> bool:
        """Whether a row is one answer with a label."""
        return any(loss.unpaired for loss in self.facts)

    @property
    def rows_of_an_item(self) -> int:
        """Rows of a batch that one item of the data becomes: both answers of a pair, or the one."""
        return 1 if self.unpaired else 2

    @property
    def answer_keys(self) -> tuple[str, ...]:
        """Columns of the answers of a row."""
        return (self.completion_key,) if self.unpaired else (self.chosen_key, self.rejected_key)

    @property
    def compares(self) -> bool:
        """Whether the policy is compared with a reference."""
        return not self.reference_free and any(loss.reference for loss in self.facts)

    @property
    def reference_is_policy(self) -> bool:
        """Whether the reference is the policy without its adapter."""
        lora = self.model.lora
        return self.ref_model_path is None and lora.rank > 0 and lora.path is None
