"""How the time of a regular expression grows with the length of a text, from its structure alone.

Python's `re` tries one way after another. It needs more than linear time if a repetition can be left and another one
entered at every letter of the same text, and the rest can then fail: two repetitions p and q, and a word that leads
from p to p, from p to q and from q to q (Weideman et al., "Analyzing matching time behavior of backtracking regular
expression matchers by using ambiguity of NFA", CIAA 2016). A search adds a repetition before the pattern, of
any letters. What is not modelled counts as more ambiguous than it is: word boundaries, and assertions inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]  # the parser of `re` has no public name
from typing import Any, NamedTuple

LETTERS = "".join(map(chr, range(128))) + "\u00e9\u0416\u0663\u2028\u3000\uff5c\u0131"
"""One of each kind: what a pattern distinguishes beyond ASCII is a word letter, a digit, a space, or none of them."""

_ANY = frozenset(LETTERS)
_MOST_COPIES = 20
_LETTERS_OF: dict[tuple[str, int], frozenset[str]] = {}


class _Place(NamedTuple):
    """A place in the pattern that consumes one letter."""

    number: int
    letters: frozenset[str]


class _Automaton:
    """Places of a pattern, joined by empty steps, which may demand what the next letter is."""

    def __init__(self, parsed: Any) -> None:
        self.state = parsed.state
        self.places: list[_Place] = []
        self.steps: list[list[tuple[int, frozenset[str]]]] = []
        self.consumed: dict[int, tuple[int, int]] = {}
        self.start = self._node()
        self.end = self._sequence(list(parsed), self.start)

    def _node(self) -> int:
        self.steps.append([])
        return len(self.steps) - 1

    def _step(self, source: int, target: int, letters: frozenset[str] = _ANY) -> None:
        self.steps[source].append((target, letters))

    def _letter(self, source: int, letters: frozenset[str]) -> int:
        target = self._node()
        self.consumed[source_of := self._node()] = (len(self.places), target)
        self.places.append(_Place(len(self.places), letters))
        self._step(source, source_of)
        return target

    def _set_of(self, item: Any) -> frozenset[str]:
        key = (str(item), self.state.flags)
        if key not in _LETTERS_OF:
            matcher = _compiler.compile(_parser.SubPattern(self.state, [item]), self.state.flags)
            _LETTERS_OF[key] = frozenset(letter for letter in LETTERS if matcher.fullmatch(letter))
        return _LETTERS_OF[key]

    def _sequence(self, items: Sequence[Any], at: int) -> int:
        for number, item in enumerate(items):
            at = self._item(item, at, first=number == 0, last=number == len(items) - 1)
        return at

    def _item(self, item: Any, at: int, *, first: bool, last: bool) -> int:
        kind, argument = item
        match str(kind):
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return self._letter(at, self._set_of(item))
            case "MAX_REPEAT" | "MIN_REPEAT":
                return self._repeat(argument, at)
            case "POSSESSIVE_REPEAT":
                end, left = self._repeat(argument, at), self._node()
                single = len(argument[2]) == 1 and str(argument[2][0][0]) in ("LITERAL", "NOT_LITERAL", "ANY", "IN")
                self._step(end, left, _ANY - self._set_of(argument[2][0]) if single else _ANY)
                return left
            case "SUBPATTERN":
                return self._sequence(list(argument[3]), at)
            case "ATOMIC_GROUP":
                return self._sequence(list(argument), at)
            case "BRANCH":
                return self._branch([list(branch) for branch in argument[1]], at)
            case "GROUPREF_EXISTS":
                return self._branch([list(argument[1]), list(argument[2] or [])], at)
            case "ASSERT":
                consumed = self._sequence(list(argument[1]), at)
                return consumed if (argument[0] < 0 and first) or (argument[0] > 0 and last) else at
            case "ASSERT_NOT" if argument[0] > 0 and len(argument[1]) == 1:
                left = self._node()
                self._step(at, left, _ANY - self._set_of(argument[1][0]))
                return left
            case "ASSERT_NOT":
                if argument[0] > 0:
                    self._sequence(list(argument[1]), at)
                return at
            case "AT":
                return self._anchor(str(argument), at, first=first)
        raise AssertionError(f"no such item is known: {item}")  # a reference to a group, for example

    def _anchor(self, kind: str, at: int, *, first: bool) -> int:
        """A border at which a search begins follows a letter; what has to end here can always fail."""
        if kind in ("AT_END", "AT_END_STRING"):
            return self._node()
        if first and kind == "AT_BOUNDARY":
            return self._letter(at, frozenset(letter for letter in LETTERS if not re.match(r"\w", letter)))
        if first and kind == "AT_BEGINNING" and self.state.flags & re.MULTILINE:
            return self._letter(at, frozenset("\n"))
        return at

    def _branch(self, branches: Iterable[Sequence[Any]], at: int) -> int:
        end = self._node()
        for branch in branches:
            self._step(self._sequence(branch, at), end)
        return end

    def _repeat(self, argument: Any, at: int) -> int:
        least, most, body = argument
        for _ in range(min(least, _MOST_COPIES)):
            at = self._sequence(list(body), at)
        end = self._node()
        self._step(at, end)
        if most == _constants.MAXREPEAT:
            self._step(self._sequence(list(body), end), end)
            return end
        for _ in range(min(most - least, _MOST_COPIES)):
            at = self._sequence(list(body), at)
            self._step(at, end)
        return end

    def after(self, node: int) -> tuple[dict[int, frozenset[str]], set[int], bool]:
        """Places that follow a node with the letters that lead there, those of them that two ways lead to, and whether
        the pattern may end here.
        """
        reached: dict[int, frozenset[str]] = {}
        twice: set[int] = set()
        ends = False
        waiting: list[tuple[int, frozenset[str], tuple[int, ...]]] = [(node, _ANY, (node,))]
        while waiting:
            at, letters, path = waiting.pop()
            ends = ends or at == self.end
            if at in self.consumed:
                position = self.places[self.consumed[at][0]]
                twice |= {position.number} & reached.keys()
                reached[position.number] = reached.get(position.number, frozenset()) | (letters & position.letters)
            waiting += [(to, letters & only, (*path, to)) for to, only in self.steps[at] if path.count(to) < 2]
        return reached, twice, ends


def growth(pattern: str, flags: int = 0, *, searched: bool, full_match: bool = False) -> str:
    """Reason why the time of an expression grows faster than the text, or nothing.

    `searched`: it is tried at every place of a text; `full_match`: it has to match the whole text.
    """
    parsed = _parser.parse(pattern, flags)
    if searched and len(parsed) and str(parsed[0][0]) == "AT" and parsed[0][1] in _anchors(parsed.state.flags):
        searched = False
    automaton = _Automaton(parsed)
    follow: dict[int, dict[int, frozenset[str]]] = {}
    ends: dict[int, bool] = {}
    twice: dict[int, set[int]] = {}
    for position, target in automaton.consumed.values():
        follow[position], twice[position], ends[position] = automaton.after(target)
    if searched:
        first, _, _ = automaton.after(automaton.start)
        follow[-1], ends[-1] = {**first, -1: _ANY}, False
    reached = {position: _reach(follow, position) for position in follow}
    loops = [position for position in follow if position in reached[position]]
    for position in loops:
        if not ends[position] and any(position in reached[successor] for successor in twice.get(position, ())):
            return f"{_shown(automaton, position)} is repeated inside of its own repetition"
    for one in loops:
        for other in loops:
            safe = ends[other] and (not full_match or follow[other].get(other) == _ANY)
            if one != other and not safe and other in reached[one] and _alike(follow, reached, one, other):
                return f"{_shown(automaton, one)} and {_shown(automaton, other)} repeat the same letters"
    return ""


def _anchors(flags: int) -> tuple[Any, ...]:
    return (_constants.AT_BEGINNING_STRING, *(() if flags & re.MULTILINE else (_constants.AT_BEGINNING,)))


def _reach(follow: dict[int, dict[int, frozenset[str]]], position: int) -> set[int]:
    reachable: set[int] = set()
    waiting = [position]
    while waiting:
        new = {to for to, letters in follow[waiting.pop()].items() if letters} - reachable
        reachable |= new
        waiting += new
    return reachable


def _alike(follow: dict[int, dict[int, frozenset[str]]], reached: dict[int, set[int]], one: int, other: int) -> bool:
    """Whether some word leads from `one` to itself, from `one` to `other`, and from `other` to itself."""
    begin, end = (one, one, other), (one, other, other)
    seen, waiting = {begin}, [begin]
    while waiting:
        at = waiting.pop()
        for a, first in follow[at[0]].items():
            if one not in reached[a] and a != one:
                continue
            for b, second in follow[at[1]].items():
                if not first & second or (other not in reached[b] and b != other):
                    continue
                for c, third in follow[at[2]].items():
                    if not first & second & third or (other not in reached[c] and c != other):
                        continue
                    if (new := (a, b, c)) == end:
                        return True
                    if new not in seen:
                        seen.add(new)
                        waiting.append(new)
    return False


def _shown(automaton: _Automaton, position: int) -> str:
    if position == -1:
        return "the search"
    letters = "".join(sorted(automaton.places[position].letters))
    return f"place {position} ({letters[:12]!r})"
