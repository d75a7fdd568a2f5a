"""One attempt at one sample that an agent plays: its calls become the rows, and its result gives the reward."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import evolve

from skyrl.endpoint.conversations import Turn
from skyrl.endpoint.trajectories import PlayedTrajectory
from skyrl.rollout.agent_runner import AgentCall, AgentRunner, Returned
from skyrl.rollout.env_calls import EpisodeError, number
from skyrl.rollout.episode import Episode
from skyrl.rollout.transcript import Transcript
from skyrl.trajectory import Failure, StopReason, Trajectory


class AgentEpisode(Episode):
    """Episode that an agent plays. Single use: call `run`, and `close` in every case."""

    async def run(self) -> Trajectory:
        """Run the agent to its end. Raises `EpisodeError` if it fails or never calls the policy."""
        agent = self._agent
        if agent.config.reward == "environment":
            await self.begin()
        played = PlayedTrajectory(
            sample=self.key, sampling=self._context.sampling, most_requests=agent.config.max_requests
        )
        try:
            with agent.endpoint.trajectories.playing(played):
                returned = await self._returned(played)
        except EpisodeError:
            if not played.cut_off:
                raise
            returned = None  # the agent was cut off: judge what it has done
        finally:
            played.conversations.end()
        return await self._rewarded(played, returned)

    @property
    def _agent(self) -> AgentRunner:
        assert self._context.agent is not None, "an agent's episode has an agent"
        return self._context.agent

    async def _returned(self, played: PlayedTrajectory) -> Returned:
        """Runs the agent. Raises `EpisodeError` if it fails."""
        agent, subject = self._agent, self._call_description("the agent for")
        messages = [dict(message) for message in (*self._initial_messages, *self._prompt.answer_prefix)]
        task = {**self._extras(), "messages": messages}
        call = AgentCall(task=task, url=agent.endpoint.url, key=played.key, model=agent.model)
        returned, seconds = await agent(subject, call)
        self._seconds["env_run"] += seconds
        if returned.exit_code and agent.config.reward != "exit_code":
            text = f"{subject} ended with exit code {returned.exit_code}: {str(returned.value).strip()[-400:]}"
            raise EpisodeError(Failure(kind="raised", reason=text))
        return returned

    async def _rewarded(self, played: PlayedTrajectory, returned: Returned | None) -> Trajectory:
        branches = played.conversations.branches()
        if not branches:
            caller = self._call_description("the agent for")
            message = f"{caller} made no request to the policy, so there is nothing to train on"
            raise EpisodeError(Failure(kind="raised", reason=message))
        final = branches[-1][-1]
        *earlier, self._transcript = (self._row(branch, final) for branch in branches)
        self._earlier_rows = [transcript.step() for transcript in earlier]
        last = final.completion
        match self._agent.config.reward:
            case "environment":
                # What the agent returned or printed is judged, or its last answer if that is empty.
                text = "" if returned is None or returned.value is None else str(returned.value).strip()
                await self._judge(evolve(last, text=text or last.text))
            case "returned":
                prefix = f"{self._call_description('the agent for')} gave"
                self._transcript.credit(0.0 if returned is None else number(_returned_number(returned), prefix))
            case "exit_code":
                self._transcript.credit(float(returned is not None and returned.exit_code == 0))
        self._metrics |= {
            "agent_requests": float(played.requests),
            "agent_rows": float(len(branches)),
            "agent_overruled_settings": float(math.fsum(played.overruled.values())),
        }
        reason: StopReason = "context" if played.cut_off else last.stop_reason
        return self._trajectory(reason)

    def _row(self, branch: Sequence[Turn], last: Turn) -> Transcript:
        """A branch as a row. Tokens that another branch already trains on belong to the prompt. The agent is rewarded
        once, in its last turn; each turn before it has the reward 0.
        """
        transcript = self._transcript.restarted(branch[0].prompt_ids)
        for turn in branch:
            transcript.place(turn.prompt_ids[len(transcript.input_ids) :])
            transcript.sample(turn.completion)
            if turn is not last:
                transcript.credit(0.0)
        return transcript


def _returned_number(returned: Returned) -> object:
    """The number that a function returned; for a program, the last line that it printed, as a number if it is one."""
    if returned.exit_code is None:
        return returned.value
    lines = str(returned.value).strip().splitlines() or [""]
    try:
        return float(lines[-1])
    except ValueError:
        return lines[-1]
