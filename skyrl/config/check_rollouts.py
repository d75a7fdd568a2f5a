"""Checks of rollouts: modes that go together, and lengths that leave room for what is asked."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import Problem
from skyrl.tree.rules import Check


def a_batch_at_once_has_one_turn(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Where everything is sampled before anything is judged, nobody can answer back."""
    if run.generator.batched and run.generator.max_turns > 1:
        yield Problem(
            path="generator.batched",
            message=f"generator.max_turns = {run.generator.max_turns}, and a batch that is sampled whole has one turn",
            hint="set it to false, or max_turns to 1",
        )


def a_batch_at_once_is_in_flight_at_once(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Everything is sampled before the first trajectory ends."""
    if run.generator.batched and run.generator.max_trajectories_in_flight is not None:
        yield Problem(
            path="generator.max_trajectories_in_flight",
            message="generator.batched = true has the whole batch in flight",
            hint="leave one of them out",
        )


def several_turns_have_room(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A second turn starts from the prompt, the first answer and an observation."""
    longest, prompt = run.generator.max_input_length, run.trainer.max_prompt_length
    if run.generator.max_turns > 1 and longest == prompt:
        yield Problem(
            path="generator.max_input_length",
            message=f"it is trainer.max_prompt_length = {prompt}: a prompt of that length ends after its first turn",
            hint="give it room for all turns but the last: prompt, answers and observations",
            severity="warning",
        )


def a_stopped_turn_is_closed(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Chats of the model's training end every turn with a token of their own."""
    generator = run.generator
    open_ended = generator.use_conversation_multi_turn and not generator.append_eos_token_after_stop_str_in_multi_turn
    if generator.max_turns > 1 and generator.sampling_params.stop and open_ended:
        yield Problem(
            path="generator.append_eos_token_after_stop_str_in_multi_turn",
            message="turns that a stop text ends run into the next message, which the model never saw in its training",
            hint="leave it on, or set generator.use_conversation_multi_turn = false",
            severity="warning",
        )


ROLLOUT_CHECKS: tuple[Check[SkyRLTrainConfig], ...] = (
    a_batch_at_once_has_one_turn,
    a_batch_at_once_is_in_flight_at_once,
    several_turns_have_room,
    a_stopped_turn_is_closed,
)
