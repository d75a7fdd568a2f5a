"""Samplers: which rows a run draws next. `skyrl.data.samplers` has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyrl.config.foundation.entry import BaseConfig
from skyrl.config.foundation.import_paths import is_import_path
from skyrl.errors import Problem
from skyrl.tree import FrozenDict, field, frozen
from skyrl.tree.classes import choice_metadata
from skyrl.tree.code_names import named_code
from skyrl.tree.names import nearest
from skyrl.tree.validators import fraction_below_one, no_negative, non_negative, not_empty, positive

READS_ROWS = ("permutation", "mixture", "schedule")
"""Built-in samplers that need no rewards, which every kind of run has."""

READS_REWARDS = ("pools", "target_difficulty")
"""Built-in samplers that follow the rewards of what was drawn before."""


@frozen
class MixtureStage(BaseConfig):
    """Weights of the sources from one step on."""

    step: int = field(default=0, validator=non_negative)
    """Batch from which the weights hold, counted from 0; between two stages, weights change evenly."""

    weights: tuple[float, ...] = field(default=(), validator=no_negative)
    """Share of each source, relative to each other. 0: nothing is drawn from it."""


@frozen
class SamplerStage(BaseConfig):
    """The sampler from one step on."""

    step: int = field(default=0, validator=non_negative)
    """Batch from which this sampler draws, counted from 0."""

    sampler: str = "permutation"
    """Name of a built-in sampler other than `schedule`."""


@frozen
class SamplerConfig(BaseConfig):
    """How rows are drawn. A step is here the number of batches of rows drawn before, which is that of training steps
    unless dynamic sampling draws more.
    """

    sampler: str = field(default="permutation", converter=named_code, metadata=choice_metadata({}, READS_ROWS))
    """permutation: every row once in an epoch; mixture: sources by weights that change, see `mixture`; schedule: one
    sampler after another, see `stages`; or one of your own, by import path (`my_package.samplers:Mine`,
    `samplers.py:Mine`): a subclass of `skyrl.data.samplers.Sampler`, or any class whose objects yield numbers of rows
    when they are iterated over."""

    sampler_kwargs: Mapping[str, Any] = FrozenDict()
    """Arguments of a sampler of your own, which is called with the rows and these."""

    mixture: tuple[MixtureStage, ...] = ()
    """Stages of `mixture`, in order of their steps. Each source is read in passes of its own, as under weights that do
    not change."""

    stages: tuple[SamplerStage, ...] = ()
    """Stages of `schedule`, in order of their steps, the first of which is 0. All their samplers are told of all
    rewards."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all samplers that draw at some step."""
        stages = self.stages if self.sampler == "schedule" else ()
        return (self.sampler, *(stage.sampler for stage in stages))

    def built_in(self) -> tuple[str, ...]:
        """Names of the built-in samplers that this kind of run has."""
        return READS_ROWS

    def own_problems(self) -> Iterator[Problem]:
        """Samplers are known, and stages are in order."""
        known = self.built_in()
        if not is_import_path(self.sampler) and self.sampler not in known:
            yield _unknown("sampler", self.sampler, known)
        if self.sampler == "schedule":
            for name in self.names[1:]:
                if name not in known or name == "schedule":
                    yield _unknown("stages", name, tuple(item for item in known if item != "schedule"))
            yield from _stage_problems("stages", [stage.step for stage in self.stages])
        if "mixture" in self.names:
            yield from _stage_problems("mixture", [stage.step for stage in self.mixture])
            for number, stage in enumerate(self.mixture):
                if not any(stage.weights):
                    message = f"all weights of stage {number} are 0, so nothing could be drawn"
                    yield Problem(path="mixture", message=message, hint="give a source a positive weight")

    def mixture_problems(self, path: str, sources: int) -> Iterator[Problem]:
        """Every stage of a mixture has a weight for each of the `sources`; `path` is that of this table."""
        for number, stage in enumerate(self.mixture if "mixture" in self.names else ()):
            if len(stage.weights) != sources:
                message = f"stage {number} has {len(stage.weights)} weights, and the number of sources is {sources}"
                yield Problem(path=f"{path}.mixture", message=message, hint="give one for each source, in their order")


@frozen
class PoolConfig(BaseConfig):
    """Rows whose mean reward is in one range."""

    name: str = ""
    """Name of the pool in metrics (`curriculum/pool_<name>`)."""

    threshold: float = 1.0
    """Highest mean reward in this pool; the lowest is the threshold of the pool before it. The last pool has all rows
    above the others, whatever its threshold."""

    weight: float = field(default=1.0, validator=non_negative)
    """How often a row of this pool is drawn, relative to other rows. 0: never."""


@frozen
class TargetDifficultyConfig(BaseConfig):
    """A target difficulty that rises while the policy does well (AdaRFT, arXiv:2504.05520, section 3)."""

    column: str = field(default="difficulty", validator=not_empty)
    """Column of a row's difficulty, a number; a dot leads into a table, as in `extra_info.difficulty`."""

    initial: float = 0.0
    """Target of the first batch."""

    min: float = 0.0
    """Lowest target."""

    max: float = 100.0
    """Highest target."""

    step_size: float = field(default=50.0, validator=positive)
    """Longest way of the target after one batch: eta of the paper."""

    sensitivity: float = field(default=2.0, validator=positive)
    """How fast that way is reached as rewards differ from `reward`: alpha of the paper."""

    reward: float = field(default=0.5)
    """Mean reward of a batch at which the target stays: beta of the paper."""


@frozen
class CurriculumConfig(SamplerConfig):
    """How prompts are drawn: as in every kind of run, or by the rewards of what was drawn before."""

    sampler: str = field(
        default="permutation", converter=named_code, metadata=choice_metadata({}, (*READS_ROWS, *READS_REWARDS))
    )
    """permutation: every prompt once in an epoch; pools: by the mean reward of a prompt, see `pools`;
    target_difficulty: those nearest to a difficulty that follows the rewards; mixture: sources by weights that change,
    see `mixture`; schedule: one sampler after another, see `stages`; or one of your own, by import path
    (`my_package.samplers:Mine`, `samplers.py:Mine`): a subclass of `skyrl.data.samplers.Sampler`, or any class whose
    objects yield numbers of rows when they are iterated over."""

    pools: tuple[PoolConfig, ...] = (
        PoolConfig(name="hard", threshold=0.25, weight=0.2),
        PoolConfig(name="normal", threshold=0.75, weight=1.0),
        PoolConfig(name="easy", threshold=1.0, weight=0.2),
    )
    """Pools in order of their thresholds. A prompt is in the pool of its mean reward, see `pool_memory`."""

    pool_memory: float = field(default=0.0, validator=fraction_below_one)
    """Share of the earlier mean reward that a prompt keeps with each new group: m <- memory m + (1 - memory) r. Prompts
    that are solved in some groups and not in others then stay apart from those that always are. 0: the mean reward of
    the last group alone."""

    unseen_weight: float = field(default=1.0, validator=non_negative)
    """Weight of prompts that were not drawn yet, under `pools`."""

    target: TargetDifficultyConfig = TargetDifficultyConfig()
    """The target difficulty of `target_difficulty`, and how it follows the rewards."""

    skip_solved: int | None = field(default=None, validator=positive)
    """Draw a prompt no more once all samples of its last so many groups had a reward of at least `solved_reward`,
    until every prompt has come to that. None: no prompt is left out."""

    solved_reward: float = 1.0
    """Reward from which a sample counts as solved, for `skip_solved`."""

    def built_in(self) -> tuple[str, ...]:
        return (*READS_ROWS, *READS_REWARDS)

    def own_problems(self) -> Iterator[Problem]:
        """Besides those of every kind of run: pools are ordered and one has a weight, and the target has a range."""
        yield from super().own_problems()
        if "pools" in self.names:
            yield from self._pool_problems()
        target = self.target
        if "target_difficulty" in self.names and not target.min <= target.initial <= target.max:
            message = f"{target.initial:g} is not between min = {target.min:g} and max = {target.max:g}"
            yield Problem(path="target.initial", message=message, hint="set them to the range of the column")

    def _pool_problems(self) -> Iterator[Problem]:
        names, thresholds = [pool.name for pool in self.pools], [pool.threshold for pool in self.pools]
        if thresholds != sorted(set(thresholds)):
            message = f"thresholds {', '.join(f'{threshold:g}' for threshold in thresholds)} do not rise"
            yield Problem(path="pools", message=message, hint="list the pools from the lowest threshold to the highest")
        if not names:
            yield Problem(path="pools", message="the list is empty", hint="give at least one pool")
        elif len(set(names)) != len(names) or {"", "unseen"} & {*names}:
            message = f"{', '.join(map(repr, names))}: two names are the same, or one is empty or unseen"
            yield Problem(path="pools", message=message, hint="give each pool a name of its own for its metric")
        if not self.unseen_weight and not any(pool.weight for pool in self.pools):
            message = "all weights are 0, so nothing could be drawn"
            yield Problem(path="pools", message=message, hint="give a pool, or unseen_weight, a positive weight")
        elif not self.unseen_weight:
            message = "0 leaves out every prompt that was not drawn yet, which at the beginning are all"
            yield Problem(path="unseen_weight", message=message, hint="set it above 0")


def _stage_problems(path: str, steps: Sequence[int]) -> Iterator[Problem]:
    if not steps:
        yield Problem(path=path, message="the list is empty", hint="give at least one stage, from step 0 on")
    elif steps[0] or list(steps) != sorted(set(steps)):
        message = f"steps {', '.join(map(str, steps))} do not rise from 0"
        yield Problem(path=path, message=message, hint="list the stages in order, the first with step = 0")


def _unknown(path: str, name: str, known: Sequence[str]) -> Problem:
    near = nearest(name, known)
    meant = f"did you mean {near}? " if near else ""
    own = "; your own: file.py:name or module:name" if path == "sampler" else ""
    hint = f"{meant}Built in: {', '.join(known)}{own}"
    return Problem(path=path, message=f"there is no sampler {name!r} here", hint=hint)
