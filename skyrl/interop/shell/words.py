"""Expands the words of a script as a shell does, as far as the script determines them: quotes, variables with all their
forms, sums (`$((1024 * 2))`, `((i < 4))`), braces, and commands whose output is known.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

from attrs import define, evolve, frozen

from skyrl.interop.shell.syntax import alternatives, closing, end_of_ansi, end_of_quote, escaped, regular, unquoted
from skyrl.interop.shell.unknown import is_known, outside, separated, shown, unknown
from skyrl.interop.shell.variables import LONGEST, TooLong, Variables
from skyrl.tree.python_source import parsed_expression

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_DEEPEST_SUM = 20
"""Deepest nesting of variables within variables that is resolved."""

_LONGEST_SUM = 500
"""Largest number of characters in one sum."""


def calculated(expression: str, value_of: Callable[[str], str], depth: int = 0) -> int | None:
    """The value of a sum as a shell computes it; None for other operators, and for variables that are not numbers.
    `value_of` gives the text of a variable, empty for one that is not set; `depth` counts variables within variables.
    """
    text = expression.strip() or "0"
    if depth > _DEEPEST_SUM or len(text) > _LONGEST_SUM:
        return None
    choice = re.fullmatch(r"([^?]+)\?([^?:]+):([^?:]+)", text)
    if choice:
        condition = calculated(choice[1], value_of, depth + 1)
        return None if condition is None else calculated(choice[2 if condition else 3], value_of, depth + 1)
    try:
        return _evaluate(parsed_expression(_python_expression(text)), value_of, depth)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _python_expression(text: str) -> str:
    """The expression with the shell's operators in Python's words, and its octal numbers in Python's form."""
    text = text.replace("&&", " and ").replace("||", " or ").replace("\n", " ").replace("//", " invalid invalid ")
    text = re.sub(r"(?<![\w.])0(?=[0-7]+\b)", "0o", text)
    return re.sub(r"!(?!=)", " not ", text)


def _evaluate(node: ast.expr, value_of: Callable[[str], str], depth: int) -> int | None:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.Name(id=name):
            return calculated(value_of(name), value_of, depth + 1)
        case ast.UnaryOp(op=op, operand=operand):
            value = _evaluate(operand, value_of, depth)
            if value is None:
                return None
            return {ast.USub: -value, ast.UAdd: value, ast.Not: int(not value), ast.Invert: ~value}[type(op)]
        case ast.BinOp(left=left, op=op, right=right):
            one, other = _evaluate(left, value_of, depth), _evaluate(right, value_of, depth)
            return None if one is None or other is None else _combined(one, op, other)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            one, other = _evaluate(left, value_of, depth), _evaluate(right, value_of, depth)
            return None if one is None or other is None else int(_COMPARISONS[type(op)](one, other))
        case ast.BoolOp(op=op, values=values):
            results = [_evaluate(item, value_of, depth) for item in values]
            if None in results:
                return None
            return int(all(results) if isinstance(op, ast.And) else any(results))
    return None


def _combined(one: int, op: ast.operator, other: int) -> int | None:
    """The result as a shell computes it, with division rounding towards zero; None if there is none."""
    if type(op) in _OPERATIONS:
        value = _OPERATIONS[type(op)](one, other)
    elif isinstance(op, ast.Div) and other:
        value = abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)
    elif isinstance(op, ast.Mod) and other:
        value = abs(one) % abs(other) * (1 if one >= 0 else -1)
    elif isinstance(op, ast.Pow) and 0 <= other < 64 and abs(one) < 2**16:
        value = one**other
    elif isinstance(op, ast.LShift) and 0 <= other < 63 and abs(one) < 2**62:
        value = one << other
    elif isinstance(op, ast.RShift) and 0 <= other < 64:
        value = one >> other
    else:
        return None
    return value if abs(value) < 2**63 else None


_NAME = re.compile(r"[A-Za-z_]\w*|\d|[@*#?!$-]")
_BRACED = re.compile(r"([A-Za-z_]\w*|\d+|[@*#?!$-])")
_DEFAULT = re.compile(r":?[-=+?]")
_CUT = re.compile(r"##|#|%%|%")
_REPLACED = re.compile(r"//|/#|/%|/")
_CASE: dict[str, Callable[[str], str]] = {
    "^^": str.upper,
    ",,": str.lower,
    "^": lambda text: text[:1].upper() + text[1:],
    ",": lambda text: text[:1].lower() + text[1:],
}
_ANSI = {"n": "\n", "t": "\t", "r": "\r", "e": "\x1b", "E": "\x1b", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_DEEPEST = 40


@frozen
class _Piece:
    text: str
    is_quoted: bool = True
    """Whether the text stays in one word, and is no pattern."""

    ends_word: bool = False
    """Whether the next piece begins another word: `"${ARRAY[@]}"`."""

    is_literal: bool = True
    """Whether the script has the text as it is; spaces in the value of an unquoted variable separate words."""


@define
class Words:
    """Expands words by the variables of a script."""

    variables: Variables
    run: Callable[[str], str]
    """Output of a command, from its text; an unknown text if only running it would tell."""

    _depth: int = 0

    def text(self, word: str) -> str:
        """The word as one text, as an assignment reads it."""
        return "".join(piece.text + (" " if piece.ends_word else "") for piece in self._pieces(word))

    def pattern(self, word: str) -> str:
        """The word as a pattern, in which what was quoted is escaped."""
        return "".join(escaped(piece.text) if piece.is_quoted else piece.text for piece in self._pieces(word))

    def fields(self, word: str) -> list[str]:
        """The words that one written word becomes: none, one or several."""
        return [field for alternative in alternatives(word) for field in self._split(alternative)]

    def split(self, text: str) -> list[str]:
        """The parts of a text between the separators of IFS; an empty one counts if the separator is no space."""
        separators = self.variables.get("IFS") if "IFS" in self.variables.values else None
        if separators and is_known(separators) and separators.strip():
            return re.split("[" + re.escape(separators) + "]", text)
        return separated(text)

    def _split(self, word: str) -> list[str]:
        name = re.fullmatch(r"\$(?:\{(\w+)\}|(\w+))", word)
        value = self.variables.get(name[1] or name[2]) if name else None
        lone = outside(value) if value else None
        if lone and value == unknown(f"${lone[0]}"):  # a list of options that the caller may give
            self.variables.assume_unset(lone[0], "no words")
            return []
        fields: list[str] = []
        current: str | None = None
        for piece in self._pieces(word):
            if piece.is_quoted or piece.is_literal:
                current = (current or "") + piece.text
            else:
                current = self._unquoted(piece.text, current, fields)
            if piece.ends_word:
                fields += [] if current is None else [current]
                current = None
        return fields + ([] if current is None else [current])

    def _unquoted(self, text: str, current: str | None, fields: list[str]) -> str | None:
        """Split an unquoted value, whose first word continues the current one. Returns the last, if it is open."""
        separators = self.variables.get("IFS") if "IFS" in self.variables.values else None
        if separators and is_known(separators) and is_known(text) and set(separators) - set(" \t\n"):
            parts = re.split("[" + re.escape(separators) + "]", text)
            fields += [item for item in [(current or "") + parts[0], *parts[1:-1]] if item] if len(parts) > 1 else []
            return parts[-1] or None if len(parts) > 1 else (current or "") + text
        parts = separated(text)
        if not parts:
            if text and current is not None:
                fields.append(current)
                return None
            return current
        if text[0] in " \t\n" and current is not None:
            fields.append(current)
            current = None
        parts[0] = (current or "") + parts[0]
        fields += parts[:-1]
        if text[-1] in " \t\n":
            fields.append(parts[-1])
            return None
        return str(parts[-1])

    def _pieces(self, word: str) -> list[_Piece]:
        self._depth += 1
        if self._depth > _DEEPEST or len(word) > 10 * LONGEST:
            raise TooLong("a word of the script")
        try:
            return self._scanned(word)
        finally:
            self._depth -= 1

    def _scanned(self, word: str, *, in_double: bool = False) -> list[_Piece]:
        pieces: list[_Piece] = []
        position, plain = 0, ""

        def literal() -> None:
            nonlocal plain
            if plain:
                pieces.append(_Piece(plain, is_quoted=in_double))
            plain = ""

        while position < len(word):
            letter, following = word[position], word[position + 1 : position + 2]
            if letter == "\\":
                if in_double and following not in ("$", "`", '"', "\\", "\n"):
                    plain += "\\" + following
                elif following != "\n":
                    literal()
                    pieces.append(_Piece(following))
                position += 2
            elif letter == "'" and not in_double:
                literal()
                end = end_of_quote(word, position)
                pieces.append(_Piece(word[position + 1 : end - 1]))
                position = end
            elif letter == '"':  # also inside of "${NAME:-"default"}"
                literal()
                end = end_of_quote(word, position)
                inside = self._scanned(word[position + 1 : end - 1], in_double=True)
                pieces += inside or ([] if word[position + 1 : end - 1].strip("\\\n") else [_Piece("")])
                position = end
            elif letter in "$`" and (expansion := self._expansion(word, position, in_double)):
                literal()
                pieces += expansion[0]
                position = expansion[1]
            elif letter == "$" and following == '"' and not in_double:
                position += 1
            else:
                plain += letter
                position += 1
        literal()
        return pieces

    def _expansion(self, word: str, position: int, in_double: bool) -> tuple[list[_Piece], int] | None:
        """The pieces of the expansion that begins there, and the position after it; None if it is a plain character."""
        following = word[position + 1 : position + 2]
        if word[position] == "`":
            end = end_of_quote(word, position)
            text = re.sub(r"\\([$`\\])", r"\1", word[position + 1 : end - 1])
            return [self._value(self.run(text), in_double)], end
        if following == "'" and not in_double:
            end = end_of_ansi(word, position + 1)
            return [_Piece(_ansi(word[position + 2 : end - 1]))], end
        if following in ("(", "{"):
            end = closing(word, position + 1)
            end = end if end > 0 else len(word)
            if following == "(":
                text = word[position:end]
                is_sum = text.startswith("$((") and text.endswith("))")
                return [self._value(self.sum(text[3:-2]) if is_sum else self.run(text[2:-1]), in_double)], end
            return self._braced(word[position + 2 : end - 1], in_double), end
        name = _NAME.match(word, position + 1)
        return (self._expand_name(name[0], in_double), name.end()) if name else None

    def _value(self, text: str, in_double: bool) -> _Piece:
        return _Piece(text, is_quoted=in_double, is_literal=False)

    def sum(self, expression: str) -> str:
        """The value of a sum."""
        if expression.count("(") != expression.count(")"):
            return unknown(f"$(({expression}))")
        # Variables are filled in; names without `$` are left to the calculation.
        filled = "".join(piece.text for piece in self._scanned(expression, in_double=True))
        value = calculated(shown(filled), self._number) if is_known(filled) else None
        return unknown(f"$(({shown(filled)}))") if value is None else str(value)

    def _number(self, name: str) -> str:
        """The text of a variable in a sum, empty for one that is not set."""
        value = self.variables.get(name)
        if value is not None and (names := outside(value)):
            for alias in names:
                self.variables.assume_unset(alias, "0")
            value = self.variables.get(name)
        return "" if value is None else value

    def _expand_name(self, name: str, in_double: bool) -> list[_Piece]:
        if name in "@*":
            return self._expand_items(self.variables.items("@"), in_double and name == "@", in_double)
        if name == "#":
            return [self._value(str(len(self.variables.arguments)), in_double)]
        if name in "$":
            return [self._value(unknown("$($$)"), in_double)]
        value = self.variables.get(name)
        return [self._value("" if value is None else value, in_double)]

    def _expand_items(self, items: list[str], apart: bool, in_double: bool) -> list[_Piece]:
        """Pieces of all items: separate words as `"${A[@]}"`, or one text."""
        if apart:
            return [_Piece(item, ends_word=at < len(items) - 1) for at, item in enumerate(items)]
        return [self._value(" ".join(items), in_double)] if items or in_double else []

    def _braced(self, inside: str, in_double: bool) -> list[_Piece]:
        unchanged = [self._value(unknown("${" + inside + "}"), in_double)]
        counts, indirect = inside.startswith("#") and len(inside) > 1, inside.startswith("!")
        name = _BRACED.match(inside, 1 if counts or indirect else 0)
        if name is None:
            return unchanged
        rest, index = inside[name.end() :], ""
        if rest.startswith("[") and (end := closing(rest, 0)) > 0:
            index, rest = rest[1 : end - 1], rest[end:]
        if name[0] in "@*":
            index = name[0]
        if indirect:
            return self._indirect(name[0], index, rest, in_double) or unchanged
        if index in ("@", "*"):
            return self._expand_array(name[0], index, rest, in_double, counts=counts) or unchanged
        value = self._item(name[0], index) if index else self.variables.get(name[0])
        if name[0] == "#":
            value = str(len(self.variables.arguments))
        if counts:
            return [self._value(str(len(value or "")), in_double)] if is_known(value or "") else unchanged
        if default := _DEFAULT.match(rest):
            return self._default(name[0], index, value, default[0], rest[default.end() :], in_double)
        if not rest:
            return [self._value("" if value is None else value, in_double)]
        if value is not None and not is_known(value):
            return unchanged
        changed = self._changed(value or "", rest)
        return unchanged if changed is None else [self._value(changed, in_double)]

    def _item(self, name: str, index: str) -> str | None:
        array = self.variables.values.get(name)
        key = self.text(index) if name in self.variables.keyed else self.sum(index)
        if not is_known(key):
            return unknown("${" + name + "[" + shown(index) + "]}")
        if isinstance(array, dict):
            if name not in self.variables.keyed and key.startswith("-"):
                items = list(array.values())
                return items[int(key)] if len(items) >= -int(key) else None
            return array.get(key)
        return self.variables.get(name) if key == "0" else None

    def _indirect(self, name: str, index: str, rest: str, in_double: bool) -> list[_Piece]:
        """`${!NAME}`, the variable that NAME names, and `${!ARRAY[@]}`, the keys of an array."""
        if index in ("@", "*"):
            array = self.variables.values.get(name)
            keys = list(array) if isinstance(array, dict) else []
            return self._expand_items(keys, in_double and index == "@", in_double)
        pointed = self.variables.get(name) or ""
        if not is_known(pointed) or not re.fullmatch(r"\w+(\[[\w@*]+\])?", pointed):
            return []
        return self._braced(pointed + rest, in_double)

    def _expand_array(self, name: str, index: str, rest: str, in_double: bool, *, counts: bool) -> list[_Piece]:
        items = self.variables.items(name)
        if any(outside(item) for item in items) and self.variables.is_outside(name) and name not in "@*":
            self.variables.assume_unset(name, "no items")
            items = []
        if counts:
            is_text = name not in "@*" and not isinstance(self.variables.values.get(name), dict)
            if is_text and not all(map(is_known, items)):  # it may be an array
                return []
            return [self._value(str(len(items)), in_double)]
        if default := _DEFAULT.match(rest):
            if default[0][-1] == "+":
                return self._operand(rest[default.end() :], in_double) if items else [self._value("", False)]
            if not items:
                return self._operand(rest[default.end() :], in_double)
            rest = ""
        if rest.startswith(":"):
            cut = self._slice(rest[1:])
            if cut is None:
                return []
            start, length = cut
            if name in "@*":
                items = ["bash", *items]
            items = items[start:] if length is None else items[start : start + length]
            rest = ""
        elif rest and any(not is_known(item) for item in items):
            return []
        if rest:
            changed = [self._changed(item, rest) for item in items]
            if None in changed:
                return []
            items = [item for item in changed if item is not None]
        return self._expand_items(items, in_double and index == "@", in_double) or [
            _Piece("", is_quoted=False, is_literal=False)
        ]

    def _default(
        self, name: str, index: str, current: str | None, form: str, operand: str, in_double: bool
    ) -> list[_Piece]:
        """`${NAME:-default}` and the forms with `=`, `+` and `?`. A variable from outside is assumed to be unset."""
        names = outside(current) if current else None
        if names == [name] and self.variables.is_outside(name):
            self.variables.assume_unset(name, "" if form[-1] in "+?" else shown(self.text(operand)))
            current = None
        elif current is not None and re.fullmatch(r"\d", name) and outside(current) is None and not is_known(current):
            self.variables.assume_unset(f"${name}", shown(self.text(operand)))
            current = None
        is_set = current is not None and (not form.startswith(":") or current != "")
        if form[-1] == "+":
            return self._operand(operand, in_double) if is_set else [self._value("", in_double)]
        if is_set or form[-1] == "?":
            needed = unknown(f"${{{name}}}") if form[-1] == "?" and not is_set else ""
            return [self._value(current if is_set and current is not None else needed, in_double)]
        if form[-1] == "=":
            value = (
                self.text(operand) if not in_double else "".join(p.text for p in self._scanned(operand, in_double=True))
            )
            self.variables.set(name, value)
            return [self._value(value, in_double)]
        return self._operand(operand, in_double)

    def _operand(self, text: str, in_double: bool) -> list[_Piece]:
        """Pieces of a default, whose unquoted spaces separate words."""
        pieces = self._scanned(text, in_double=in_double) or [self._value("", in_double)]
        return [piece if piece.is_quoted else evolve(piece, is_literal=False) for piece in pieces]

    def _changed(self, text: str, form: str) -> str | None:
        """The text after `${NAME%...}`, `${NAME/a/b}`, `${NAME:1:2}` ...; None for a form that is not known."""
        try:
            if cut := _CUT.match(form):
                return self._cut(text, cut[0], self.pattern(form[cut.end() :]))
            if replaced := _REPLACED.match(form):
                return self._replaced(text, replaced[0], form[replaced.end() :])
        except ValueError:
            return None
        if form.startswith(":"):
            cut_out = self._slice(form[1:])
            if cut_out is None:
                return None
            start, end = cut_out
            if end is not None and end >= 0:  # a length; a negative one is counted from the end of the text
                end += start if start >= 0 else len(text) + start
            return text[start:end]
        change = _CASE.get(form)
        return change(text) if change else None

    def _cut(self, text: str, form: str, pattern: str) -> str | None:
        if not is_known(pattern):
            return None
        expression = re.compile(regular(pattern))
        ends = range(len(text) + 1)
        if form[0] == "#":
            positions = [at for at in ends if expression.fullmatch(text[:at])]
            return text if not positions else text[positions[-1 if form == "##" else 0] :]
        positions = [at for at in ends if expression.fullmatch(text[at:])]
        return text if not positions else text[: positions[0 if form == "%%" else -1]]

    def _replaced(self, text: str, form: str, rest: str) -> str | None:
        slash = next(iter(unquoted(rest, "/")), len(rest))
        pattern, replacement = self.pattern(rest[:slash]), self.text(rest[slash + 1 :])
        if not is_known(pattern) or not is_known(replacement):
            return None
        if not pattern:
            return {"/#": replacement + text, "/%": text + replacement}.get(form, text)
        expression = regular(pattern)
        expression = {"/#": r"\A" + expression, "/%": expression + r"\Z"}.get(form, expression)
        return re.sub(expression, lambda match: replacement, text, count=0 if form == "//" else 1)

    def _slice(self, form: str) -> tuple[int, int | None] | None:
        """Start and length of `:1:2`."""
        start, colon, length = form.partition(":")
        numbers = [self.sum(item.strip()) for item in ([start, length] if colon else [start])]
        if not all(re.fullmatch(r"-?\d+", number) for number in numbers):
            return None
        return int(numbers[0]), int(numbers[1]) if colon else None


def _ansi(text: str) -> str:
    """Text of `$'...'`."""

    def one(match: re.Match[str]) -> str:
        escape = match[1]
        if escape[0] == "x":
            return chr(int(escape[1:], 16))
        if escape[0] in "01234567":
            return chr(int(escape, 8))
        return _ANSI.get(escape, escape if escape in "\\'\"?" else "\\" + escape)

    return re.sub(r"\\(x[0-9a-fA-F]{1,2}|[0-7]{1,3}|.)", one, text, flags=re.DOTALL)
