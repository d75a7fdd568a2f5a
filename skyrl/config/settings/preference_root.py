"""Runs that learn from preferences without a reward model: DPO and variants (`kind = "preference"`)."""

from collections.abc import Mapping
from typing import Literal

import attrs

from skyrl.config.foundation.intervals import Interval
from skyrl.config.settings.learners import OptimizerConfig
from skyrl.config.settings.strategies import STRATEGIES
from skyrl.config.settings.supervised_root import SupervisedConfig
from skyrl.tree import FREE, IDENTITY, field, frozen
from skyrl.tree.classes import choice_metadata
from skyrl.tree.code_names import named_code
from skyrl.tree.validators import (
    at_least,
    fraction,
    fraction_below_one,
    non_negative,
    positive,
    positive_fraction,
    rule_of_one_field,
)


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

    ranks: bool = False
    """Whether it is a loss of whole rankings, and not of the pairs in them."""


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
    "plackett_luce": PreferenceLossFacts(ranks=True),
    "sft": PreferenceLossFacts(fields=(), reference=False),
    "kto": PreferenceLossFacts(fields=("beta", *_WEIGHTS), unpaired=True),
    "apo_zero_unpaired": PreferenceLossFacts(fields=("beta", *_WEIGHTS), unpaired=True),
}
"""Name -> what the loss reads."""

USER_LOSS = PreferenceLossFacts(fields=(*_SMOOTHED, "discopop_tau", "simpo_gamma"), divergence=True)
"""The same of the user's own losses, which are given all settings of losses of pairs."""

_losses = rule_of_one_field(lambda value: bool(value) and len(set(value)) == len(value), "one or more distinct names")
_weights = rule_of_one_field(lambda value: all(weight > 0 for weight in value), "positive numbers")


@frozen
class PreferenceConfig(SupervisedConfig):
    """Preferences without a reward model (`kind = "preference"`): DPO and variants, on pairs of a better and a worse
    answer; KTO, on single answers with labels.
    """

    kind: Literal["preference"] = field(default="preference", metadata=IDENTITY)
    """Kind of run, which decides the tree that a file is read into."""

    optimizer_config: OptimizerConfig = OptimizerConfig(lr=1e-6)
    """How the weights are updated. One batch is one optimizer step."""

    loss_type: tuple[str, ...] = field(
        default=("sigmoid",), converter=named_code, validator=_losses, metadata=choice_metadata({}, PREFERENCE_LOSSES)
    )
    """Losses of a pair, added up: sigmoid is DPO, with `sft` the negative log-likelihood of the chosen answer; CPO is
    sigmoid and sft with `reference_free`, MPO is sigmoid, bco_pair and sft, ORPO is orpo and sft. plackett_luce is a
    loss of whole rankings. kto and apo_zero_unpaired stand alone: their rows are single answers with labels. A name may
    also be an import path of your own loss (`my_package.losses:mine`, `losses.py:mine`). See docs/preferences.md."""

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

    sync_ref_model: bool = False
    """Mix the policy into the reference every `ref_model_sync_steps` steps (TR-DPO, arXiv:2404.09656). The reference is
    a model of its own then, also where an adapter is trained."""

    ref_model_mixup_alpha: float = field(default=0.6, validator=positive_fraction)
    """Share of the policy in the mixture; 1 replaces the reference."""

    ref_model_sync_steps: int = field(default=512, validator=positive)
    """Number of steps between two mixtures."""

    use_weighting: bool = False
    """Weight the losses of each pair by how likely the policy itself is to give its answers (WPO, arXiv:2406.11827), in
    training; evaluations do not weigh."""

    num_answers: int = field(default=2, validator=at_least(2))
    """Number of answers of a row. 2: pairs; of a ranked list, the best and the worst answer. More: ranked lists of up
    to so many answers, on which a loss of pairs is the mean over all pairs of a list."""

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

    answers_key: str = "answers"
    """Column of a ranked list: texts, chats, or tables with the text as `answer` and its `rank`, as in Nectar."""

    ranks_key: str = "ranks"
    """Column of a number for each of these answers, the lowest for the best."""

    scores_key: str = "scores"
    """Column of a number for each of these answers, the highest for the best, where there are no ranks."""

    completion_key: str = "completion"
    """Column of the single answer of kto and apo_zero_unpaired, or of the whole chat that ends with it."""

    label_key: str = "label"
    """Column that says whether this answer is good: true or false."""

    @property
    def facts(self) -> tuple[PreferenceLossFacts, ...]:
        """Facts about each of the losses."""
        return tuple(PREFERENCE_LOSSES.get(name, USER_LOSS) for name in self.loss_type)

    @property
    def unpaired(self) -> bool:
        """Whether a row is one answer with a label."""
        return any(loss.unpaired for loss in self.facts)

    @property
    def rows_of_an_item(self) -> int:
        """Rows of a batch that one item of the data becomes: all answers of a pair or a ranked list, or the one."""
        return 1 if self.unpaired else self.num_answers

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
        """Whether the reference is the policy without its adapter, which Megatron cannot leave out."""
        lora, moves = self.model.lora, self.sync_ref_model or STRATEGIES[self.strategy].own_modules
        return self.ref_model_path is None and lora.rank > 0 and lora.path is None and not moves

    @property
    def ref_update_interval(self) -> Interval:
        """Steps, or epochs, after which the policy is mixed into the reference."""
        return self.ref_model_sync_steps if self.compares and self.sync_ref_model else -1
