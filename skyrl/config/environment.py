"""What answers the policy and scores it."""

from skyrl.tree import FREE, IDENTITY, field, frozen
from skyrl.tree.units import WholeSeconds
from skyrl.tree.validators import positive


@frozen
class Text2SQLEnvConfig:
    """Questions answered by SQL queries (`env_class = "text2sql"`)."""

    db_path: str = field(default="/home/ray/default/sql_data", metadata=IDENTITY)
    """Folder of the databases, on every node that runs environments."""


@frozen
class GSM8kLLMJudgeEnvConfig:
    """Grade-school mathematics graded by a language model."""

    model: str = "gpt-4o-mini"
    """Name of the judge at the service."""

    base_url: str | None = field(default=None, metadata=FREE)
    """An OpenAI-compatible service. None: OpenAI's own. Its key is taken from the environment."""


@frozen
class SearchEnvConfig:
    """Questions answered with a search tool (`env_class = "search"`)."""

    log_requests: bool = field(default=False, metadata=FREE)
    """Log every query and its answer."""

    search_url: str = field(default="http://127.0.0.1:8000/retrieve", metadata=FREE)
    """Address of the retrieval service. It may change when a run goes on; the documents behind it should not."""

    topk: int = field(default=3, validator=positive)
    """Documents per query."""

    timeout: WholeSeconds = field(default=30, validator=positive)
    """Seconds that one query may take."""


@frozen
class SkyRLGymConfig:
    """Settings of the built-in environments; each reads its own table."""

    max_env_workers: int = field(default=32, validator=positive, metadata=FREE)
    """Environment steps that run at the same time."""

    text2sql: Text2SQLEnvConfig = Text2SQLEnvConfig()
    """For `text2sql`."""

    llm_as_a_judge: GSM8kLLMJudgeEnvConfig = GSM8kLLMJudgeEnvConfig()
    """For answers that a language model grades."""

    search: SearchEnvConfig = SearchEnvConfig()
    """For `search`."""


@frozen
class EnvironmentConfig:
    """Which environment a prompt is played in."""

    env_class: str | None = field(default="gsm8k", metadata=IDENTITY)
    """Name of a registered environment, or an import path (`my_package.envs:MyEnv`), for prompts whose row names none
    in its `env_class` column. None: every row must name its own."""

    skyrl_gym: SkyRLGymConfig = SkyRLGymConfig()
    """Settings of the built-in environments."""
