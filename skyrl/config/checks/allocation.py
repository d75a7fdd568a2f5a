"""Checks of allocation strings: they agree with the written fields, and the layouts that they ask for can run."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.derive.allocation import PATH, ROLES, allocation_of, contradictions, strategy_of
from skyrl.config.derive.sizes import models_of, starts_engines
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.errors import Problem


def allocation_matches_fields(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A field that is written as well as the allocation has the allocation's value."""
    for path, (written, expected) in contradictions(run).items():
        yield Problem(
            path=path,
            message=f"{written!r}, but {PATH} = {run.trainer.placement.allocation} sets it to {expected!r}",
            hint="leave one of them out",
        )


def allocation_has_engines_and_learners(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A run that samples and trains needs engines and learners in its allocation."""
    allocation = allocation_of(run)
    if allocation is None:
        return
    if allocation.kind == "serving alone":
        hint = "add learners, as in vllm:d4+fsdp:d4; `skyrl eval` evaluates a model without any"
        yield Problem(path=PATH, message="names only engines, but this run trains", hint=hint)
    if allocation.kind == "learning alone" and starts_engines(run):
        hint = "add engines, as in vllm:d4+fsdp:d4"
        yield Problem(path=PATH, message="names only learners, but this run starts engines", hint=hint)


def allocation_places_every_model(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Each model of the run is a part of its own, or shares the policy's."""
    allocation = allocation_of(run)
    if allocation is None or not allocation.learners:
        return
    if allocation.learner("policy", "actor") is None:
        names = ", ".join(part.name for part in allocation.learners)
        yield Problem(
            path=PATH, message=f"no part is the policy's: the learners are {names}", hint="name one of them [actor]"
        )
    known = {"actor", *ROLES}
    for part in allocation.learners:
        if part.name and part.name not in known:
            yield Problem(
                path=PATH,
                message=f"no model of a run is called {part.name!r}",
                hint=f"the models of this run are {', '.join(models_of(run))}",
            )


def allocation_degrees_are_supported(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """FSDP splits weights, sequences, matrices and experts; pipelines are Megatron's, and so are experts that are split
    otherwise than the attention. One strategy serves a run.
    """
    allocation = allocation_of(run)
    for part in () if allocation is None else allocation.learners:
        facts = strategy_of(part)
        if part.degrees.pipeline > 1 and "pipeline" not in facts.degrees:
            degree = part.degrees.pipeline
            message = f"{part.learner} learners have no pipeline parallelism, but the pipeline degree is {degree}"
            yield Problem(path=PATH, message=message, hint="leave it out: d, t, c and e are supported")
        if part.experts is not None and part.experts.tensor > 1 and "expert_tensor" not in facts.degrees:
            message = (
                f"{part.learner} learners split experts by e alone, but their tensor degree is {part.experts.tensor}"
            )
            yield Problem(path=PATH, message=message, hint="leave it out: d, t, c and e are supported")
    tables = {strategy_of(part).table for part in (() if allocation is None else allocation.learners)}
    if len(tables) > 1:
        yield Problem(
            path=PATH, message="some learners use Megatron and some do not", hint="use one backend for all learners"
        )
