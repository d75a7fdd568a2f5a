"""Distillation of the policy from a teacher, beside rewards or alone."""

from typing import Literal

from skyrl.config.foundation.entry import BaseConfig
from skyrl.tree import field, frozen
from skyrl.tree.validators import fraction, negative, non_negative, positive, rule_of_one_field

_with_places = rule_of_one_field(
    lambda value: value.count("{prompt}") == value.count("{hint}") == 1,
    "a text with {prompt} and {hint}, once each",
)


@frozen
class HintConfig(BaseConfig):
    """The text that a teacher reads before an answer and the policy does not: the policy learns to answer as if it had
    read it, too (self-distillation: SDFT, arXiv:2601.19897; OPSD, arXiv:2601.18734; SDPO, arXiv:2601.20802).
    """

    source: Literal["none", "column", "success", "feedback"] = "none"
    """Where the hint of an answer comes from. column: the row of the prompt; success: another answer to the prompt with
    the highest reward of the group, if rewards differ; feedback: what the environment says of the answer
    (`EnvStep.feedback`). An answer without a hint is scored after its own prompt."""

    column: str = "hint"
    """With source column: name of the column with the text; within a table, as in `reward_spec.ground_truth`."""

    template: str = field(default="{prompt}\n\nHint: {hint}", validator=_with_places)
    """The text that replaces the last message of the user: `{prompt}` stands for that message, `{hint}` for the
    hint."""


@frozen
class DistillationConfig(BaseConfig):
    """Learning from the next-token distributions of `trainer.teacher`, or of the policy itself with a hint, on the
    policy's own samples (on-policy distillation, arXiv:2306.13649); read if there is a teacher.
    """

    self_teacher: bool = False
    """The teacher is the policy, with the weights that it has when a batch is scored, and no second model is loaded; it
    needs a `hint`. For the weights that training starts from, set `trainer.teacher.model.path` to the policy's."""

    hint: HintConfig = HintConfig()
    """The text that the teacher reads and the policy does not, whatever the teacher."""

    type: Literal["advantage", "loss"] = "advantage"
    """advantage: log nu - log pi of each sampled token, nu the teacher's and pi the sampler's probability, is added to
    its advantage, which minimizes the reverse KL divergence by the policy gradient; loss: the divergence of the whole
    distributions is added to the loss, weighed over tokens as the policy loss is. It has less variance and costs about
    one more output layer in memory and time."""

    coef: float = field(default=1.0, validator=positive)
    """Weight of the teacher: factor of log nu - log pi, or of the divergence."""

    task_coef: float = field(default=1.0, validator=non_negative)
    """Factor of the advantages that come from rewards. 0: the policy learns from the teacher alone."""

    discount: float = field(default=0.0, validator=fraction)
    """With type advantage: a token is also credited with log nu - log pi of each later token of its row, times this for
    each token in between (MiniLLM, arXiv:2306.08543). 0: with its own alone."""

    beta: float = field(default=1.0, validator=fraction)
    """With type loss: which divergence. 1: reverse KL(pi || nu); 0: forward KL(nu || pi); between: the generalised
    Jensen-Shannon divergence beta KL(nu || m) + (1 - beta) KL(pi || m), with m = (1 - beta) pi + beta nu."""

    top_k: int | None = field(default=None, validator=positive)
    """With type loss: number of likeliest tokens whose probabilities are compared, for teachers that return no more;
    such as 32 or 128. None: all tokens."""

    top_k_of: Literal["teacher", "student", "intersection", "union"] = "teacher"
    """With `top_k`: whose likeliest tokens. teacher; student: those of the policy before the update of the batch;
    intersection: those of both; union: those of either."""

    tail: bool = True
    """With `top_k`: count all other tokens as one more, so that the divergence is 0 only where both models agree. False
    sums over the chosen tokens alone, as verl's `forward_kl_topk` does, and needs beta = 0."""

    min_logprob: float | None = field(default=None, validator=negative)
    """With `top_k`: bound, in nats, to which lower log-probabilities of both models are raised, such as -10; those of
    the policy then have no gradient. The metric `policy/teacher_logprobs_clamped` is their share. None: no bound."""

    temperature: float = field(default=1.0, validator=positive)
    """With type loss: softmax temperature of both distributions."""

    max_divergence: float | None = field(default=None, validator=positive)
    """With type loss: bound of the divergence of a token, in nats, from which on the token has no gradient; the metric
    `policy/teacher_divergence_clamped` is the share of such tokens. None: no bound."""
