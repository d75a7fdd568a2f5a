"""Allocation strings in AReaL's syntax: how many GPUs each part gets, and how each part shards its model.

    vllm:d4t2+fsdp:d8                                engines on 8 GPUs, learners on 8 others
    vllm:d2t4|megatron:d2t4                          both on the same 8, taking turns
    sglang:d4+megatron:(attn:d1p2t2|ffn:d1p2e2)      attention and experts are split differently
    vllm[rollout]:d2+fsdp[actor]:d4|fsdp[critic]:d4  parts by name; `|` binds tighter than `+`
    vllm:d4t2+eval                                   engines alone, for evaluation

Degrees: d data, p pipeline, t or m tensor, c context, e expert; in any order, 1 if omitted. The grammar accepts every
degree; the check of a configuration decides which are supported.
"""

from __future__ import annotations

import re
from typing import Literal

from attrs import evolve, field, frozen

from skyrl.planning.topology import Degrees

ENGINES = ("vllm", "sglang")
LEARNERS = ("fsdp", "megatron", "archon")
WITHOUT_GPUS = ("eval", "cpu")
UNNAMED_AT_MOST = 2
"""Largest number of parts without names: engines and learners."""

_LETTERS = {"d": "data", "p": "pipeline", "t": "tensor", "m": "tensor", "c": "context", "e": "expert"}
_PART = re.compile(
    r"(?:(?P<backend>[a-z]+)(?:\[(?P<name>\w+)\])?[:.])?\(?(?P<degrees>attn:[a-z0-9]+\|ffn:[a-z0-9]+|[a-z0-9]+)\)?"
)
_DEGREES = re.compile(r"(?:[a-z][1-9][0-9]*)+")


class AllocationError(ValueError):
    """An allocation string that cannot be read; the message says which part, and why."""


@frozen(kw_only=True)
class Part:
    """One part of an allocation: engines of one kind, or one model."""

    backend: str = ""
    """vllm, sglang, fsdp, megatron, archon, eval or cpu; empty where the string does not say."""

    name: str = ""
    """Name in brackets, such as `rollout`, `actor` or `critic`."""

    degrees: Degrees = field(factory=Degrees)
    """How the GPUs share the model, or only its attention if experts are split differently."""

    experts: Degrees | None = None
    """How the GPUs share the experts. None: they are not spread, and shared as the rest."""

    @property
    def is_engine(self) -> bool:
        """Whether the part generates."""
        return self.backend in ENGINES

    @property
    def gpus(self) -> int:
        """Number of GPUs of all ranks."""
        return 0 if self.backend in WITHOUT_GPUS else self.degrees.ranks

    @property
    def learner(self) -> str:
        """Backend of a learner: the given one; by default Megatron with pipeline or expert parallelism, else FSDP."""
        split = self.experts is not None or self.degrees.pipeline > 1 or self.degrees.expert > 1
        return self.backend or ("megatron" if split else "fsdp")


@frozen(kw_only=True)
class Allocation:
    """All parts of a string. The parts of a group share their GPUs; groups have separate GPUs."""

    groups: tuple[tuple[Part, ...], ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts, in the order of the string."""
        return tuple(part for group in self.groups for part in group)

    @property
    def engines(self) -> Part | None:
        """The part that generates; None where the string trains only."""
        return next((part for part in self.parts if part.is_engine), None)

    @property
    def kind(self) -> Literal["training", "learning alone", "serving alone"]:
        """Whether the allocation generates and learns, or only one of the two."""
        if self.engines is None:
            return "learning alone"
        return "training" if any(self.learners) else "serving alone"

    @property
    def learners(self) -> tuple[Part, ...]:
        """The parts that learn or score."""
        return tuple(part for part in self.parts if not part.is_engine and part.backend not in WITHOUT_GPUS)

    @property
    def shares(self) -> bool:
        """Whether engines and a learner take turns on the same GPUs."""
        return any(len(group) > 1 and any(part.is_engine for part in group) for group in self.groups)

    @property
    def gpus(self) -> int:
        """Number of GPUs of all groups."""
        return sum(max(part.gpus for part in group) for group in self.groups)

    def learner(self, *names: str) -> Part | None:
        """The learner with the first of these names that exists; the only learner if learners have no names."""
        named = {part.name: part for part in self.learners}
        chosen = next((named[name] for name in names if name in named), None)
        return chosen or (self.learners[0] if len(self.learners) == 1 and not self.learners[0].name else None)


def read_allocation(text: str) -> Allocation:
    """The parts of an allocation string. Raises `AllocationError`."""
    groups = tuple(tuple(map(read_part, _split_group(group))) for group in _bare(text).split("+"))
    allocation = Allocation(groups=groups)
    parts, names = allocation.parts, [part.name for part in allocation.parts if part.name]
    if len(parts) > UNNAMED_AT_MOST and len(names) < len(parts):
        raise AllocationError(f"{len(parts)} parts each need a name, such as vllm[rollout]:d4 or fsdp[actor]:d8")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise AllocationError(f"two parts have the name {twice}")
    for group in groups:
        if len({part.gpus for part in group}) > 1:
            sizes = " and ".join(str(part.gpus) for part in group)
            raise AllocationError(
                f"parts that share GPUs (|) must take the same number of them, but these take {sizes}"
            )
    if sum(part.is_engine for part in parts) > 1:
        raise AllocationError("two parts generate, but a run has only one kind of engine")
    return allocation


def read_part(text: str) -> Part:
    """One part, such as `fsdp:d4`, which is also the form of a single engine's `backend`. Raises `AllocationError`."""
    bare = _bare(text)
    if bare in WITHOUT_GPUS:
        return Part(backend=bare)
    match = _PART.fullmatch(bare)
    if match is None or bare.count("(") != bare.count(")"):
        raise AllocationError(f"{text!r} is not a part: write a backend and degrees, such as vllm:d4t2 or fsdp:d8")
    backend, name, degrees = match["backend"] or "", match["name"] or "", match["degrees"]
    if backend == "attn":
        backend, degrees = "", bare.strip("()")
    if backend not in ("", *ENGINES, *LEARNERS):
        known = ", ".join((*ENGINES, *LEARNERS))
        raise AllocationError(f"{backend!r} in {text!r} is not a backend; available: {known}")
    attention, _, experts = degrees.partition("|")
    part = Part(
        backend=backend,
        name=name,
        degrees=_degrees(attention.removeprefix("attn:"), text),
        experts=_degrees(experts.removeprefix("ffn:"), text) if experts else None,
    )
    return _checked(part, text, written=experts)


def _bare(text: str) -> str:
    return "".join(text.split())


def _split_group(group: str) -> list[str]:
    """Parts between `|`, except the `|` between attention and experts of a hybrid."""
    pieces: list[str] = []
    for piece in group.split("|"):
        if piece.startswith("ffn:") and pieces and "attn:" in pieces[-1]:
            pieces[-1] += f"|{piece}"
        else:
            pieces.append(piece)
    return pieces


def _degrees(text: str, part: str) -> Degrees:
    if not _DEGREES.fullmatch(text):
        raise AllocationError(f"{text!r} in {part!r} are not degrees: write letters with numbers from 1, such as d4t2")
    degrees: dict[str, int] = {}
    for letter, number in re.findall(r"([a-z])(\d+)", text):
        if letter not in _LETTERS:
            raise AllocationError(f"{letter + number!r} in {part!r}: the degrees are d, p, t (or m), c and e")
        if _LETTERS[letter] in degrees:
            raise AllocationError(f"{part!r} gives the {_LETTERS[letter]} degree twice")
        degrees[_LETTERS[letter]] = int(number)
    return Degrees(**degrees)


def _checked(part: Part, text: str, written: str) -> Part:
    """The part, with the data degree of its experts filled in if omitted."""
    degrees, experts = part.degrees, part.experts
    if part.is_engine and (degrees.context > 1 or degrees.expert > 1 or experts):
        raise AllocationError(f"{text!r}: engines have the degrees d, t and p")
    if experts is None:
        if degrees.expert == 1:
            return part
        # AReaL does not split the matrices of experts; in 2025, whose strings may name no backend, it did as the rest.
        tensor = 1 if part.backend else degrees.tensor
        experts = Degrees(pipeline=degrees.pipeline, tensor=tensor, expert=degrees.expert)
        inner = degrees.pipeline * tensor * degrees.expert
        if degrees.ranks % inner:
            factors = "pipeline x expert" if part.backend else "pipeline x tensor x expert"
            raise AllocationError(f"{text!r}: {factors} = {inner} does not divide {degrees.ranks} ranks")
    if experts.pipeline != degrees.pipeline:
        raise AllocationError(
            f"{text!r}: attention has {degrees.pipeline} pipeline stages and experts {experts.pipeline}, "
            "but both must have the same number"
        )
    inner = experts.pipeline * experts.tensor * experts.expert
    if "d" not in written.removeprefix("ffn:") and degrees.ranks % inner == 0:
        experts = evolve(experts, data=degrees.ranks // inner)
    if experts.data * inner != degrees.ranks:
        raise AllocationError(
            f"{text!r}: attention takes {degrees.ranks} ranks and experts {experts.data * inner}, but both must use "
            "the same ranks"
        )
    return evolve(part, experts=experts)
