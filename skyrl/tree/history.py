"""The origins of a tree under construction: which source gave each path its value, and which ones before it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from skyrl.errors import Problem
from skyrl.tree.origins import Origin, Origins, Path, dotted
from skyrl.tree.plain import shown


class History:
    """Dotted path -> its origins, winner last."""

    def __init__(self) -> None:
        self._chains: dict[str, list[Origin]] = {}
        self.written: list[str] = []
        """Dotted path of every value that was written, in order, including values replaced or forgotten since."""
        self._around: set[Path] = set()
        """Tables in which something was written, even if it was forgotten since."""

    @property
    def origins(self) -> Origins:
        """Current origins of every path."""
        return {path: tuple(chain) for path, chain in self._chains.items()}

    def winner(self, path: Path) -> Origin | None:
        """Origin of the current value; None if nothing was written."""
        return self._chains.get(dotted(path), [None])[-1]

    def add(self, path: Path, origin: Origin, value: object) -> None:
        """Record `origin` as the source of this value; it takes precedence over earlier ones."""
        self._chains.setdefault(dotted(path), []).append(origin.giving(value))
        self.written.append(dotted(path))
        self._note(path)

    def begin(self, path: Path, origin: Origin, value: object) -> None:
        """Record `origin` as the only source of this value, forgetting earlier ones."""
        self._chains[dotted(path)] = [origin.giving(value)]
        self.written.append(dotted(path))
        self._note(path)

    def _note(self, path: Path) -> None:
        while (path := path[:-1]) and path not in self._around:
            self._around.add(path)

    def forget(self, path: Path) -> None:
        """Forget everything written at the path or inside it."""
        self._chains.pop(dotted(path), None)
        self.forget_inside(path)

    def forget_inside(self, path: Path) -> None:
        """Forget everything written inside a table that is now replaced."""
        if path not in self._around:
            return
        inside = dotted(path) + "."
        for known in [known for known in self._chains if known.startswith(inside)]:
            del self._chains[known]

    def take_over(self, origins: Origins, place: Path) -> None:
        """Adopt the origins of a separately built tree that is now the subtree at `place`."""
        self._note((*place, ""))
        self._chains.update({f"{dotted(place)}.{path}": list(chain) for path, chain in origins.items()})
        self.written += (f"{dotted(place)}.{path}" for path in origins)

    def contradictions(self) -> Iterator[Problem]:
        """Problems where one layer sets a field to two values under two of its names: a file, whose keys have no order,
        or the arguments.
        """
        for path, chain in self._chains.items():
            layers = [(each.asked_by or each, each.value) for each in chain] if len(chain) > 1 else []
            inside = f"{path}."  # an item of the list at this path, which is no other name of it
            by_name = {
                (layer.source, layer.path): (layer, value)
                for layer, value in layers
                if layer.path and not dotted(layer.path).startswith(inside)
            }
            for one, other in combinations(by_name.values(), 2):
                if one[0].source == other[0].source and one[0].path != other[0].path and one[1] != other[1]:
                    (old, former), (new, latter) = (one, other) if dotted(other[0].path) == path else (other, one)
                    both = f"{shown(former)} contradicts {dotted(new.path)} = {shown(latter)}"
                    message = f"{both}: both names are the same field"
                    yield Problem(path=dotted(old.path), message=message, hint=f"keep only {path}", place=old.place)
