"""Data-parallel replicas: the groups of a model's ranks that compute together on the same rows."""

from __future__ import annotations

from attrs import field, frozen


@frozen
class Replicas:
    """The ranks of a model as data-parallel replicas: the ranks of one replica share a copy of the model (tensor,
    context and pipeline parallel), and get the same rows.
    """

    of_rank: tuple[int, ...] = field()
    """Data-parallel index of each rank: the number of its replica, counted from 0."""

    @of_rank.validator
    def _check_indices(self, _: object, value: tuple[int, ...]) -> None:
        if set(value) != set(range(max(value, default=-1) + 1)) or not value:
            raise ValueError(f"data-parallel indices count from 0 without gaps, not {value}")

    @property
    def count(self) -> int:
        """Number of replicas, and so of the parts into which a batch is split."""
        return max(self.of_rank) + 1

    @property
    def reporting(self) -> tuple[int, ...]:
        """For each replica, in order, the rank that returns its results: the last one, which is on the last stage of a
        pipeline.
        """
        last = {replica: rank for rank, replica in enumerate(self.of_rank)}
        return tuple(last[replica] for replica in range(self.count))


def replicas(ranks: int, *, inner: int = 1, stages: int = 1) -> Replicas:
    """The replicas of `ranks` ranks in Megatron's order: `inner` ranks (tensor x context parallel) are consecutive, and
    ranks of different pipeline stages are furthest apart.

    Raises ValueError unless `inner` x `stages` divides `ranks`.
    """
    count, rest = divmod(ranks, inner * stages)
    if rest or not count:
        raise ValueError(f"{ranks} ranks do not make whole replicas of {inner} x {stages}")
    return Replicas(tuple(rank // inner % count for rank in range(ranks)))
