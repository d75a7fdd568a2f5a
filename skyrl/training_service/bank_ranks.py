"""All ranks of the models that learn, as one.

Each rank holds a shard of the base, or all of it, and every model. The sequences of a pass are cut over the ranks, and
gradients are summed, so that all ranks take the same optimizer steps: the number of ranks changes no result beyond
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from skyrl.errors import RequestError, RunError
from skyrl.processes.gather_or_cancel import gather_or_cancel
from skyrl.processes.handles import Group, Handle
from skyrl.training_service.backend import PassRequest, PassResult
from skyrl.training_service.model_bank import ModelBank

P = ParamSpec("P")
R = TypeVar("R")


class BankRanks:
    """The ranks. Methods are called one after the other."""

    def __init__(self, ranks: Group[ModelBank]) -> None:
        self._ranks = ranks

    async def call(self, method: Callable[Concatenate[ModelBank, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of a method on rank 0, after every rank has run it. Raises the `RequestError` of the ranks, and
        `RunError` if only some of them refuse: their models are not the same any more.
        """
        results = await self._call_ranks(method, *args, **kwargs)
        return results[0]

    async def passes(self, requests: Sequence[PassRequest]) -> list[PassResult | Exception]:
        """See `Backend.passes`."""
        return [_whole(shares) for shares in zip(*await self._call_ranks(ModelBank.passes, requests), strict=True)]

    async def _call_ranks(
        self, method: Callable[Concatenate[ModelBank, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        async def outcome(rank: Handle[ModelBank]) -> R | RequestError:
            try:
                return await rank.call(method, *args, **kwargs)
            except RequestError as error:
                return error

        outcomes = await gather_or_cancel([outcome(rank) for rank in self._ranks.handles])
        results = [item for item in outcomes if not isinstance(item, RequestError)]
        refusals = [entry for entry in outcomes if isinstance(entry, RequestError)]
        if refusals and results:
            raise RunError(f"some ranks of the models that learn failed, and the others did not: {refusals[0]}")
        if refusals:
            raise refusals[0]
        return results


def _whole(shares: Sequence[PassResult | Exception]) -> PassResult | Exception:
    """The result of a pass from those of its ranks, which all succeeded or all failed."""
    results = [share for share in shares if isinstance(share, PassResult)]
    if len(results) < len(shares):
        return next(share for share in shares if isinstance(share, Exception))
    outputs = [next(filter(None, item)) for item in zip(*(result.outputs for result in results), strict=True)]
    return PassResult(outputs=outputs, metrics=results[0].metrics)
