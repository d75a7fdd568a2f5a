"""Experts that the engine chose, over the turns of an episode."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve

from skyrl.data.group_lines import as_object, group_of
from skyrl.errors import RunError
from skyrl.inference.engine import Completion
from skyrl.models.routers import packed_choices, restored_choices
from skyrl.rollout.transcript import Transcript
from skyrl.training.collate import collate
from skyrl.trajectory import Prompt, TokenRow, Trajectory, TrajectoryGroup


def completion(computed: int, *ids: int, expert: int = 0) -> Completion:
    """Drawn tokens, with one expert for each of `computed` tokens: `expert`, and one more for each token."""
    chosen = np.arange(expert, expert + computed).reshape(computed, 1, 1)
    return Completion(
        token_ids=ids,
        text="",
        logprobs=(-1.0,) * len(ids),
        weight_versions=(0,) * len(ids),
        stop_reason="stop",
        routed_experts=packed_choices(chosen, 256),
    )


def experts(row: TokenRow) -> list[int]:
    assert row.routed_experts is not None
    choices: list[int] = restored_choices(row.routed_experts).flatten().tolist()
    return choices


def test_each_token_keeps_the_expert_of_the_turn_that_computed_it_first() -> None:
    transcript = Transcript((1, 2))
    transcript.sample(completion(4, 3, 4, 5))  # the prompt and two of three
    transcript.place((6,))
    transcript.sample(completion(7, 7, 8, expert=100))
    assert experts(transcript.step()) == [0, 1, 2, 3, 104, 105, 106]


def test_tokens_that_are_withdrawn_take_their_experts_along() -> None:
    transcript = Transcript((1, 2))
    transcript.sample(completion(4, 3, 4, 5))
    transcript.withdraw(2)
    assert experts(transcript.step()) == [0, 1, 2]
    transcript.place((6, 7))
    transcript.sample(completion(5, 8, expert=100))
    assert experts(transcript.step()) == [0, 1, 2, 103, 104]


def test_a_copy_has_every_number_of_the_row_and_does_not_change_with_it() -> None:
    transcript = Transcript((1, 2))
    transcript.sample(evolve(completion(4, 3, 4, 5), engine=7))
    transcript.credit(0.5)
    copy, before = transcript.copy(), transcript.step()
    assert copy.step() == before and copy.step().engines == before.engines == (7, 7, 7)  # which equality leaves out
    transcript.place((6,))
    transcript.credit(1.0)
    assert copy.step() == before and copy.step().engines == before.engines


def test_experts_of_other_tokens_are_refused() -> None:
    with pytest.raises(RunError, match="experts of 6 tokens, and computed 2 of the prompt and drew 3"):
        Transcript((1, 2)).sample(completion(6, 3, 4, 5))


def test_routed_experts_are_collated_stored_and_read_back() -> None:
    transcript = Transcript((1, 2))
    transcript.sample(completion(4, 3, 4, 5, expert=9))
    row = transcript.step()
    routed, plain = (
        Trajectory(
            prompt_id="p",
            sample_index=index,
            prompt_ids=row.prompt_ids,
            response_ids=row.response_ids,
            loss_mask=row.loss_mask,
            rollout_logprobs=row.rollout_logprobs,
            weight_versions=row.weight_versions,
            rewards=(),
            routed_experts=row.routed_experts if index == 0 else None,
            stop_reason="stop",
        )
        for index in range(2)
    )
    prompt = Prompt(id="p", messages=(), token_ids=(1, 2), env_class="task")
    group = TrajectoryGroup(prompt=prompt, trajectories=(routed, plain))
    assert group_of(as_object(group)) == group
    choices = collate([group]).routed_experts
    assert choices is not None
    assert choices[:, :, 0, 0].tolist() == [[9, 10, 11, 12, -1], [-1] * 5]
