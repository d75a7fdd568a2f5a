"""Tests of the environment: `pytest`. A reward that is wrong is learned, too."""

from environment import Guess, hint


def game() -> Guess:
    """An episode whose digit is 3."""
    return Guess({"reward_spec": {"ground_truth": "3"}})


def test_a_right_guess_ends_the_episode_with_a_reward() -> None:
    step = game().step(" 3")
    assert (step.reward, step.done) == (1.0, True)


def test_a_wrong_guess_is_answered_with_a_hint_and_a_second_one_ends_the_episode() -> None:
    episode = game()
    first, second = episode.step("5"), episode.step("3")
    assert (first.reward, first.done, first.observations[0]["content"]) == (0.0, False, hint(3))
    assert (second.reward, second.done) == (1.0, True)
    assert episode.get_metrics() == {"tries": 2.0}


def test_two_wrong_guesses_earn_nothing() -> None:
    episode = game()
    episode.step("5")
    assert (episode.step("6").reward, episode.tries) == (0.0, 2)
