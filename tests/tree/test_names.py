"""What was meant by a name that does not exist."""

from __future__ import annotations

import pytest

from skyrl.tree.names import alike, nearest, slips
from tests.tree.trees import arguments, only_problem


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        # a slip in a sibling's name
        ("sed", "did you mean seed?"),
        ("policy.optimizer.l", "did you mean policy.optimizer.lr?"),
        ("policy.optimizer.rl", "did you mean policy.optimizer.lr?"),
        ("polcy.optimizer.lr", "did you mean policy.optimizer.lr?"),
        ("policy.optimiser.lr", "did you mean policy.optimizer.lr?"),
        ("policy.Optimizer.lr", "did you mean policy.optimizer.lr?"),
        ("polcy.nothing.lr", "did you mean policy?"),
        # the right name in the wrong place: nearest places first
        ("lr", "use policy.optimizer.lr, critic.optimizer.lr or judge.optimizer.lr instead"),
        ("critic.lr", "use critic.optimizer.lr, policy.optimizer.lr or judge.optimizer.lr instead"),
        ("optimizer.lr", "use policy.optimizer.lr, critic.optimizer.lr or judge.optimizer.lr instead"),
        ("policy.seed", "use seed instead"),
        # somewhat alike
        ("log_probs", "did you mean logprobs?"),
        ("policy.optimizer.weight_decay", ""),
        ("critic.weight", ""),
        ("weight", "did you mean weights?"),
        ("judge.decays", "did you mean judge.optimizer.decay?"),
        ("judge.nothing.decays", ""),
        # nothing like it
        ("zzz", ""),
    ],
)
def test_the_likeliest_meaning_is_suggested(path: str, sentence: str) -> None:
    problem = only_problem(arguments(f"{path}=1"))
    assert (problem.hint or problem.message.partition("; ")[2]) == sentence


def test_one_meaning_stands_in_the_message_and_several_in_the_hint() -> None:
    assert only_problem(arguments("sed=1")).message == "no such field; did you mean seed?"
    assert only_problem(arguments("lr=1")).message == "no such field of Run"


def test_without_a_suggestion_the_table_is_named() -> None:
    assert only_problem(arguments("policy.zzz=1")).message == "no such field of Model"


@pytest.mark.parametrize(
    ("name", "is_slip"),
    [
        ("epochs", True),
        ("epoch", True),
        ("epoochs", True),
        ("epocgs", True),
        ("epohcs", True),
        ("EPOCHS", True),
        ("epcs", False),
        ("pochse", False),
    ],
)
def test_a_slip_is_one_letter_more_less_or_other_or_two_exchanged(name: str, is_slip: bool) -> None:
    assert (slips(name, ["epochs"]) == ["epochs"]) is is_slip


def test_dashes_count_as_underscores() -> None:
    assert slips("run-name", ["run_name", "name"]) == ["run_name"]


def test_a_beginning_or_end_of_a_name_is_alike() -> None:
    assert alike("temp", ["top_p", "temperature"]) == ["temperature"]
    assert alike("type", ["policy_loss_type", "eps"]) == ["policy_loss_type"]
    assert alike("a", ["alpha"]) == []


def test_the_nearest_is_a_slip_before_it_is_alike() -> None:
    assert nearest("regula", ["regularized", "regular"]) == "regular"
    assert nearest("dualclip", ["dual_clip", "cispo"]) == "dual_clip"
    assert nearest("zzz", ["dual_clip"]) is None
