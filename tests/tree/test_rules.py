"""The engine of derivation and checks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from skyrl.errors import ConfigError, Problem
from skyrl.tree import evolve_at
from skyrl.tree.origins import DEFAULT, Origin, Origins
from skyrl.tree.rules import derive, find_problems, paths_read, rule, touches
from tests.tree.trees import Model, Optimizer, Run

ARGUMENT = (Origin(kind="argument", where="1"),)


@rule(writes="steps", reads=("seed",))
def steps_follow_the_seed(run: Run) -> int | None:
    """Twice the seed, or nothing for 0."""
    return 2 * run.seed or None


@rule(writes="judge", reads=("steps", "policy.path"))
def the_judge_is_the_policy(run: Run) -> Model | None:
    """Once there are steps."""
    return Model(path=run.policy.path) if run.steps else None


@rule(writes="policy.optimizer.decay", reads=("seed",), unset=0.01, placeholder=False)
def decay_follows_the_seed(run: Run) -> float:
    """0.01 is an ordinary value of this field."""
    return run.seed / 100


RULES = (steps_follow_the_seed, the_judge_is_the_policy, decay_follows_the_seed)


@rule(writes="judge.optimizer.decay", reads=("seed",), unset=0.01, placeholder=False, table="judge")
def the_judge_decays_with_the_seed(run: Run) -> float:
    """In a table that may be absent."""
    return run.seed / 100


def test_a_rule_of_a_table_that_is_absent_applies_whatever_stands_for_derivation() -> None:
    assert the_judge_decays_with_the_seed.applies(Run(), ())
    assert not the_judge_decays_with_the_seed.applies(Run(judge=Model(optimizer=Optimizer(decay=0.5))), ())


def the_seed_is_even(run: Run) -> Iterator[Problem]:
    """Example of a check."""
    if run.seed % 2:
        yield Problem(path="seed", message=f"{run.seed} is odd")


def both_learn_alike(run: Run) -> Iterator[Problem]:
    """A check that compares whole tables."""
    if run.policy.optimizer != run.critic.optimizer:
        yield Problem(path="critic.optimizer", message="differs from policy.optimizer")


def test_rules_fill_what_is_unset_one_after_the_other() -> None:
    run, origins, broken = derive(Run(seed=3), RULES, {})
    assert (run.steps, run.judge, run.policy.optimizer.decay) == (6, Model(path="start"), 0.03)
    assert origins["steps"] == (
        DEFAULT,
        Origin(kind="rule", where="steps_follow_the_seed", reads=("seed",)),
    )
    assert broken == frozenset()


def test_what_was_written_is_never_changed() -> None:
    written = Run(steps=5, judge=Model(path="j"), policy=Model(optimizer=Optimizer(decay=0.5)))
    assert derive(written, RULES, {})[0] == written


def test_a_derived_value_that_its_field_refuses_is_told_with_what_it_follows_from() -> None:
    with pytest.raises(ConfigError) as caught:
        derive(Run(seed=-2), RULES, {})
    assert caught.value.problems == (Problem(path="steps", message="-4 is not positive", hint="derived from seed"),)


def test_deriving_again_changes_nothing() -> None:
    once, origins, _ = derive(Run(), RULES, {})
    second, more, _ = derive(once, RULES, origins)
    assert second == once
    assert more == origins


def test_writing_an_ordinary_value_that_equals_the_default_keeps_it() -> None:
    run, _, _ = derive(Run(seed=7), RULES, {"policy.optimizer.decay": ARGUMENT})
    assert run.policy.optimizer.decay == 0.01


def test_a_rule_that_returns_the_unset_value_derives_nothing() -> None:
    run, origins, _ = derive(Run(seed=0), RULES, {})
    assert (run.steps, run.judge) == (None, None)
    assert "steps" not in origins


def test_a_rule_that_reads_a_broken_value_is_skipped_and_so_is_what_follows_from_it() -> None:
    run, _, broken = derive(Run(), RULES, {}, {"seed"})
    assert (run.steps, run.judge, run.policy.optimizer.decay) == (None, None, 0.01)
    assert broken == {"seed", "steps", "judge", "policy.optimizer.decay"}


def test_what_was_written_beside_a_broken_value_is_not_broken() -> None:
    run, _, broken = derive(Run(steps=5), RULES, {"steps": ARGUMENT}, {"seed"})
    assert (run.steps, run.judge) == (5, Model(path="start"))
    assert broken == {"seed", "policy.optimizer.decay"}


def test_a_problem_has_the_place_of_its_value() -> None:
    problems = find_problems(Run(seed=3), (the_seed_is_even,), {"seed": ARGUMENT})
    assert problems == [Problem(path="seed", message="3 is odd", location="argument 1")]
    assert find_problems(Run(seed=4), (the_seed_is_even,), {}) == []


def test_a_check_that_reads_a_broken_value_is_skipped() -> None:
    assert find_problems(Run(seed=3), (the_seed_is_even,), {}, {"seed"}) == []
    assert len(find_problems(Run(seed=3), (the_seed_is_even,), {}, {"steps"})) == 1


def test_nothing_is_checked_when_a_whole_file_is_missing() -> None:
    assert find_problems(Run(seed=3), (the_seed_is_even, both_learn_alike), {}, {""}) == []


def test_tables_can_be_compared_as_a_whole() -> None:
    alike = evolve_at(Run(), "critic.optimizer.lr", 1e-6)
    assert find_problems(alike, (both_learn_alike,), {}) == []
    assert len(find_problems(Run(), (both_learn_alike,), {})) == 1
    assert find_problems(Run(), (both_learn_alike,), {}, {"policy.optimizer.lr"}) == []


def test_the_paths_that_a_function_reads_are_seen() -> None:
    assert paths_read(steps_follow_the_seed.compute, Run()) == {"seed"}
    assert paths_read(lambda run: (run.policy.optimizer.lr, run.judge), Run()) == {"policy.optimizer.lr", "judge"}
    assert paths_read(the_seed_is_even, Run()) == {"seed"}
    assert paths_read(both_learn_alike, Run()) == {"policy.optimizer"}


def test_a_broken_path_touches_what_is_in_it_and_around_it() -> None:
    assert touches(["a.b"], {"a.b"})
    assert touches(["a.b"], {"a"})
    assert touches(["a"], {"a.b"})
    assert touches(["a"], {""})
    assert not touches(["a.b"], {"a.c", "ab", "a.bc"})
    assert not touches([], {"a"})


def test_a_tree_that_is_watched_is_of_the_class_that_it_stands_for() -> None:
    def the_class_is_told(run: Run) -> Iterator[Problem]:
        yield Problem(path="name", message=f"{run.__class__.__name__} {isinstance(run, Run)}")

    [problem] = find_problems(Run(), (the_class_is_told,), {}, {"seed"})
    assert problem.message == "Run True"


@rule(writes="judge.path", reads=("steps",), table="judge")
def the_judge_is_named_after_the_steps(run: Run) -> str:
    return f"after {run.steps}"


@pytest.mark.parametrize(
    ("origins", "path"),
    [
        ({"judge.extra": ARGUMENT}, "after 2"),
        ({"judge": (Origin(kind="python", value=Model()),)}, None),
        ({}, None),
    ],
)
def test_a_table_that_was_given_whole_stands_as_it_is_and_one_that_was_written_leaf_by_leaf_is_filled(
    origins: Origins, path: str | None
) -> None:
    written = {"steps": ARGUMENT, **origins}
    run, _, _ = derive(Run(steps=2, judge=Model()), (the_judge_is_named_after_the_steps,), written)
    assert run.judge == Model(path=path)
