"""Reads a shell script as a shell would, without running anything: which programs it starts, and with which words.

The grammar is tree-sitter's of Bash (the extra `convert`). What the script itself decides is followed: assignments,
defaults, branches, loops over lists, functions. A script is read as if it were called without arguments, and as if a
variable that it takes from outside were not set, where one of both has to be assumed. What only running it would tell,
such as `$(nproc)` or whether a file exists, stays unknown, and so does everything that depends on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from attrs import define, evolve, field, frozen

from skyrl.installation import install_command
from skyrl.interop import not_converted
from skyrl.interop.shell.conditions import holds, known
from skyrl.interop.shell.syntax import regular, split_words
from skyrl.interop.shell.unknown import is_known, outside, shown, unknown, without_marks
from skyrl.interop.shell.variables import LONGEST, Array, TooLong, Variables
from skyrl.interop.shell.words import Words

if TYPE_CHECKING:
    from tree_sitter import Node

_MOST_STEPS = 50_000
_MOST_ROUNDS = 200
"""Largest number of rounds of one loop."""

_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")
_DISGUISE = re.compile("[\u00a1-\u00a5][\u00c0-\u00ff]{3}")
_LETTERS = ((0xA1, 18), (0xC0, 12), (0xC0, 6), (0xC0, 0))
"""First letter of a range, and the place of six bits of a character's number in it."""

_COMMENT = re.compile(r"(?<=\s)`[ \t]*#[^`\n]*`(?=\s|$)")
"""A comment between the arguments of a command: a command substitution that holds only a comment."""

_WORDS = (
    "word", "number", "string", "raw_string", "ansi_c_string", "translated_string", "concatenation", "expansion",
    "simple_expansion", "command_substitution", "process_substitution", "arithmetic_expansion", "brace_expression",
    "extglob_pattern", "regex", "variable_name", "special_variable_name", "array", "test_command", "heredoc_body",
)  # fmt: skip
"""Kinds of nodes whose inside is read by `words` and `conditions`, so that the grammar need not understand it."""

_SHELLS = ("bash", "sh", "/bin/bash", "/bin/sh", "/usr/bin/bash", "zsh")


@frozen(kw_only=True)
class ScriptCommand:
    """A program that the script starts."""

    line: int
    words: tuple[str, ...]
    """Name and arguments, without quotes. Unknown parts are marked as in `shell.unknown`."""

    is_certain: bool = True
    """Whether the script starts it in any case, rather than depending on what cannot be decided."""

    @property
    def texts(self) -> list[str]:
        """The words with the source of unknown parts in its place."""
        return [shown(word) for word in self.words]


@frozen(kw_only=True)
class Script:
    """A script, as far as it can be followed without running it."""

    commands: tuple[ScriptCommand, ...]
    assumed: tuple[tuple[str, str], ...] = ()
    """Variables from outside that were assumed to be unset, and what the script makes of that."""

    undecided: tuple[tuple[int, str], ...] = ()
    """Lines with a condition that only running the script would decide, and the condition."""

    sourced: tuple[tuple[int, str], ...] = ()
    """Lines that read another script with `source`, and its name: what it sets is not known."""

    ends: int = 0
    """Line of the `exit` that ends it; 0 if it ends by itself."""


def read_script(text: str, name: str = "script") -> Script:
    """Read a script. Raises `ConfigError` for a text that is no script of Bash, for one whose loops do not end, and if
    the grammar is not installed.
    """
    text = without_marks(text).replace("\r\n", "\n").replace("\0", "")
    text = _COMMENT.sub(lambda match: " " * len(match[0]), text)
    text = re.sub(r"\\\s*\Z", "\n", text)  # a line that continues on none
    tree = _parsed(text, name)
    if broken := _broken(tree):
        message = f"line {_line(broken)}: not understood as a shell script: {_excerpt(_source(broken))!r}"
        raise not_converted(name, message, "write the command out in a script of its own, and convert that")
    assumed: dict[str, str] = {}
    for _ in range(10):  # what is assumed of a variable holds in the lines before, too
        before = set(assumed)
        shell = _Shell(Variables(values={"HOME": "~"}, assumed=assumed), name)
        try:
            shell.run_all(tree.children)
        except _ControlFlow as end:
            shell.ends = end.line
        except (TooLong, RecursionError) as error:
            raise not_converted(name, f"cannot be followed to its end, for want of a bound: {error}") from None
        if set(assumed) == before:
            break
    return Script(
        commands=tuple(shell.commands),
        assumed=tuple(assumed.items()),
        undecided=tuple(dict.fromkeys(shell.undecided)),
        sourced=tuple(dict.fromkeys(shell.sourced)),
        ends=shell.ends,
    )


def _parsed(text: str, name: str) -> Node:
    try:
        import tree_sitter_bash
        from tree_sitter import Language, Parser
    except ImportError:
        message = "scripts are read with a grammar of the shell, which is not installed"
        raise not_converted(name, message, install_command("convert")) from None
    return Parser(Language(tree_sitter_bash.language())).parse(_disguised(text).encode()).root_node


def _broken(node: Node) -> Node | None:
    """The first part that the grammar does not understand, apart from the inside of words."""
    if node.type == "ERROR" or node.is_missing:
        return node
    if not node.has_error or node.type in _WORDS:
        return None
    return next((part for child in node.children if (part := _broken(child))), None)


def _disguised(text: str) -> str:
    """The text with four letters from \u00a1 to \u00ff for each character beyond ASCII. The grammar's scanner looks
    characters up in C's table of 256 (`isalnum`), and crashes at higher ones (tree-sitter-bash 0.25).
    """

    def letters(match: re.Match[str]) -> str:
        return "".join(chr(base + (ord(match[0]) >> shift & 63)) for base, shift in _LETTERS)

    return _BEYOND_ASCII.sub(letters, text)


def _plain_text(source: bytes | None) -> str:
    """The text of a part of the tree, without disguise."""

    def character(match: re.Match[str]) -> str:
        return chr(sum(ord(letter) - base << shift for letter, (base, shift) in zip(match[0], _LETTERS, strict=True)))

    return _DISGUISE.sub(character, (source or b"").decode("utf-8", "replace"))


def _source(node: Node) -> str:
    return _plain_text(node.text)


def _excerpt(text: str) -> str:
    first = text.strip().partition("\n")[0]
    return first if len(first) <= 60 else first[:57] + "..."


def _line(node: Node) -> int:
    return int(node.start_point.row) + 1


def _statements(node: Node) -> list[Node]:
    return [child for child in node.children if child.is_named and child.type != "comment"]


@define
class _ControlFlow(Exception):
    """`exit`, `return`, `break` or `continue`."""

    kind: str
    line: int
    levels: int = 1


Status = int | None
"""Exit status of a command; None if only running it would tell."""


@define
class _Shell:
    """A shell that starts no programs but remembers them."""

    variables: Variables
    name: str
    functions: dict[str, Node] = field(factory=dict)
    commands: list[ScriptCommand] = field(factory=list)
    undecided: list[tuple[int, str]] = field(factory=list)
    exported: set[str] = field(factory=set)
    sourced: list[tuple[int, str]] = field(factory=list)
    ends: int = 0
    output: list[str] | None = None
    """Where `echo` writes, inside of a command substitution."""

    input: str | None = None
    """What `<<< "text"` gives to the command that runs."""

    is_certain: bool = True
    status: Status = 0
    line: int = 1
    _steps: list[int] = field(factory=lambda: [0])
    _frames: list[dict[str, str | Array | None]] = field(factory=list)
    """For each function that runs: its local variables, and the values that they hide."""

    _depth: int = 0
    _depth_of_text: int = 0
    """How many texts enclose the statement that runs: `eval "..."`, `$(...)`. It has no line of its own."""

    @property
    def words(self) -> Words:
        """Expands words at this point of the script."""
        return Words(self.variables, self._output_of)

    # -- Lists of commands

    def run_all(self, nodes: Iterable[Node]) -> Status:
        """Run statements in order. Returns the status of the last."""
        for node in nodes:
            if node.is_named and node.type != "comment":
                self.run(node)
        return self.status

    def run(self, node: Node) -> Status:
        """Run one statement."""
        self._steps[0] += 1
        if self._steps[0] > _MOST_STEPS:
            raise TooLong("the number of its commands")
        if self._depth_of_text == 0:
            self.line = _line(node)
        run = _RUN.get(node.type)
        if run is not None:
            self.status = run(self, node)
        return self.status

    def _list(self, node: Node) -> Status:
        """`a && b`, `a || b`. A program whose status is unknown is taken to succeed; a condition is not."""
        parts = _statements(node)
        operator = next((child.type for child in node.children if child.type in ("&&", "||")), "&&")
        if len(parts) < 2:
            return self.run_all(parts)
        first = self.run(parts[0])
        if first is None and not self._is_condition(parts[0]):
            first = 0
        if first is None:
            return self._either(node, parts[0], [lambda shell: shell.run_all(parts[1:]), None])
        return self.run_all(parts[1:]) if (first == 0) == (operator == "&&") else first

    def _is_condition(self, node: Node) -> bool:
        """Whether the statement asks something, rather than doing it."""
        if node.type in ("list", "negated_command", "pipeline", "redirected_statement"):
            return any(self._is_condition(child) for child in node.children if child.is_named)
        first = _source(node).split(maxsplit=1)[:1]
        return node.type == "test_command" or first in (["["], ["test"], ["grep"], ["command"], ["which"], ["type"])

    def _negated(self, node: Node) -> Status:
        status = self.run_all(node.children)
        return None if status is None else int(status == 0)

    def _group(self, node: Node) -> Status:
        if node.children and node.children[0].type == "((":
            return self._sum(_source(node)[2:-2])
        return self.run_all(node.children)

    def _pipeline(self, node: Node) -> Status:
        status: Status = 0
        parts = _statements(node)
        for at, child in enumerate(parts):
            inner = self._forked_shell()
            inner.output = self.output if at == len(parts) - 1 else []
            passes_over = _source(child).split(maxsplit=1)[:1] in (["echo"], ["printf"])
            if at and self.output is not None and not passes_over:
                inner.output = []  # what a program makes of its input is unknown
                self.output.append(unknown(f"$({_excerpt(_source(node))})"))
            status = inner.finish([child])
        return status if len(parts) == 1 else None

    def _forked_shell(self) -> _Shell:
        """A shell of its own with the same state, which remembers commands with this one."""
        return evolve(self, variables=self.variables.copy(), functions=dict(self.functions), frames=list(self._frames))

    def finish(self, nodes: Sequence[Node]) -> Status:
        """Run statements to the end of this shell."""
        try:
            return self.run_all(nodes)
        except _ControlFlow:
            return None

    def in_text(self, tree: Node) -> Status:
        """Run a script that is inside of a word, to the end of this shell. Raises `TooLong`."""
        self._depth_of_text += 1
        if self._depth_of_text > 30:
            raise TooLong("commands within commands")
        return self.finish(tree.children)

    # -- Branches and loops

    def _branches(self, node: Node, clauses: list[tuple[list[Node], list[Node]]]) -> Status:
        if not clauses:
            self.status = 0
            return 0
        (condition, body), rest = clauses[0], clauses[1:]
        if not condition:
            return self.run_all(body) if body else 0
        status = self.run_all(condition)
        if status is None:
            return self._either(
                node, condition[0], [lambda shell: shell.run_all(body), lambda shell: shell._branches(node, rest)]
            )
        self.status = 0
        return (self.run_all(body) if body else 0) if status == 0 else self._branches(node, rest)

    def _either(self, node: Node, condition: Node, branches: Sequence[Callable[[_Shell], Status] | None]) -> Status:
        """Follow every branch of a condition that cannot be decided: what differs afterwards is unknown. A branch that
        leaves the script or a loop is taken not to happen.
        """
        self.undecided.append((_line(condition), _excerpt(_source(condition))))
        ended: list[_Shell] = []
        left: list[_ControlFlow] = []
        for branch in branches:
            shell = self._forked_shell()
            shell.is_certain = False
            shell.output = None if self.output is None else []
            try:
                if branch is not None:
                    branch(shell)
                ended.append(shell)
            except _ControlFlow as jump:
                left.append(jump)
        if not ended:
            raise left[0]
        if left:
            self.is_certain = False
        if self.output is not None and any(shell.output for shell in ended):
            self.output.append(unknown("$(...)"))
        self._merge(ended, _line(condition))
        return None

    def _merge(self, shells: list[_Shell], line: int) -> None:
        names = {name for shell in shells for name in shell.variables.values}
        for name in sorted(names):
            values = [shell.variables.values.get(name, "") for shell in shells]
            is_set = all(name in shell.variables.values for shell in shells)
            is_same = is_set and all(value == values[0] for value in values)
            self.variables.values[name] = values[0] if is_same else unknown(f"$({name} of line {line})")
        self.functions |= {name: body for shell in shells for name, body in shell.functions.items()}
        self.exported |= {name for shell in shells for name in shell.exported}

    def _case(self, node: Node) -> Status:
        value_node = node.child_by_field_name("value")
        word = _source(value_node) if value_node else ""
        value = known(self.words.text(word), self.words, word)
        items = [child for child in node.children if child.type == "case_item"]
        if not is_known(value):
            bodies = [self._body_of(item) for item in items]
            has_all = any("*" in _patterns(item) for item in items)
            return self._either(node, value_node or node, [*bodies, *([] if has_all else [None])])
        for at, item in enumerate(items):
            try:
                matches = [re.fullmatch(regular(self.words.pattern(pattern)), value) for pattern in _patterns(item)]
            except ValueError:
                return self._either(node, item, [*[self._body_of(entry) for entry in items[at:]], None])
            if any(matches):
                self.status = 0
                return self._body_of(item)(self)
        return 0

    def _body_of(self, item: Node) -> Callable[[_Shell], Status]:
        nodes = [
            child
            for at, child in enumerate(item.children)
            if item.field_name_for_child(at) not in ("value", "termination", "fallthrough")
        ]
        if any(child.type in (";&", ";;&") for child in item.children):
            raise TooLong(f"line {_line(item)}: a branch that goes on in the next one, which")
        return lambda shell: shell.run_all(nodes)

    def _run_for(self, node: Node) -> Status:
        name = _source(node.child_by_field_name("variable") or node)
        raw = [_source(entry) for entry in node.children_by_field_name("value")]
        has_list = any(child.type == "in" for child in node.children)
        listed = [item for word in raw for item in self.words.fields(word)]
        items = listed if has_list else [*self.variables.arguments]
        body = _body(node)
        if any(child.type == "select" for child in node.children) or any(not is_known(item) for item in items):
            return self._run_body_once(node, body, [name])
        for item in items:
            self.variables.set(name, item)
            if self._round(body):
                break
        return self.status

    def _run_arithmetic_for(self, node: Node) -> Status:
        parts = _source(node).partition("((")[2].partition("))")[0].split(";")
        body = _body(node)
        if len(parts) != 3:
            return self._run_body_once(node, body, [])
        self._sum(parts[0])

        def goes_on(shell: _Shell) -> Status:
            return shell._sum(parts[1] if parts[1].strip() else "1")

        return self._rounds(node, body, goes_on, lambda shell: shell._sum(parts[2]))

    def _run_while(self, node: Node) -> Status:
        body = _body(node)
        condition = [
            child for child in node.children if child.is_named and child not in body and child.type != "do_group"
        ]
        is_until = node.children[0].type == "until"

        def goes_on(shell: _Shell) -> Status:
            status = shell.run_all(condition)
            return int(status == 0) if is_until and status is not None else status

        return self._rounds(node, body, goes_on, lambda shell: None)

    def _rounds(
        self,
        node: Node,
        body: list[Node],
        goes_on: Callable[[_Shell], Status],
        after: Callable[[_Shell], object],
    ) -> Status:
        """Run a loop while `goes_on` has the status 0. One that waits for something outside is run once."""
        before, count = self.variables.copy(), len(self.commands)
        for _ in range(_MOST_ROUNDS):
            status = goes_on(self)
            if status is None:
                return self._run_body_once(node, body, [])
            if status != 0 or self._round(body):
                self.status = 0
                return 0
            after(self)
        self.variables = before
        del self.commands[count:]
        return self._run_body_once(node, body, [])

    def _round(self, body: list[Node]) -> bool:
        """Run the body of a loop once. Returns whether the loop ends."""
        try:
            self.run_all(body)
        except _ControlFlow as jump:
            if jump.kind not in ("break", "continue"):
                raise
            if jump.levels > 1:
                raise _ControlFlow(jump.kind, jump.line, jump.levels - 1) from None
            return jump.kind == "break"
        return False

    def _run_body_once(self, node: Node, body: list[Node], names: list[str]) -> Status:
        """Run the body of a loop, of which nobody knows how often it runs."""

        def rounds(shell: _Shell) -> Status:
            for name in (*names, *_assigned(body)):  # may have changed in an earlier round
                shell.variables.set(name, unknown(f"$({name} of line {_line(node)})"))
            shell._round(body)
            return 0

        return self._either(node, node, [rounds, None])

    def _sum(self, text: str) -> Status:
        """Run `((...))`: its assignments, and whether it is not zero."""
        status: Status = None
        for part in text.split(","):
            status = self._part_of_sum(part.strip())
        return status

    def _part_of_sum(self, text: str) -> Status:
        step = re.fullmatch(r"(?:(\+\+|--)(\w+)|(\w+)(\+\+|--))", text)
        assigned = re.fullmatch(r"([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.*)", text, re.DOTALL)
        if step:
            name, sign = step[2] or step[3], (step[1] or step[4])[0]
            value = self.words.sum(f"{name} {sign} 1")
        elif assigned:
            name, sign = assigned[1], assigned[2]
            value = self.words.sum(f"{name} {sign} ({assigned[3]})" if sign else assigned[3])
        else:
            value = self.words.sum(text)
            return int(int(value) == 0) if is_known(value) else None
        self.variables.set(name, value)
        return int(int(value) == 0) if is_known(value) else None

    # -- Functions, assignments

    def _function(self, node: Node) -> Status:
        if (name := node.child_by_field_name("name")) and (body := node.child_by_field_name("body")):
            self.functions[_source(name)] = body
        return 0

    def _call(self, name: str, arguments: list[str]) -> Status:
        if self._depth > 40:
            raise TooLong(f"calls of the function {name}")
        before = self.variables.arguments, self.variables.in_function
        self.variables.arguments, self.variables.in_function = tuple(arguments), True
        self._frames.append({})
        self._depth += 1
        try:
            return self.run(self.functions[name])
        except _ControlFlow as jump:
            if jump.kind != "return":
                raise
            return self.status
        finally:
            self._depth -= 1
            self.variables.arguments, self.variables.in_function = before
            self._restore(self._frames.pop())

    def _restore(self, before: dict[str, str | Array | None]) -> None:
        """Give variables back their earlier values, which are None for those that were not set."""
        self.variables.values |= {name: value for name, value in before.items() if value is not None}
        for name in (name for name, value in before.items() if value is None):
            self.variables.values.pop(name, None)

    def _assignment(self, node: Node, more: str = "") -> Status:
        """Run an assignment. `more` is the end of its value, which the grammar may take for another word."""
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name is None:
            return None
        adds = any(child.type == "+=" for child in node.children)
        variable = _source(name.children[0]) if name.type == "subscript" else _source(name)
        if not variable.isidentifier():  # `--name=value`, at the beginning of a line
            return self._program(node, self.words.fields(_source(node) + more))
        if value is not None and value.type == "array":
            self.variables.set_array(variable, self._items(value, variable), adds=adds)
            return 0
        start = next(child.end_byte for child in node.children if child.type in ("=", "+=")) - node.start_byte
        raw = _plain_text((node.text or b"")[start:])
        text = self.words.text(raw + more)
        if name.type == "subscript":
            index = _source(name)[len(variable) + 1 : -1]
            key = self.words.text(index) if variable in self.variables.keyed else self.words.sum(index)
            if not is_known(key):
                self.variables.set(variable, unknown(f"$({variable} of line {_line(node)})"))
            else:
                self.variables.set_item(variable, key, text, adds=adds)
        else:
            self.variables.set(variable, text, adds=adds)
        return 0

    def _items(self, array: Node, name: str) -> Array:
        items: Array = {}
        for word in _raw_words(array.children[1:-1]):
            keyed = re.match(r"\[([^\]]*)\]=", word)
            if keyed:
                key = self.words.text(keyed[1]) if name in self.variables.keyed else self.words.sum(keyed[1])
                items[key] = self.words.text(word[keyed.end() :])
            else:
                for attribute in self.words.fields(word):
                    items[str(len(items))] = attribute
        return items

    def _declaration(self, node: Node) -> Status:
        kind = node.children[0].type
        flags = "".join(_source(child)[1:] for child in node.children[1:] if _source(child).startswith("-"))
        is_local = kind == "local" or (
            kind in ("declare", "typeset") and self.variables.in_function and "g" not in flags
        )
        for child in node.children[1:]:
            if child.type not in ("variable_assignment", "variable_name", "word", "concatenation", "string"):
                continue
            if child.prev_sibling is not None and child.prev_sibling.end_byte == child.start_byte:
                continue  # the end of a value
            name_node = child.child_by_field_name("name") if child.type == "variable_assignment" else child
            name = _source(name_node).partition("[")[0] if name_node is not None else ""
            if not re.fullmatch(r"\w+", name):
                continue
            if is_local and self._frames and name not in self._frames[-1]:
                self._frames[-1][name] = self.variables.values.get(name)
                if child.type != "variable_assignment":
                    self.variables.values[name] = None
            if "A" in flags:
                self.variables.keyed.add(name)
                if child.type != "variable_assignment":
                    self.variables.values[name] = {}
            if child.type == "variable_assignment":
                self._assignment(child, _end_of_value(child))
            if "n" in flags and kind != "export":
                self.variables.values[name] = unknown(f"$({name} of line {_line(node)})")
            if kind == "export" or "x" in flags:
                self.exported.add(name)
        return 0

    def _unset(self, node: Node) -> Status:
        for child in node.children[1:]:
            for name in self.words.fields(_source(child)):
                if re.fullmatch(r"\w+", name):
                    self.variables.values[name] = None
        return 0

    # -- Commands

    def _redirected(self, node: Node) -> Status:
        body = node.child_by_field_name("body")
        more: list[Node] = []
        texts: list[str] = []
        arguments: list[Node] = []
        writes = False
        for child in node.children:
            for at, part in enumerate(child.children if child.type == "heredoc_redirect" else ()):
                kind = child.field_name_for_child(at)
                if kind == "argument":
                    arguments.append(part)
                elif kind == "right" or part.type == "pipeline":
                    more.append(part)
                elif part.type == "heredoc_body":
                    texts.append(_source(part))
            for part in child.children if child.type == "file_redirect" else ():
                if part.type == "process_substitution":
                    self._forked_shell().finish(part.children)
                writes = writes or (part.type in (">", ">>", "&>") and not _source(child).startswith("2>"))
        output = self.output
        if writes and output is not None:
            self.output = []
        try:
            if body is None:
                status: Status = 0
            elif body.type == "command":
                status = self._command(body, extra=arguments, texts=texts)
            else:
                status = self.run(body)
        finally:
            self.output = output
        return self.run_all(more) if more else status

    def _command(self, node: Node, *, extra: Sequence[Node] = (), texts: Sequence[str] = ()) -> Status:
        assignments = [child for child in node.children if child.type == "variable_assignment"]
        lines = [at for at, assignment in enumerate(assignments) if _ends_line(assignment)]
        for item in assignments[: lines[-1] + 1 if lines else 0]:  # the grammar reads on in the next line
            self._assignment(item, _end_of_value(item))
        assignments = assignments[lines[-1] + 1 :] if lines else assignments
        ends = {assignment.id: _end_of_value(assignment) for assignment in assignments}
        nodes = [
            child
            for child in node.children
            if child.type not in ("variable_assignment", "comment") and not child.type.endswith("_redirect")
        ]
        if assignments and ends[assignments[-1].id]:
            nodes = nodes[len(_adjacent(assignments[-1])) :]
        words = [field for raw in _raw_words([*nodes, *extra]) for field in self.words.fields(raw)]
        herestrings = [child.children[-1] for child in node.children if child.type == "herestring_redirect"]
        self.input = self.words.text(_source(herestrings[0])) if herestrings else None
        if not words:
            for element in assignments:
                self._assignment(element, ends[element.id])
            return 0
        if not assignments:
            return self._run_command(node, words, texts)
        before = {name: self.variables.values.get(name) for assignment in assignments if (name := _name_of(assignment))}
        exported = set(self.exported)
        for entry in assignments:
            self._assignment(entry, ends[entry.id])
        self.exported |= set(before)
        try:
            return self._run_command(node, words, texts)
        finally:
            self.exported = exported
            self._restore(before)

    def _run_command(self, node: Node, words: list[str], texts: Sequence[str]) -> Status:
        name = words[0]
        if name in self.functions:
            return self._call(name, words[1:])
        if builtin := _BUILTINS.get(name):
            return builtin(self, node, words[1:])
        inner = _text_of_shell(words)
        if inner is not None and is_known(inner):
            return self._inner(node, inner)
        if name in _SHELLS and len(words) == 1 and texts:
            return self._inner(node, texts[0])
        return self._program(node, words)

    def _program(self, node: Node, words: list[str]) -> Status:
        self.commands.append(ScriptCommand(line=self.line, words=tuple(words), is_certain=self.is_certain))
        if self.output is not None:
            self.output.append(unknown(f"$({_excerpt(_source(node))})"))
        return None

    def _inner(self, node: Node, text: str) -> Status:
        """Read the script that a command hands to another shell: `bash -c "..."`."""
        tree = _parsed(text, self.name)
        if _broken(tree):
            words = ("bash", "-c", unknown("$(...)"))
            self.commands.append(ScriptCommand(line=self.line, words=words, is_certain=False))
            return None
        shell = self._forked_shell()
        exported = {name: value for name, value in self.variables.values.items() if name in (*self.exported, "HOME")}
        shell.variables = evolve(shell.variables, values=exported, arguments=(), in_function=False)
        return shell.in_text(tree)

    def _output_of(self, text: str) -> str:
        """The output of a command substitution; an unknown text if only running it would tell."""
        source = f"$({_excerpt(text)})"
        tree = _parsed(text, self.name)
        if _broken(tree):
            return unknown(source)
        shell = self._forked_shell()
        shell.output = []
        self.status = shell.in_text(tree)
        output = "".join(shell.output)
        if len(output) > LONGEST:
            raise TooLong("the output of a command")
        return output.rstrip("\n") if is_known(output) or outside(output) is not None else unknown(source)

    # -- Commands of the shell itself

    def _echo(self, node: Node, words: list[str]) -> Status:
        ends, escapes = "\n", False
        while words and re.fullmatch(r"-[neE]+", words[0]):
            ends = "" if "n" in words[0] else ends
            escapes = escapes or "e" in words[0]
            words = words[1:]
        self._writes(" ".join(words) + ends, node, is_plain=not escapes or "\\" not in "".join(words))
        return 0

    def _writes(self, text: str, node: Node, *, is_plain: bool = True) -> None:
        if self.output is not None:
            self.output.append(text if is_plain else unknown(f"$({_excerpt(_source(node))})"))

    def _printf(self, node: Node, words: list[str]) -> Status:
        into = ""
        if words[:1] == ["-v"] and len(words) > 2:
            into, words = words[1], words[2:]
        text = _formatted(words) if words else ""
        if into:
            self.variables.set(into, unknown(f"$({_excerpt(_source(node))})") if text is None else text)
        else:
            self._writes(text or "", node, is_plain=text is not None)
        return 0

    def _test(self, node: Node, words: list[str]) -> Status:
        source = _source(node).partition("test")[2]
        result = holds(source, self.words, is_double=False)
        return None if result is None else int(not result)

    def _brackets(self, node: Node) -> Status:
        source = _source(node)
        is_double = source.startswith("[[")
        if source.startswith("(("):
            return self._sum(source[2:-2])
        result = holds(source[2:-2] if is_double else source[1:-1], self.words, is_double=is_double)
        return None if result is None else int(not result)

    def _set(self, node: Node, words: list[str]) -> Status:
        if "--" in words:
            self.variables.arguments = tuple(words[words.index("--") + 1 :])
        return 0

    def _shift(self, node: Node, words: list[str]) -> Status:
        count = int(words[0]) if words and words[0].isdecimal() else 1
        if count > len(self.variables.arguments):
            return 1
        self.variables.arguments = self.variables.arguments[count:]
        return 0

    def _eval(self, node: Node, words: list[str]) -> Status:
        text = " ".join(words)
        tree = _parsed(text, self.name)
        if not is_known(text) or _broken(tree):
            self.commands.append(ScriptCommand(line=self.line, words=("eval", text), is_certain=False))
            return None
        self._depth_of_text += 1
        try:
            return self.run_all(tree.children)
        finally:
            self._depth_of_text -= 1

    def _leave(self, kind: str, node: Node, words: list[str]) -> Status:
        number = words[0] if words else ""
        if number.isdecimal():
            self.status = int(number)
        raise _ControlFlow(kind, self.line, int(number) if number.isdecimal() and kind in ("break", "continue") else 1)

    def _run_read(self, node: Node, words: list[str]) -> Status:
        """`read` and `mapfile`: the words of `<<< "text"`; what comes from elsewhere is unknown."""
        name = _source(next(child for child in node.children if child.type == "command_name"))
        names = [word for word in words if not word.startswith("-")]
        if name == "read" and self.input is not None and is_known(self.input) and all(map(str.isidentifier, names)):
            parts = self.words.split(self.input)
            if any("a" in word for word in words if word.startswith("-")):
                self.variables.set_array(names[0], {str(at): part for at, part in enumerate(parts)})
                return 0
            for at, alias in enumerate(names):
                if at == len(names) - 1 and len(parts) > len(names):
                    self.variables.values[alias] = unknown(f"$({alias} of line {_line(node)})")
                else:
                    self.variables.set(alias, parts[at] if at < len(parts) else "")
            return 0
        for word in words:
            if re.fullmatch(r"[A-Za-z_]\w*", word):
                self.variables.values[word] = unknown(f"$({word} of line {_line(node)})")
        return None

    def _unknown(self, node: Node, words: list[str]) -> Status:
        """A command of the shell that tells something about the machine."""
        self._writes("", node, is_plain=False)
        return None

    def _source_file(self, node: Node, words: list[str]) -> Status:
        """`source FILE`: what it sets is not known."""
        self.sourced.append((self.line, shown(" ".join(words))))
        return 0

    def _run_prefixed(self, node: Node, words: list[str]) -> Status:
        """`command NAME ...`; with options it asks where the command is."""
        if not words or words[0].startswith("-"):
            return self._unknown(node, words)
        builtin = _BUILTINS.get(words[0])
        return builtin(self, node, words[1:]) if builtin else self._program(node, words)

    def _replaces(self, node: Node, words: list[str]) -> Status:
        """`exec PROGRAM ...` ends the script; without a program it only opens files."""
        if not words:
            return 0
        self._program(node, words)
        raise _ControlFlow("exit", self.line)

    def _paths(self, node: Node, words: list[str]) -> Status:
        """`basename` and `dirname` of paths that are known."""
        name = next(child for child in node.children if child.type == "command_name")
        words = [word for word in words if word != "--"]
        if not words or not is_known("".join(words)) or words[0].startswith("-") or len(words) > 2:
            self._writes("", node, is_plain=False)
            return 0
        path = words[0].rstrip("/") or "/"
        if _source(name) == "dirname":
            text = path.rpartition("/")[0] or ("/" if path.startswith("/") else ".")
        else:
            text = path.rpartition("/")[2] or "/"
            if len(words) == 2 and text != words[1]:
                text = text.removesuffix(words[1])
        self._writes(text + "\n", node)
        return 0

    def _seq(self, node: Node, words: list[str]) -> Status:
        if not all(re.fullmatch(r"-?\d{1,6}", word) for word in words) or not 1 <= len(words) <= 3:
            self._writes("", node, is_plain=False)
            return 0
        numbers = [int(word) for word in words]
        start, step, end = ([1, 1, *numbers], [numbers[0], 1, numbers[-1]], numbers)[len(numbers) - 1]
        sequence = range(start, end + (1 if step > 0 else -1), step) if step else range(0)
        self._writes("".join(f"{number}\n" for number in sequence[: 10 * _MOST_ROUNDS]), node)
        return 0

    def _options(self, node: Node, words: list[str]) -> Status:
        """`getopts`: without arguments, there are no options."""
        return 1 if not self.variables.arguments else self._run_read(node, words)


def _clauses(node: Node) -> list[tuple[list[Node], list[Node]]]:
    """Condition and body of each branch of an `if`; the condition of `else` is empty."""
    clauses: list[tuple[list[Node], list[Node]]] = []
    condition: list[Node] = []
    body: list[Node] = []
    is_condition = True
    for child in node.children:
        if child.type == "elif_clause":
            clauses.append((condition, body))
            condition, body = _clauses(child)[0]
        elif child.type == "else_clause":
            clauses.append((condition, body))
            clauses.append(([], _statements(child)))
            return clauses
        elif child.type == "then":
            is_condition = False
        elif child.is_named and child.type != "comment":
            (condition if is_condition else body).append(child)
    return [*clauses, (condition, body)]


def _body(node: Node) -> list[Node]:
    body = node.child_by_field_name("body")
    return [] if body is None else _statements(body)


def _patterns(item: Node) -> list[str]:
    return [_source(child) for child in item.children_by_field_name("value")]


def _assigned(nodes: Iterable[Node]) -> Iterator[str]:
    """Variables that statements assign."""
    for node in nodes:
        if node.type == "variable_assignment" and (name := _name_of(node)):
            yield name
        yield from _assigned(node.children)


def _end_of_value(assignment: Node) -> str:
    """The end of a value such as `$A/b/$C`, which the grammar may cut off."""
    return "".join(map(_source, _adjacent(assignment)))


def _ends_line(assignment: Node) -> bool:
    """Whether the next part of the command is on another line, to which the assignment does not belong."""
    node = [assignment, *_adjacent(assignment)][-1]
    return node.next_sibling is not None and "\n" in _text_between(node, node.next_sibling)


def _adjacent(assignment: Node) -> list[Node]:
    """The parts that follow an assignment without a space."""
    parts: list[Node] = []
    node = assignment
    while (following := node.next_sibling) and following.is_named and following.start_byte == node.end_byte:
        parts.append(node := following)
    return parts


def _name_of(assignment: Node) -> str:
    name = assignment.child_by_field_name("name")
    return "" if name is None else _source(name).partition("[")[0]


def _raw_words(nodes: Sequence[Node]) -> list[str]:
    """The written words of a command. The grammar may cut a word in two, and passes over escaped spaces and a lone
    dash, so what stands between its parts is read, too.
    """
    text = ""
    before: Node | None = None
    for node in nodes:
        text += _text_between(before, node)
        text += "" if node.type == "comment" else _source(node)
        before = node
    return split_words(text + ("" if before is None else _trailing_text(before)))


def _text_between(before: Node | None, node: Node) -> str:
    """The text between two parts of a command, without continued lines; a space if something else is there."""
    parent = node.parent
    if before is None or parent is None or before.parent != parent or before.next_sibling != node:
        return " "
    start, end = before.end_byte - parent.start_byte, node.start_byte - parent.start_byte
    return _plain_text((parent.text or b"")[start:end]).replace("\\\n", "")


def _trailing_text(node: Node) -> str:
    """Escaped spaces or a dash after the last part of a command."""
    root = node
    while root.parent is not None:
        root = root.parent
    rest = _plain_text((root.text or b"")[node.end_byte : node.end_byte + 100])
    match = re.match(r"(?:[ \t]*\\[ \t])+|[ \t]+-(?=[ \t]+<)", rest)
    return match[0] if match else ""


def _text_of_shell(words: list[str]) -> str | None:
    """The script of `bash -c "..."`, which another program may start; None if there is none."""
    for at, word in enumerate(words[:-2]):
        if word in _SHELLS:
            for option in range(at + 1, len(words) - 1):
                if re.fullmatch(r"-[a-z]*c", words[option]):
                    return words[option + 1]
                if not words[option].startswith("-"):
                    break
    return None


def _formatted(words: list[str]) -> str | None:
    """Output of `printf` for formats of texts and whole numbers; None for others."""
    form, arguments = words[0], words[1:]
    parts = re.findall(r"%%|%s|%d|%0?\d*d|%[^%]|\\.|[^%\\]+|.", form, re.DOTALL)
    if any(part.startswith("%") and part not in ("%%", "%s", "%d") for part in parts):
        return None
    text, rest = "", list(arguments)
    while True:
        used = False
        for part in parts:
            if part in ("%s", "%d"):
                text += rest.pop(0) if rest else ("" if part == "%s" else "0")
                used = True
            elif part.startswith("\\"):
                if part not in ("\\n", "\\t", "\\\\"):
                    return None
                text += {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}[part]
            else:
                text += "%" if part == "%%" else part
        if not rest or not used:
            return text


_RUN: dict[str, Callable[[_Shell, Node], Status]] = {
    "list": _Shell._list,
    "negated_command": _Shell._negated,
    "compound_statement": _Shell._group,
    "subshell": lambda shell, node: shell._forked_shell().finish(node.children),
    "pipeline": _Shell._pipeline,
    "if_statement": lambda shell, node: shell._branches(node, _clauses(node)),
    "case_statement": _Shell._case,
    "for_statement": _Shell._run_for,
    "c_style_for_statement": _Shell._run_arithmetic_for,
    "while_statement": _Shell._run_while,
    "function_definition": _Shell._function,
    "variable_assignment": _Shell._assignment,
    "declaration_command": _Shell._declaration,
    "unset_command": _Shell._unset,
    "redirected_statement": _Shell._redirected,
    "command": _Shell._command,
    "test_command": _Shell._brackets,
    **dict.fromkeys(("program", "do_group", "variable_assignments"), lambda shell, node: shell.run_all(node.children)),
}
"""Kind of a statement in the grammar -> how it runs."""

_BUILTINS: dict[str, Callable[[_Shell, Node, list[str]], Status]] = {
    "echo": _Shell._echo,
    "printf": _Shell._printf,
    "test": _Shell._test,
    "let": lambda shell, node, words: shell._sum(",".join(words)) if words else None,
    "set": _Shell._set,
    "shift": _Shell._shift,
    "eval": _Shell._eval,
    **dict.fromkeys(("read", "mapfile", "readarray"), _Shell._run_read),
    "getopts": _Shell._options,
    **dict.fromkeys(("basename", "dirname"), _Shell._paths),
    "seq": _Shell._seq,
    **dict.fromkeys(("pwd", "type", "hash", "kill", "jobs"), _Shell._unknown),
    **dict.fromkeys(("source", "."), _Shell._source_file),
    **dict.fromkeys(("command", "builtin"), _Shell._run_prefixed),
    "exec": _Shell._replaces,
    "false": lambda shell, node, words: 1,
    "exit": lambda shell, node, words: shell._leave("exit", node, words),
    "return": lambda shell, node, words: shell._leave("return", node, words),
    "break": lambda shell, node, words: shell._leave("break", node, words),
    "continue": lambda shell, node, words: shell._leave("continue", node, words),
    **dict.fromkeys(
        (":", "true", "trap", "ulimit", "shopt", "umask", "alias", "wait", "cd", "pushd", "popd"),
        lambda shell, node, words: 0,
    ),
}
