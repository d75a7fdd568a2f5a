"""Notices a task that gives every answer the same reward, or none, from which nothing is learned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from skyrl.config import GeneratorConfig
from skyrl.config.settings.environment import AgentConfig
from skyrl.envs.rows import ground_truths
from skyrl.planning.layout import counted
from skyrl.trajectory import TrajectoryGroup


def endings(reasons: Counter[str], config: GeneratorConfig, agent: AgentConfig) -> str:
    """How many trajectories ended at which limit, from the counts of their stop reasons; empty if at none."""
    parts, sampling = [], config.sampling_params
    limits = {
        "generator.max_input_length": config.max_input_length,
        "generator.sampling_params.max_tokens": sampling.max_tokens,
        "environment.agent.max_requests": agent.max_requests if agent.command or agent.function else None,
    }
    if answers := reasons["length"]:
        cut = "was" if answers == 1 else "were"
        longest = f"generator.sampling_params.max_generate_length = {sampling.max_generate_length}"
        parts.append(f"{counted(answers, 'answer')} {cut} cut at {longest}")
    if conversations := reasons["context"]:
        known = " or ".join(f"{path} = {most}" for path, most in limits.items() if most is not None)
        limit = known or "the longest sequence of the model"
        parts.append(f"{counted(conversations, 'conversation')} ended at {limit}")
    return "; ".join(parts)


STEPS = 3
"""Steps at the beginning of a session whose rewards are compared."""


class ConstantRewards:
    """Reports once, after the first steps, that all their rewards are the same number, or that there are none."""

    def __init__(
        self,
        report: Callable[[str], None],
        samples: Path,
        steps: int = STEPS,
        *,
        endings: Callable[[Counter[str]], str],
    ) -> None:
        """For the message, `samples` is the file with the answers and their rewards, and `endings` describes stop
        reasons by their counts, as the function of this name does.
        """
        self._report, self._samples, self._steps, self._endings = report, samples, steps, endings
        self._seen: set[float] = set()
        self._reasons: Counter[str] = Counter()
        self._rewards = self._counted = self._missing = 0
        self._why_missing = ""
        self._kinds_of_truths: set[type] = set()

    def count(self, groups: Sequence[TrajectoryGroup], version: int) -> None:
        """Take the groups of one more step into account; `version` is that of the weights."""
        if self._counted == self._steps or len(self._seen) > 1:
            return
        kept = [group for group in groups if not group.dropped]
        rewards = [reward for group in kept for reward in group.rewards]
        missing = [trajectory for group in groups for trajectory in group.trajectories if trajectory.missing]
        self._missing += len(missing)
        if missing and not self._why_missing:
            self._why_missing = missing[0].skipped or missing[0].failures[-1].reason
        self._seen.update(rewards)
        self._rewards += len(rewards)
        truths = [truth for group in kept for truth in ground_truths(group.prompt.extras).values()]
        self._kinds_of_truths.update(map(type, truths))
        self._reasons.update(row.stop_reason for group in kept for row in group.trajectories)
        self._counted += 1
        if self._counted == self._steps and len(self._seen) == 1:
            self._report(self._words())
        if self._counted == self._steps and not self._seen and self._missing:
            self._report(
                f"warning: no group of {self._steps_text} has all its rewards, and nothing is learned from the others: "
                f"{counted(self._missing, 'sample')} without a reward, the first one because {self._why_missing}"
            )

    @property
    def _steps_text(self) -> str:
        return "the first step" if self._steps == 1 else f"the first {self._steps} steps"

    def _words(self) -> str:
        (reward,), steps = self._seen, self._steps_text
        endings = self._endings(self._reasons)
        cut = f" ({endings})" if endings else ""
        numbers = ""
        if self._kinds_of_truths and self._kinds_of_truths <= {int, float}:
            kinds = " and ".join(sorted(kind.__name__ for kind in self._kinds_of_truths))
            numbers = f". The ground truths are numbers ({kinds}), which equal no text: compare str(ground_truth)"
        return (
            f"warning: all {self._rewards} rewards of {steps} are {reward:g}{cut}: nothing is learned from equal "
            f"rewards. Read some answers in {self._samples}; see whether the reward compares them with a ground truth "
            "that the data have (`skyrl doctor`), and whether the prompts are neither too hard nor too easy" + numbers
        )
