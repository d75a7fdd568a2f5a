"""Environments, which answer the policy and score it."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, ClassVar, Literal

import attrs

from skyrl.config.foundation.entry import BaseConfig
from skyrl.config.foundation.reasoning_tasks import REASONING_GYM
from skyrl.tree import FREE, IDENTITY, FrozenDict, Secret, field, frozen
from skyrl.tree.classes import choice_metadata
from skyrl.tree.code_names import named_code
from skyrl.tree.types import Gigabytes, Seconds, WholeSeconds
from skyrl.tree.validators import fraction, http_address, non_negative, positive, rule_of_one_field

FailureKind = Literal["raised", "timeout", "wrong_type", "not_finite", "too_large"]
"""Way in which an environment fails."""


@attrs.frozen(kw_only=True)
class EnvironmentFacts:
    """Facts about a built-in environment."""

    table: str = ""
    """Table of `environment.skyrl_gym` with its settings; empty for none."""

    single_turn: bool = False
    """Whether it ends after judging the first answer."""

    sandboxed: bool = False
    """Whether it always runs something in a sandbox."""

    supports_math_equivalence: bool = False
    """Whether `math_equivalence` lets it accept answers that are equal to the ground truth as mathematics."""

    judges_whole_group: bool = False
    """Whether it judges all answers to a prompt together, once they are complete."""

    immediate: bool = False
    """Whether it judges an answer within microseconds, without waiting and without a program, unless `math_equivalence`
    is on."""

    service: Literal["", "always", "code_url", "reward_model.url"] = ""
    """Whether it asks a service: always, or if this field of `environment.skyrl_gym` has an address."""


_CODE_FACTS = EnvironmentFacts(single_turn=True, sandboxed=True, service="code_url")

MCP = "mcp"
"""The environment whose tools are those of MCP servers."""

ENVIRONMENTS: Mapping[str, EnvironmentFacts] = {
    "aime": EnvironmentFacts(single_turn=True, supports_math_equivalence=True, immediate=True),
    "code": _CODE_FACTS,
    "gsm8k": EnvironmentFacts(single_turn=True, supports_math_equivalence=True, immediate=True),
    "gsm8k_multi_turn": EnvironmentFacts(immediate=True),
    "lcb": _CODE_FACTS,
    "llm_as_a_judge": EnvironmentFacts(table="llm_as_a_judge", single_turn=True, service="always"),
    MCP: EnvironmentFacts(table="mcp", sandboxed=True),
    "multiply": EnvironmentFacts(immediate=True),
    "pairwise_judge": EnvironmentFacts(
        table="pairwise_judge", single_turn=True, service="always", judges_whole_group=True
    ),
    "reasoning_gym": EnvironmentFacts(table="reasoning_gym", single_turn=True, sandboxed=True),
    "reward_model": EnvironmentFacts(table="reward_model", single_turn=True, service="reward_model.url"),
    "search": EnvironmentFacts(table="search", service="always"),
    "searchcode": EnvironmentFacts(table="search", sandboxed=True, service="always"),
    "text2sql": EnvironmentFacts(table="text2sql", sandboxed=True),
}
"""Facts about each built-in environment, keyed by the value of `env_class`. `skyrl.envs.registry` makes them."""


def built_in_name(name: str) -> str:
    """The name in `ENVIRONMENTS`, if `name` is the value of an `env_class` that has one: `reasoning_gym` of
    `reasoning_gym:chain_sum`.
    """
    return REASONING_GYM if name.startswith(f"{REASONING_GYM}:") else name


def environments_where(predicate: Callable[[EnvironmentFacts], bool]) -> tuple[str, ...]:
    """Names of the built-in environments whose facts fulfil the predicate."""
    return tuple(name for name, facts in ENVIRONMENTS.items() if predicate(facts))


@frozen
class Text2SQLEnvConfig(BaseConfig):
    """Questions answered by SQL queries (`env_class = "text2sql"`)."""

    db_path: str = field(default="/home/ray/default/sql_data", metadata=IDENTITY)
    """Folder of the databases, on every node that runs environments."""


@frozen
class GSM8kLLMJudgeEnvConfig(BaseConfig):
    """Answers graded by a language model (`env_class = "llm_as_a_judge"`)."""

    model: str = "gpt-4o-mini"
    """Name of the judge at the service."""

    base_url: str | None = field(default=None, validator=http_address, metadata=FREE)
    """An OpenAI-compatible service. None: OpenAI's own. Its key is taken from the variable OPENAI_API_KEY."""


@frozen
class PairwiseJudgeEnvConfig(BaseConfig):
    """Answers to one prompt compared two at a time by a language model (`env_class = "pairwise_judge"`). The reward is
    the share of comparisons that an answer wins, in both orders; ties count half.
    """

    model: str = "gpt-4o-mini"
    """Name of the judge at the service."""

    base_url: str | None = field(default=None, validator=http_address, metadata=FREE)
    """An OpenAI-compatible service. None: OpenAI's own. Its key is taken from the variable OPENAI_API_KEY."""

    criterion: str = "more correct, more helpful and clearer"
    """What makes an answer the better one, as the judge is told: "the better one is the one that is ..."."""

    opponents: int | None = field(default=None, validator=positive)
    """Other answers of the group that each is compared with, two requests for each pair. None: all."""


@frozen
class SearchEnvConfig(BaseConfig):
    """Questions answered with a search tool (`env_class = "search"` or `"searchcode"`)."""

    log_requests: bool = field(default=False, metadata=FREE)
    """Print every query and its answer to standard error, up to 200 characters of each."""

    search_url: str = field(default="http://127.0.0.1:8000/retrieve", metadata=FREE)
    """Address of the retrieval service. It may change when a run is resumed; the documents behind it should not."""

    topk: int = field(default=3, validator=positive)
    """Documents per query."""

    timeout: WholeSeconds = field(default=30, validator=positive)
    """Seconds that one query may take."""


@frozen
class RewardModelEnvConfig(BaseConfig):
    """Answers scored by a reward model (`env_class = "reward_model"`); one of `path` and `url` says where it is."""

    path: str | None = field(default=None, metadata=IDENTITY)
    """Folder or hub name of the model, such as a run of `kind = "reward_model"` leaves. It is loaded in the process
    that runs environments, and computes on the CPU."""

    url: str | None = field(default=None, metadata=FREE)
    """Address of `skyrl serve-reward`, with /score at its end, or `name:NAME` (docs/services.md). Its token is taken
    from SKYRL_REWARD_TOKEN."""

    timeout: WholeSeconds = field(default=60, validator=positive)
    """Seconds that the service may take for one answer."""


@frozen
class ReasoningGymEnvConfig(BaseConfig):
    """Tasks of the package reasoning-gym (`env_class = "reasoning_gym:TASK"`, or `"reasoning_gym"` for all of `tasks`).

    Rows are drawn from the seed. Each question occurs once in a task, in training or in evaluation.
    """

    tasks: Mapping[str, Any] = FrozenDict()
    """For each task by name, a table of its settings, such as `{chain_sum = {min_terms = 2}}`. The entry `weight` is
    its share of an epoch relative to the others, 1 by default (`data.train_weights`)."""

    train_rows: int = field(default=1000, validator=positive)
    """Number of training prompts of each task."""

    eval_rows: int = field(default=100, validator=positive)
    """Number of evaluation prompts of each task: the first questions that the seed draws. Changing it changes the
    training prompts, too."""

    seed: int = field(default=0, validator=non_negative)
    """Seed of the questions."""

    system_prompt: str | None = "default"
    """Name of the package's system prompt, which asks for the answer between `<answer>` and `</answer>`: default,
    simple, direct, DeepSeekZero or chain_of_draft. None: no system message. Without the tags, the whole answer after
    the thoughts is judged."""


@frozen
class McpServerConfig(BaseConfig):
    """An MCP server: a program that is started for the run and spoken to over stdio, or one that runs at an address."""

    command: tuple[str, ...] = ()
    """Program and arguments of a server that speaks over standard input and output. It runs in a sandbox of
    `environment.skyrl_gym.sandbox_tier`, in an empty folder of its own and without a network. Words that name existing
    files become absolute paths, which it can read. Empty: the server is at `url`."""

    env: Mapping[str, str] = FrozenDict()
    """Environment variables of the program, beside PATH, LANG, VIRTUAL_ENV and PYTHONPATH of the run."""

    readable: tuple[str, ...] = ()
    """Further files and folders that the program can read. In the tiers process and namespace it can also read what
    every user of the machine can."""

    memory_gb: Gigabytes = field(default=4.0, validator=positive)
    """Memory limit of the program with all of its processes, and address space limit of each of them, in 10^9 bytes."""

    url: str | None = None
    """Address of a server that speaks streamable HTTP, such as `http://127.0.0.1:8000/mcp`."""

    token: Secret | None = None
    """Bearer token for the server at `url`, from an environment variable: `env:NAME`."""

    headers: Mapping[str, Secret] = FrozenDict()
    """Further headers of requests to `url`, each with its whole value from an environment variable:
    `{X-Tenant = "env:NAME"}`."""

    tools: tuple[str, ...] = ()
    """Names of the tools that the policy is offered, in this order. Empty: all of the server's, in the server's order.
    """

    scope: Literal["episode", "run"] = "episode"
    """Lifetime of a connection, and with a command of the process behind it. episode: each episode has its own from its
    first call on, so that no episode sees what another one did; run: all episodes share one."""

    @property
    def has_one_place(self) -> bool:
        """Whether exactly one of `command` and `url` says where the server is."""
        return bool(self.command) != (self.url is not None)

    @property
    def shown(self) -> str:
        """The command or address, for messages."""
        return self.url or " ".join(self.command)


@frozen
class McpEnvConfig(BaseConfig):
    """Tools of MCP servers, called in several turns (`env_class = "mcp"`)."""

    servers: tuple[McpServerConfig, ...] = ()
    """The servers, each a table `[[environment.skyrl_gym.mcp.servers]]`. Names of tools differ between servers."""

    reward: str | None = field(default=None, converter=named_code, metadata=choice_metadata(IDENTITY, ENVIRONMENTS))
    """Reward of an episode: a reward function by import path (`rewards.py:correct`), or an environment that ends after
    one turn (`gsm8k`), which judges the first answer without a call."""

    call_timeout_seconds: Seconds = field(default=30.0, validator=positive)
    """Maximum seconds for one call of a tool. Then its server is ended, and the policy is told so."""

    start_timeout_seconds: Seconds = field(default=60.0, validator=positive, metadata=FREE)
    """Maximum seconds for a server to start, or to be reached, and to list its tools."""

    max_result_characters: int = field(default=10_000, validator=positive)
    """Maximum number of characters of a call's result that the policy sees; the rest is cut off."""

    @property
    def runs_programs(self) -> bool:
        """Whether any server is a program, which runs in a sandbox."""
        return any(server.command for server in self.servers)


@frozen
class SkyRLGymConfig(BaseConfig):
    """Settings of the built-in environments; each reads its own table."""

    max_env_workers: int = field(default=32, validator=positive, metadata=FREE)
    """Maximum number of environment steps that run at the same time."""

    step_timeout_seconds: Seconds | None = field(default=300.0, validator=positive, metadata=FREE)
    """Maximum seconds for one call of an environment; after that its trajectory has failed. None: no limit."""

    trajectory_timeout_seconds: Seconds | None = field(default=None, validator=positive, metadata=FREE)
    """Maximum seconds from the first answer of a sample to its end, including the engine's time and further attempts;
    after that it has failed for good and no longer holds up the batch. None: no limit."""

    max_attempts: int = field(default=3, validator=positive)
    """Maximum number of times that a sample is drawn, each with different random numbers, while its environment fails.
    1: once."""

    retried_failures: tuple[FailureKind, ...] = ("raised", "timeout", "wrong_type", "not_finite", "too_large")
    """Failures after which a sample is drawn again: an exception, a missed deadline of a step, a result of the wrong
    type, a number that is not finite, an observation that is too large. After any other failure it has failed for good.
    """

    failed_samples: Literal["drop_group", "fill"] = "drop_group"
    """Policy for a sample that failed for good or was skipped. drop_group: its whole group stays in the batch, and no
    token of it is trained on; fill: another sample of its group replaces it, and counts twice, unless none has a
    reward."""

    max_failed_share: float = field(default=0.2, validator=fraction)
    """The run stops if the failures of environments in a batch, or in one evaluation, exceed this share of its samples
    and also `max_attempts`, which a single sample can reach. 0: at the first failure."""

    sandbox_tier: Literal["auto", "process", "namespace", "bwrap"] = field(default="auto", metadata=FREE)
    """Isolation of programs and queries that the policy wrote, see SECURITY.md. process: a process with limits and a
    cleared environment; namespace: in addition, no network, no view of other processes and no files to write; bwrap: in
    addition, few files to read. auto: the strongest tier that the machine supports, which is printed. A tier that it
    does not support is an error."""

    code_url: str | None = field(default=None, metadata=FREE)
    """Address of `skyrl serve-code`, with /run at its end, or `name:NAME` (docs/services.md), where `code` and `lcb`
    run programs. Its token is taken from SKYRL_CODE_TOKEN. None: on the machine of the run, in `sandbox_tier`."""

    service_patience_seconds: Seconds = field(default=240.0, validator=non_negative, metadata=FREE)
    """Seconds for which a service of environments that cannot be reached, or answers 429, 502, 503 or 504, is waited
    for: longer than it takes to start. Then the run ends; the samples that wait have not failed, and the time does not
    count towards `step_timeout_seconds`."""

    isolate_user_env: bool = field(default=False, metadata=FREE)
    """Each episode of an environment or reward function that `env_class` names by import path is a process of its own
    in a sandbox of `sandbox_tier`, ended with the episode or after `step_timeout_seconds`. Rows reach it as JSON."""

    user_env_memory_gb: Gigabytes = field(default=4.0, validator=positive, metadata=FREE)
    """Address space of each process that `isolate_user_env` starts, in 10^9 bytes."""

    math_equivalence: bool = False
    """`gsm8k` and `aime` also accept an answer in `\\boxed{}` that math-verify finds equal to the ground truth. Needs
    the extra `math`; it runs in a sandbox."""

    text2sql: Text2SQLEnvConfig = Text2SQLEnvConfig()
    """Settings of the environment `text2sql`."""

    llm_as_a_judge: GSM8kLLMJudgeEnvConfig = GSM8kLLMJudgeEnvConfig()
    """Settings of the environment `llm_as_a_judge`."""

    pairwise_judge: PairwiseJudgeEnvConfig = PairwiseJudgeEnvConfig()
    """Settings of the environment `pairwise_judge`."""

    search: SearchEnvConfig = SearchEnvConfig()
    """Settings of the environments `search` and `searchcode`."""

    reward_model: RewardModelEnvConfig = RewardModelEnvConfig()
    """Settings of the environment `reward_model`."""

    reasoning_gym: ReasoningGymEnvConfig = ReasoningGymEnvConfig()
    """Settings of the environment `reasoning_gym`."""

    mcp: McpEnvConfig = McpEnvConfig()
    """Settings of the environment `mcp`."""


@frozen
class AgentConfig(BaseConfig):
    """A program that plays episodes by calling the policy over HTTP, as it would call OpenAI. Its calls are recorded as
    tokens, and trained on; see `docs/agents.md`.
    """

    command: tuple[str, ...] = field(default=(), metadata=IDENTITY)
    """Program and arguments, started once for each trajectory: the task is a JSON object on its standard input, and
    OPENAI_BASE_URL and OPENAI_API_KEY lead to the policy. Empty: the agent is not a program."""

    function: str | None = field(default=None, converter=named_code, metadata=IDENTITY)
    """Import path of a function that is the agent, plain or `async`: of `task`, `base_url`, `api_key` and `model`, it
    is passed the ones that it has parameters for. None: the agent is not a function."""

    kwargs: Mapping[str, Any] = FrozenDict()
    """Further keyword arguments of `function`."""

    reward: Literal["environment", "returned", "exit_code"] = "environment"
    """Origin of the reward. environment: the prompt's environment judges what the agent returned or printed, or the
    policy's last answer if that is empty; returned: the number that a function returned, or that a program printed in
    its last line; exit_code: 1 where a program ended with 0, else 0."""

    max_requests: int = field(default=64, validator=positive)
    """Maximum number of requests of one trajectory. Further ones are refused, and the trajectory ends with what it has.
    """

    max_concurrent: int = field(default=64, validator=positive, metadata=FREE)
    """Maximum number of agents that run at the same time."""

    max_starts_per_second: float | None = field(default=None, validator=positive, metadata=FREE)
    """Maximum number of agents started per second, after a first burst of the same size, for services that limit the
    rate of starts, such as sandboxes. None: only `max_concurrent` limits them."""

    timeout_seconds: Seconds | None = field(default=600.0, validator=positive, metadata=FREE)
    """Maximum seconds that one agent runs, including the time it waits for the policy; after that its trajectory has
    failed. None: no limit."""

    isolate: bool = field(default=False, metadata=FREE)
    """Run the command in a sandbox of the tier `environment.skyrl_gym.sandbox_tier` (namespace or bwrap): in an empty
    folder of its own, with the policy's endpoint as its only network. It can read the files that `command` names."""

    readable: tuple[str, ...] = field(default=(), metadata=FREE)
    """Further files and folders that an isolated command can read, such as the modules it imports. In the tier
    namespace it can also read what every user of the machine can."""

    memory_gb: Gigabytes = field(default=4.0, validator=positive, metadata=FREE)
    """Memory limit of an isolated command with all of its processes, and address space limit of each of them, in
    10^9 bytes."""

    @property
    def plays(self) -> bool:
        """Whether an agent plays the episodes."""
        return bool(self.command) or self.function is not None


_AND, _TIMES = " + ", " * "


def weighted_names(task: str) -> tuple[tuple[float, str], ...]:
    """Weight and name of each reward of a task, whose text is `EnvironmentConfig.task`."""
    parts = [part.rpartition(_TIMES) for part in task.split(_AND)]
    return tuple((float(weight) if weight else 1.0, name) for weight, _, name in parts)


_valid_env_class = rule_of_one_field(
    lambda value: (
        value is None
        or isinstance(value, str)
        or (len(value) == len({*value}) > 0 and all(name and _AND not in name and _TIMES not in name for name in value))
    ),
    "a name, or a list of different names",
)
_all_finite = rule_of_one_field(lambda value: all(map(isfinite, value)), "finite numbers")


@frozen
class EnvironmentConfig(BaseConfig):
    """Choice of the environment that a prompt is played in."""

    named_by: ClassVar[str] = "env_class"

    env_class: str | tuple[str, ...] | None = field(
        default="gsm8k",
        converter=named_code,
        validator=_valid_env_class,
        metadata=choice_metadata(IDENTITY, ENVIRONMENTS),
    )
    """Name of a registered environment, or an import path (`my_package.envs:MyEnv`), for prompts whose row names none
    in its `env_class` column; a list of reward functions or environments of one turn is rewarded by the sum of their
    rewards. None: every row must name one. `reasoning_gym:TASK` also makes the rows."""

    reward_weights: tuple[float, ...] | None = field(default=None, validator=_all_finite, metadata=IDENTITY)
    """Weight of each reward of a list in `env_class`. None: 1 for each."""

    agent: AgentConfig = AgentConfig()
    """An agent that plays the episodes. Without a command or function, the policy answers the prompts itself."""

    skyrl_gym: SkyRLGymConfig = SkyRLGymConfig()
    """Settings of the built-in environments."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names in `env_class`: one, several, or none."""
        named = self.env_class
        return () if named is None else (named,) if isinstance(named, str) else named

    @property
    def judges(self) -> tuple[str, ...]:
        """The names in `env_class`, and the reward of the environment `mcp` if it is among them."""
        reward = self.skyrl_gym.mcp.reward if MCP in self.names else None
        return (*self.names, reward) if reward else self.names

    @property
    def task(self) -> str | None:
        """`env_class` as one text: that of a list has the form `0.5 * rewards.py:one + rewards.py:other`."""
        if not self.names:
            return None
        weights = self.reward_weights or (1.0,) * len(self.names)
        pairs = zip(weights, self.names, strict=False)  # a check compares their numbers
        return _AND.join(name if weight == 1 else f"{weight!r}{_TIMES}{name}" for weight, name in pairs)

    @property
    def reasoning_tasks(self) -> Mapping[str, Mapping[str, Any]]:
        """Tables of the tasks of reasoning-gym that are played, by name; empty in another environment."""
        tables, played = self.skyrl_gym.reasoning_gym.tasks, dict[str, Mapping[str, Any]]()
        for _, _, task in (name.partition(":") for name in self.names if built_in_name(name) == REASONING_GYM):
            played |= {task: tables.get(task, {})} if task else tables
        return played
