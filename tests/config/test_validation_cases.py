"""What SkyRL says about a run, case by case: what it refuses we refuse with a path and a remedy, what it takes we take.

The cases are in `validation_cases.json` (see `--reference`). Every difference is one of those that stand below, with
the reason. Refusals of what this version does not implement yet do not count.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from skyrl.config import ConfigError, load
from skyrl.config.loading.kinds import RL
from skyrl.config.loading.resolve import resolve_with_origins
from skyrl.errors import Problem

Case = dict[str, Any]

OURS = list(RL.checks)

TAKEN_HERE = {
    r"(trainer|generator)\.rope_(scaling|theta)": "a field of the seeds' tree, which a later SkyRL took away",
    r"generator\.inference_engine\.(async_engine|enable_http_endpoint|http_endpoint_\w+|override_existing_update_group"
    r"|remote_urls)": "a field of the seeds' tree, which a later SkyRL took away",
    r"generator\.inference_engine\.weight_sync_backend=gloo": "Megatron's weights are gathered whole: they go any way",
    r"trainer\.strategy=megatron .*trainer\.critic\.model\.path": "critics learn under Megatron, too",
    r"trainer\.policy\.language_model_only": "learners are the language model alone, whatever the engines serve",
    r"trainer\.algorithm\.loss_reduction=seq_mean_token_sum_norm": "max_seq_len is derived, as in the seeds' SkyRL",
    r"data\.dataloader\.|trainer\.vocab_entropy_chunk_size=": "read by no part of skyrl, so dropped with a warning",
}
"""Overrides that SkyRL refuses and we take -> why."""

REFUSED_HERE = {
    r"SkyRL added this after March 2026": "a field that SkyRL added later is not in our tree",
    r"is not (one of|a whole number|a number|between|positive|zero or positive|at least|true or false)": "SkyRL checks "
    "neither types nor ranges, and breaks later or does something else",
    r"is not implemented yet": "a name that this version does not know yet",
}
"""What we say about a run that SkyRL takes -> why."""


REFUSED_ELSEWHERE = {
    "mega_replay_only": "trainer.policy.moe_enable_routing_replay",  # the field that the old name stands for
    "plus_prefix": "+trainer.foo",  # as it was written
    "lora_backend": "trainer.placement.colocate_all",  # SGLang takes adapters here, and no turns with learners
    "bs_not_div": "trainer.policy_mini_batch_size",  # which does not divide what was written
}
"""Case -> the path of our refusal, where that is not one that the case writes."""


@pytest.fixture(scope="module")
def cases(reference: Path) -> list[Case]:
    """Those of reinforcement learning; serving and fine-tuning have trees of their own."""
    cases = json.loads((reference / "validation_cases.json").read_text())["cases"]
    return [case for case in cases if case["kind"] == "train"]


def refusals(case: Case) -> list[Problem]:
    """What is wrong with a case, on a machine with GPUs, where the reference was asked."""
    try:
        loaded = load([], ["trainer.device=cuda", *case["overrides"]])
    except ConfigError as error:
        return list(error.problems)
    run, _, _ = resolve_with_origins(loaded.config, loaded.origins)
    return [problem for check in OURS for problem in check(run) if problem.severity == "error"]


def test_what_skyrl_refuses_is_refused_where_it_was_written(cases: list[Case]) -> None:
    wrong = [case for case in cases if case["outcome"] == "error"]
    assert len(wrong) >= 30
    elsewhere = {}
    for case in wrong:
        problems = refusals(case)
        explained = any(re.search(pattern, " ".join(case["overrides"])) for pattern in TAKEN_HERE)
        paths = written(case) | {REFUSED_ELSEWHERE.get(case["id"], "")}
        if not explained and not any(_is_at(problem.path, path) for problem in problems for path in paths):
            elsewhere[case["id"]] = [problem.path for problem in problems]
    assert elsewhere == {}


def test_every_refusal_says_what_else_to_do(cases: list[Case]) -> None:
    """With a hint, or where the message itself lists what may stand there."""
    problems = [problem for case in cases for problem in refusals(case)]
    listed = re.compile(r"is not (one of: |positive$|between .* and |a whole number$|a number$)|^no such field of ")
    assert [str(problem) for problem in problems if not problem.hint and not listed.search(problem.message)] == []


def written(case: Case) -> set[str]:
    """The paths of a case's own overrides; every case has a logger, too."""
    paths = {re.split(r"\+?=", override, maxsplit=1)[0].lstrip("+~") for override in case["overrides"]}
    return paths - {"trainer.logger"}


def _is_at(path: str, location: str) -> bool:
    """Is it the location, in it, or around it?"""
    return f"{path}.".startswith(f"{location}.") or f"{location}.".startswith(f"{path}.")


def test_what_skyrl_takes_is_taken_or_must_not_be(cases: list[Case]) -> None:
    right = [case for case in cases if case["outcome"] == "ok"]
    assert len(right) >= 10
    refused = {
        case["id"]: str(problem)
        for case in right
        for problem in refusals(case)
        if not any(re.search(pattern, f"{problem.message} {problem.hint}") for pattern in REFUSED_HERE)
    }
    assert refused == {}


def test_no_case_ends_in_anything_but_our_own_errors(cases: list[Case]) -> None:
    for case in cases:
        refusals(case)
