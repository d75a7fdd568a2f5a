"""Learning from a teacher: on the policy's own samples, or on the rows of a supervised run."""

from typing import Literal

from skyrl.config.foundation.entry import BaseConfig
from skyrl.tree import FREE, field, frozen
from skyrl.tree.validators import (
    fraction,
    http_address,
    negative,
    non_negative,
    positive,
    positive_fraction,
    rule_of_one_field,
)

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
class TeacherServerConfig(BaseConfig):
    """A teacher behind a server, which scores tokens over HTTP. The variable SKYRL_TEACHER_TOKEN holds the token that
    it requires, if any.
    """

    url: str | None = field(default=None, validator=http_address)
    """Address of the server of the teacher, such as http://10.0.0.5:8000, in place of a teacher of the run's own."""

    protocol: Literal["vllm", "sglang"] = "vllm"
    """Form of the requests. vllm: `prompt_logprobs` of /v1/completions, which `skyrl serve` answers, too; sglang:
    /generate."""

    timeout: float = field(default=300.0, validator=positive, metadata=FREE)
    """Time limit, in seconds, for the scores of a row. A server that is lost has as long to come back: failed requests
    are repeated until then."""

    max_requests: int = field(default=64, validator=positive, metadata=FREE)
    """Number of rows that a server scores at a time."""


@frozen
class DivergenceConfig(BaseConfig):
    """The divergence of a learning model from a teacher's next-token distributions."""

    coef: float = field(default=1.0, validator=positive)
    """Weight of the teacher: factor of the divergence, or of log nu - log pi with type advantage."""

    beta: float = field(default=1.0, validator=fraction)
    """Which divergence. 1: reverse KL(pi || nu), pi the learning model's and nu the teacher's distribution; 0: forward
    KL(nu || pi); between: the generalised Jensen-Shannon divergence beta KL(nu || m) + (1 - beta) KL(pi || m), with m =
    (1 - beta) pi + beta nu."""

    top_k: int | None = field(default=None, validator=positive)
    """Number of likeliest tokens whose probabilities are compared, for teachers that return no more; such as 32 or 128.
    None: all tokens, or all that rows store."""

    tail: bool = True
    """With `top_k`: count all other tokens as one more, so that the divergence is 0 only where both models agree. False
    sums over the chosen tokens alone, as verl's `forward_kl_topk` does, and needs beta = 0."""

    min_logprob: float | None = field(default=None, validator=negative)
    """With `top_k`: bound, in nats, to which lower log-probabilities of both models are raised, such as -10; those of
    the learning model then have no gradient. The metric `teacher_logprobs_clamped` is their share. None: no bound."""

    temperature: float = field(default=1.0, validator=positive)
    """Softmax temperature of both distributions."""

    max_divergence: float | None = field(default=None, validator=positive)
    """Bound of the divergence of a token, in nats, from which on the token has no gradient; the metric
    `teacher_divergence_clamped` is the share of such tokens. None: no bound."""


@frozen
class SFTDistillationConfig(DivergenceConfig):
    """Learning from a teacher's next-token distributions on the rows of the run (off-policy distillation), beside their
    own tokens or alone. There is a teacher if `stored`, `teacher_path` or the address of a server is given.
    """

    stored: bool = False
    """Read the teacher's likeliest tokens from the rows: columns `teacher_ids` and `teacher_logprobs`, as
    `skyrl generate --top-logprobs` writes them."""

    teacher_path: str | None = None
    """Folder or hub name of a frozen model beside the run's, sharded as it is; of any size and architecture, with the
    same tokens."""

    endpoint: TeacherServerConfig = TeacherServerConfig()
    """A teacher behind a server."""

    task_coef: float = field(default=1.0, validator=non_negative)
    """Factor of the cross entropy of the rows' own tokens. 0: the model learns from the teacher alone."""

    @property
    def has_teacher(self) -> bool:
        """Whether the model learns from a teacher."""
        return bool(self.stored or self.teacher_path or self.endpoint.url)

    @property
    def compares_all(self) -> bool:
        """Whether whole distributions are compared, from the hidden states of a model beside the run's."""
        return bool(self.teacher_path) and self.top_k is None


@frozen
class DistillationConfig(DivergenceConfig):
    """Learning from the next-token distributions of `trainer.teacher`, or of the policy itself with a hint, on the
    policy's own samples (on-policy distillation, arXiv:2306.13649); read if there is a teacher.
    """

    self_teacher: bool = False
    """The teacher is the policy, with the weights that it has when a batch is scored, and no second model is loaded; it
    needs a `hint`. For the weights that training starts from, set `trainer.teacher.model.path` to the policy's."""

    teacher_update_rate: float | None = field(default=None, validator=positive_fraction)
    """Share of the policy that is mixed into the weights of the teacher every `teacher_sync_steps` steps, which makes
    the teacher a moving average of the policy (SDPO, arXiv:2601.20802, mixes in 0.05, and SDFT, arXiv:2601.19897, 0.01
    to 0.05). Needs a `trainer.teacher.model.path` that is the policy's. None: the teacher is frozen."""

    teacher_sync_steps: int = field(default=1, validator=positive)
    """Training steps between two mixtures."""

    hint: HintConfig = HintConfig()
    """The text that the teacher reads and the policy does not, whatever the teacher."""

    type: Literal["advantage", "loss"] = "advantage"
    """advantage: log nu - log pi of each sampled token, nu the teacher's and pi the sampler's probability, is added to
    its advantage, which minimizes the reverse KL divergence by the policy gradient; loss: the divergence of the whole
    distributions is added to the loss, weighed over tokens as the policy loss is. It has less variance and costs about
    one more output layer in memory and time."""

    task_coef: float = field(default=1.0, validator=non_negative)
    """Factor of the advantages that come from rewards. 0: the policy learns from the teacher alone."""

    discount: float = field(default=0.0, validator=fraction)
    """With type advantage: a token is also credited with log nu - log pi of each later token of its row, times this for
    each token in between (MiniLLM, arXiv:2306.08543). 0: with its own alone."""

    top_k_of: Literal["teacher", "student", "intersection", "union"] = "teacher"
    """With `top_k`: whose likeliest tokens. teacher; student: those of the policy before the update of the batch;
    intersection: those of both; union: those of either."""
