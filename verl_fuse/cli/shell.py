"""Finds the command that starts verl's trainer in a shell script, with the words that bash would give it. Nothing of
the script is run.

Invariants (tests/unit/cli/test_shell.py):
- variables, arrays, arithmetic, functions, quotes, subshells and conditions on known values are read as bash reads
them;
- of an array that such a condition or rounds of a loop make longer, the elements before it are known;
- a value that the text does not tell (a variable without a value, another program's output, a variable that depends on
such a condition, or that `read`, `let`, `((...))`, `printf -v` or rounds of a loop change) is marked in the words by
its name;
- a script with two commands that may start the trainer is a FuseError that names both lines.

Not followed: a file that is sourced (variables stay as they were), stages of a pipe and `local` (what they assign
stays), `exit`, `exec` and `return` (what stands behind them is read too), and braces (`{a,b}`).
"""

import ast
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise, takewhile

from verl_fuse.cli.shell_syntax import (
    Body,
    Branch,
    Command,
    Function,
    Loop,
    Match,
    Subshell,
    closing,
    end_of_quote,
    parse,
)
from verl_fuse.errors import FuseError

TRAINER = "verl.trainer.main_ppo"
# Stand around what the text does not tell (characters for private use): the name of a variable without a value, or
# text of the script, such as $NAME of a variable whose value depends on a condition that is not known.
# No blank in it splits a word.
_BEGIN, _END, _BLANK = "\ue000", "\ue001", "\ue002"
_MARK = re.compile(f"{_BEGIN}([^{_END}]*){_END}")
_OC_ENV = re.compile(r"\$\{oc\.env:(\w+)\}")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^]]*)\])?(\+?)=")
# What is replaced in ${NAME/OLD/NEW}, everywhere with a second / before it; OLD may begin with a / of its own.
_REPLACED = re.compile(r"""/(/?)(/?(?:\\.|'[^']*'|"[^"]*"|\$\{[^}]*\}|[^/])*)(?:/(.*))?""", re.DOTALL)
_PARAMETER = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]")
# Blocks of verl's configuration: a command with such arguments trains with a trainer like verl's.
_OVERRIDE = re.compile(r"[+~]{0,2}(?:data|algorithm|trainer|critic|actor_rollout_ref)\.[\w.]+=")
# Commands that show or look for what follows them.
_SHOW = ("echo", "printf", "grep", "pgrep", "pkill", "ls", "cat", "tail")
# Commands that set the variables they name.
_SET = ("read", "readarray", "mapfile", "getopts")
_CHANGED = re.compile(r"([A-Za-z_]\w*)\s*(?:[-+*/%&|^]?=(?!=)|<<=|>>=|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)")
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
# A function that calls itself, or a script that calls itself by eval, would not end.
_DEEPEST = 20
_MOST_ROUNDS = 1000


@dataclass(frozen=True)
class Launch:
    """A command that starts a trainer: the line, the trainer's module or file, and the arguments. `lost`: the line
    of an argument behind it that bash takes for a command, because a comment or an empty line ends the one before."""

    line: int
    trainer: str
    arguments: tuple[str, ...]
    lost: int | None = None

    @property
    def is_verl_s(self) -> bool:
        return self.trainer == TRAINER or self.trainer.endswith("main_ppo.py")


def find_launch(text: str, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[Launch, bool]:
    """Return (the command of the script `text`, called `name` with `arguments`, that starts verl's trainer or else one
    like it; whether the script passes its arguments on). A FuseError tells why there is not one."""
    reader = _Reader(name, arguments, environment)
    reader.run(parse(text))
    found = [launch for launch in reader.found if launch.is_verl_s] or reader.found
    distinct = list({launch.arguments: launch for launch in found}.values())
    if not distinct:
        raise FuseError(
            f"there is no command of {TRAINER}, or of another module with arguments such as data.train_batch_size=8"
        )
    if len(distinct) > 1:
        lines = " and ".join(str(launch.line) for launch in distinct)
        raise FuseError(
            f"lines {lines} each start {distinct[0].trainer}: which of them runs is not in the file; copy the "
            "arguments of one behind `verl-fuse check --`"
        )
    return distinct[0], reader.passes_arguments


def launch_of(words: Sequence[str], line: int = 0) -> Launch | None:
    """Return the trainer that these words of a command start."""
    if words[:1] and words[0] in _SHOW:
        return None
    for index, word in enumerate(words):
        if word == TRAINER or word.endswith("/main_ppo.py") or word == "main_ppo.py":
            return Launch(line, word, tuple(words[index + 1 :]))
    if not any(map(_OVERRIDE.match, words)):
        return None
    for index, word in enumerate(words):
        if (word.endswith(".py") and "=" not in word) or (index and words[index - 1] == "-m"):
            return Launch(line, word, tuple(words[index + 1 :]))
    return None


def untold(text: str) -> list[str]:
    """Return what the script does not tell of this text: names of variables, or text of the script."""
    found = (text.replace(_BLANK, " ") for text in _MARK.findall(text))
    return [text.removeprefix("$") if _NAME.fullmatch(text[1:]) else text for text in found]


def of_environment(text: str) -> str:
    """Return the text with the variables that OmegaConf reads and that are not set here as what is not told."""
    return _OC_ENV.sub(lambda found: found[0] if found[1] in os.environ else f"{_BEGIN}{found[1]}{_END}", text)


def shown(text: str) -> str:
    """Return the text with those names as the script writes them."""
    shown = _MARK.sub(lambda found: f"${found[1]}" if re.fullmatch(r"\w+", found[1]) else found[1], text)
    return shown.replace(_BLANK, " ")


def told_end(text: str) -> str:
    """Return what follows the last part of the text that the script does not tell."""
    return text.rpartition(_END)[2]


def _mark(name: str) -> str:
    return f"{_BEGIN}{_BLANK.join(name.split())}{_END}"


# A list is an array.
_Variables = dict[str, str | list[str]]


def _certain(name: str, values: Sequence[str | list[str]]) -> str | list[str]:
    """Return what a variable has with each of these values: of arrays the elements at the beginning that all have, and
    the name as one that may stand for more; of other values that differ, the name."""
    if all(value == values[0] for value in values):
        return values[0]
    arrays = [value for value in values if isinstance(value, list)]
    if len(arrays) < len(values):
        return _mark(f"${name}")
    same = takewhile(lambda words: len({*words}) == 1, zip(*arrays, strict=False))
    return [*(words[0] for words in same), _mark(f"${name}")]


@dataclass
class _Reader:
    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    found: list[Launch] = field(default_factory=list)
    passes_arguments: bool = False
    _variables: _Variables = field(default_factory=dict)
    _functions: dict[str, Body] = field(default_factory=dict)
    _depth: int = 0
    _called: list[str] = field(default_factory=list)

    def run(self, body: Body) -> None:
        for node in body:
            match node:
                case Command():
                    self._command(node)
                case Function():
                    self._functions[node.name] = node.body
                case Loop():
                    self._loop(node)
                case Branch(repeats=True):
                    self._repeat(node)
                case Branch():
                    self._branch(node)
                case Subshell():
                    before = dict(self._variables)
                    self.run(node.body)
                    self._variables = before

    def _repeat(self, node: Branch) -> None:
        """Run the rounds of `while` whose condition is known to hold; from one on that is not, one round tells which
        variables the others change."""
        ((condition, body),) = node.arms
        before, holds = dict(self._variables), None
        for _ in range(_MOST_ROUNDS):
            before, holds = dict(self._variables), self._holds(condition)
            if holds is None or holds is node.negated:
                break
            self.run(body)
        if holds is node.negated:
            return
        self._apart([(None, body), (None, ())])
        self._doubt(before)

    def _doubt(self, before: _Variables) -> None:
        """Keep of the variables that were changed since `before` what both have."""
        for name, value in self._variables.items():
            if before.get(name) != value:
                self._variables[name] = _certain(name, [before.get(name, ""), value])

    def _forget(self, names: Iterable[str]) -> None:
        self._variables |= {name: _mark(f"${name}") for name in names}

    def _branch(self, node: Branch) -> None:
        """Run the arm whose condition holds; all arms, apart from each other, where that is not known."""
        arms: list[tuple[bool | None, Body]] = []
        for condition, body in node.arms:
            holds = self._holds(condition)
            arms.append((holds if holds is None else holds is not node.negated, body))
            if arms[-1][0]:
                break
        self._apart([*arms, (True, node.otherwise)])

    def _apart(self, arms: Sequence[tuple[bool | None, Body]]) -> None:
        """Run the arms that may be run, each with the variables before it, up to the first that is run if it is come
        to; a variable that differs then is not known."""
        ends, before = list[_Variables](), dict(self._variables)
        for holds, body in arms:
            if holds is not False:
                self._variables = dict(before)
                self.run(body)
                ends.append(self._variables)
            if holds:
                break
        names = dict.fromkeys(name for end in ends for name in end)
        self._variables = {name: _certain(name, [end.get(name, "") for end in ends]) for name in names}

    def _holds(self, condition: Body | Match) -> bool | None:
        if isinstance(condition, Match):
            word = self._text(condition.word)
            if "*" in condition.patterns:
                return True
            return None if untold(word) else any(fnmatchcase(word, self._text(one)) for one in condition.patterns)
        value: bool | None = None
        for node in condition:
            match node:
                case Command():
                    value = self._tested(self._fields(node.words))
                    if value is None:
                        self._command(node)
                        value = True if all(map(_ASSIGNMENT.match, node.words)) else None
                case Branch(arms=((first, second),), otherwise=()):
                    # `a && b`, or `a || b`, as a condition.
                    value = self._holds(first)
                    if value is (not node.negated):
                        value = self._holds(second)
                    elif value is None:
                        self._apart([(None, second), (None, ())])
                case _:
                    self.run((node,))  # type: ignore[arg-type]
                    value = None
        return value

    def _tested(self, words: list[str]) -> bool | None:
        if words[:1] == ["!"]:
            value = self._tested(words[1:])
            return None if value is None else not value
        if words in (["true"], [":"]):
            return True
        if words == ["false"]:
            return False
        if words[:1] not in (["["], ["[["], ["test"]):
            return None
        inner = words[1:] if words[0] == "test" else words[1:-1]
        return _test(inner, glob=words[0] == "[[")

    def _loop(self, node: Loop) -> None:
        values = self._fields(node.words)
        if node.words and not values:
            return
        self._variables[node.name] = values[0] if len(values) == 1 else _mark(f"${node.name}")
        before = dict(self._variables)
        self.run(node.body)
        if len(values) != 1:
            # One round tells which variables the rounds change, and not to what.
            self._doubt(before)

    def _command(self, node: Command) -> None:
        words, before = list(node.words), dict(self._variables)
        assigned = []
        while words and (found := _ASSIGNMENT.match(words[0])):
            self._assign(found, words.pop(0))
            assigned.append(found[1])
        if not words:
            return
        if assigned:
            # They are this command's alone, whose words have the values before it.
            self._variables = before
        if words[0] in _DECLARE:
            for word in words[1:]:
                if found := _ASSIGNMENT.match(word):
                    self._assign(found, word)
            return
        if words[0] == "let" or words[0].startswith("(("):
            self._forget(one or other for word in words for one, other in _CHANGED.findall(word))
            return
        fields = self._fields(words)
        match fields[:1]:
            case ["set"] if "--" in fields:
                self.arguments = fields[fields.index("--") + 1 :]
            case ["shift"]:
                count = int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else 1
                self.arguments = self.arguments[count:]
            case ["unset"]:
                for name in fields[1:]:
                    self._variables.pop(name, None)
            case [command] if command in _SET:
                self._forget(filter(_NAME.fullmatch, fields[1:]))
            case ["printf"] if "-v" in fields[:-1]:
                self._forget(fields[fields.index("-v") + 1 :][:1])
            case ["eval"]:
                self._nested(" ".join(fields[1:]), node.line)
            case [name] if name in self._functions:
                self._call(name, fields[1:])
            case _:
                self._look(fields, node.line)

    def _look(self, fields: list[str], line: int) -> None:
        """Remember a command that starts a trainer, also one that another shell is told."""
        shell = any(word.rpartition("/")[2] in ("bash", "sh", "zsh") for word in fields)
        inside = next((text for option, text in pairwise(fields) if shell and option in ("-c", "-lc", "-ic")), None)
        if inside is not None:
            self._nested(inside, line)
        elif self.found and self.found[-1].lost is None and _OVERRIDE.match(fields[0] if fields else ""):
            self.found[-1] = replace(self.found[-1], lost=line)
        elif launch := launch_of(fields, line):
            self.found.append(launch)

    def _nested(self, text: str, line: int) -> None:
        if self._depth < _DEEPEST and (TRAINER in text or _OVERRIDE.search(text)):
            self._depth += 1
            before = len(self.found)
            self.run(parse(text))
            self.found[before:] = [replace(one, line=line) for one in self.found[before:]]
            self._depth -= 1

    def _call(self, name: str, arguments: list[str]) -> None:
        if self._depth >= _DEEPEST or name in self._called:
            return
        self._depth += 1
        self._called.append(name)
        outer, self.arguments = self.arguments, arguments
        self.run(self._functions[name])
        self.arguments = outer
        self._called.pop()
        self._depth -= 1

    def _assign(self, found: re.Match[str], word: str) -> None:
        name, index, more, raw = found[1], found[2], found[3], word[found.end() :]
        old = self._variables.get(name, self.environment.get(name, ""))
        value: str | list[str]
        if index is not None:
            value = _mark(f"${name}")
        elif raw.startswith("("):
            lines = (one for one in parse(raw[1:-1]) if isinstance(one, Command))
            value = self._fields(word for line in lines for word in line.words)
            if more:
                value = [*(old if isinstance(old, list) else filter(None, [old])), *value]
        else:
            value = self._text(raw)
            if more:
                value = [*old, value] if isinstance(old, list) else old + value
        self._variables[name] = value

    def _text(self, raw: str) -> str:
        """Return a word as one text, without splitting."""
        return "".join(" " if text is None else text for text, _ in self._pieces(raw))

    def _fields(self, words: Iterable[str]) -> list[str]:
        """Return the words as bash gives them to a command: a text without quotes is split at blanks."""
        found: list[str] = []
        for word in words:
            if _ASSIGNMENT.match(word) and "=(" in word and word.endswith(")"):
                continue
            current: str | None = None
            for text, quoted in self._pieces(word):
                if text is None:
                    # The end of an array's element.
                    found.append(current or "")
                    current = None
                elif quoted:
                    current = (current or "") + text
                else:
                    first, *rest = re.split(r"[ \t\n]+", text)
                    if first:
                        current = (current or "") + first
                    for each in rest:
                        if current is not None:
                            found.append(current)
                        current = each or None
            if current is not None:
                found.append(current)
        return [word for word in found if word.strip() or word == ""]

    def _pieces(self, raw: str, *, quoted: bool = False) -> Iterator[tuple[str | None, bool]]:
        """Yield the parts of a word, or of what stands in its double quotes, expanded: (text, whether it is kept as
        one); (None, True) between two elements of an array in quotes."""
        index = 0
        while index < len(raw):
            char, following = raw[index], raw[index + 1 : index + 2]
            if char == "\\" and (not quoted or following in ('"', "\\", "$", "`", "\n")):
                yield following.replace("\n", "") if quoted else following, True
                index += 2
            elif not quoted and char == "'" and (end := end_of_quote(raw, index)) > 0:
                yield raw[index + 1 : end], True
                index = end + 1
            elif not quoted and raw.startswith("$'", index) and (end := end_of_quote(raw, index + 1)) > 0:
                yield raw[index + 2 : end].encode().decode("unicode_escape"), True
                index = end + 1
            elif not quoted and char == '"' and (end := end_of_quote(raw, index)) > 0:
                inner = raw[index + 1 : end]
                yield from self._pieces(inner, quoted=True) if inner else [("", True)]
                index = end + 1
            elif char in "$`" and quoted:
                values, index = self._expansion(raw, index, quotes='"`')
                for number, value in enumerate(values):
                    yield from [(None, True)] if number else []
                    yield value, True
            elif char in "$`":
                values, index = self._expansion(raw, index)
                yield " ".join(values), False
            else:
                # A quote without an end is an apostrophe in a default.
                special = re.compile(r"[\\$`]" if quoted else r"[\\'\"$`]").search(raw, index + 1)
                end = special.start() if special else len(raw)
                yield raw[index:end], True
                index = end

    def _expansion(self, text: str, index: int, quotes: str = "'\"`") -> tuple[list[str], int]:
        """Return (the values of the expansion at `index`, the index behind it); `quotes` begin a quote in braces."""
        # What has no end is text.
        if text[index] == "`" and (end := end_of_quote(text, index)) > 0:
            return [_mark(text[index : end + 1])], end + 1
        if text.startswith("$((", index) and (end := closing(text, index + 2, ")")) > 0:
            return [self._arithmetic(text[index + 3 : end - 1])], end + 1
        if text.startswith("$(", index) and (end := closing(text, index + 2, ")")) > 0:
            return [_mark(text[index : end + 1])], end + 1
        if text.startswith("${", index) and (end := closing(text, index + 2, "}", quotes)) > 0:
            values, joined = self._braced(text[index + 2 : end]), re.match(r"\*|\w+\[\*\]", text[index + 2 : end])
            return self._joined(values) if joined else values, end + 1
        if found := _PARAMETER.match(text, index + 1):
            values = self._value(found[0], "@" if found[0] in "@*" else None)
            return self._joined(values) if found[0] == "*" else values, found.end()
        return [text[index]], index + 1

    def _joined(self, values: list[str]) -> list[str]:
        """Return the one text that * makes of elements."""
        between = self._variables.get("IFS", " ")
        return [between[0].join(values) if between else "".join(values)]

    def _value(self, name: str, index: str | None = None) -> list[str]:
        """Return the value of a variable, or the elements of an array."""
        match name:
            case "@" | "*":
                self.passes_arguments |= not self._called
                return list(self.arguments)
            case "#":
                return [str(len(self.arguments))]
            case "0":
                return [self.name]
        if name.isdigit():
            self.passes_arguments |= not self._called
            known = int(name) <= len(self.arguments)
            return [self.arguments[int(name) - 1]] if known else [_mark(name)]
        value = self._variables.get(name, self.environment.get(name))
        if name == "BASH_SOURCE":
            value = self.name
        if value is None:
            return [_mark(name)]
        if isinstance(value, str):
            return [value]
        if index in ("@", "*"):
            return value
        place = int(index) if index and index.lstrip("-").isdigit() else 0 if index is None else None
        if place is None or not -len(value) <= place < len(value):
            return [_mark(name)]
        return [value[place]]

    def _braced(self, inner: str) -> list[str]:
        """Return the values of ${inner}."""
        if inner.startswith("#") and len(inner) > 1:
            name, index, _ = _parameter(inner[1:])
            if name in ("@", "*"):
                return self._value("#")
            values = self._value(name, index)
            counts = index in ("@", "*")
            length = len(values) if counts else len(values[0])
            return values if any(map(untold, values)) else [str(length)]
        name, index, rest = _parameter(inner)
        if not name:
            return [_mark(f"${{{inner}}}")]
        values = self._value(name, index)
        if not rest:
            return values
        part = re.fullmatch(r":\s*(\d+)(?::\s*(\d+))?", rest)
        if part and (name in ("@", "*") or index in ("@", "*")):
            # Arguments are counted from 1, behind the script's name.
            values, begin = [self.name, *values] if name in ("@", "*") else values, int(part[1])
            return values[begin : begin + int(part[2])] if part[2] else values[begin:]
        missing = values == [_mark(name)] or (values == [""] and rest[0] == ":")
        word = rest.lstrip(":")[1:]
        match rest.lstrip(":")[:1]:
            case "-" if not rest.startswith("::"):
                return [self._text(word)] if missing else values
            case "=":
                if missing:
                    self._variables[name] = self._text(word)
                    values = self._value(name)
                return values
            case "+":
                return [""] if missing else [self._text(word)]
            case "?":
                return [_mark(name)] if missing else values
        if any(map(untold, values)):
            return values
        return [self._changed(value, rest, f"${{{inner}}}") for value in values]

    def _changed(self, value: str, rest: str, whole: str) -> str:
        """Return what ${NAME<rest>} makes of a value."""
        for sign in ("##", "#", "%%", "%"):
            if rest.startswith(sign):
                return _stripped(value, self._text(rest.removeprefix(sign)), sign)
        if found := _REPLACED.fullmatch(rest):
            pattern = self._text(found[2])
            if not re.search(r"[*?\[]|^[#%]", pattern):
                return value.replace(pattern, self._text(found[3] or ""), -1 if found[1] else 1) if pattern else value
        if rest in ("^^", ",,", "^", ","):
            first = len(rest) == 1
            change = str.upper if rest[0] == "^" else str.lower
            return change(value[:1]) + value[1:] if first else change(value)
        if part := re.fullmatch(r":\s*(\d+)(?::(\d+))?", rest):
            begin = int(part[1])
            return value[begin : begin + int(part[2])] if part[2] else value[begin:]
        return _mark(whole)

    def _arithmetic(self, expression: str) -> str:
        """Return the value of $((expression))."""
        text = self._text(expression.replace("\\\n", " "))
        names = _NAME.findall(_MARK.sub("", text))
        values = {name: "".join(self._value(name)) for name in names}
        for value in (text, *values.values()):
            if found := untold(value):
                return _mark(found[0])
        text = _NAME.sub(lambda found: f"({values[found[0]] or 0})", text)
        number = _computed(text)
        return _mark(f"$(({expression}))") if number is None else str(number)


def _parameter(inner: str) -> tuple[str, str | None, str]:
    """Return (name, index or None, rest) of what stands in ${...}."""
    found = _PARAMETER.match(inner)
    if found is None or inner.startswith("!"):
        return "", None, inner
    name, rest = found[0], inner[found.end() :]
    if rest.startswith("[") and "]" in rest:
        index, _, rest = rest[1:].partition("]")
        return name, index, rest
    return name, None, rest


def _stripped(value: str, pattern: str, sign: str) -> str:
    """Return the value without its shortest or longest beginning or end that matches."""
    sizes = range(len(value) + 1) if len(sign) == 1 else range(len(value), -1, -1)
    for size in sizes:
        cut = value[:size] if sign[0] == "#" else value[len(value) - size :]
        if fnmatchcase(cut, pattern):
            return value[size:] if sign[0] == "#" else value[: len(value) - size]
    return value


def _test(words: list[str], *, glob: bool) -> bool | None:
    """Return the truth of what stands in [ ... ], or [[ ... ]] (`glob`: the right side of == is a pattern)."""
    # Either side decides by itself where it has this value.
    for sign, decides in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
        if sign in words[1:]:
            place = words.index(sign, 1)
            sides = [_test(part, glob=glob) for part in (words[:place], words[place + 1 :])]
            return decides if decides in sides else None if None in sides else not decides
    if words[:1] == ["!"]:
        value = _test(words[1:], glob=glob)
        return None if value is None else not value
    match words:
        case ["-z" | "-n" as sign, value] if (found := _MARK.fullmatch(value)) and re.fullmatch(r"\w+", found[1]):
            # Without a value there and in the environment it is empty.
            return sign == "-z"
    if any(map(untold, words)):
        return None
    match words:
        case ["-z"] | ["-n", ""] | []:
            return words == ["-z"]
        case ["-z", value]:
            return value == ""
        case ["-n", value] | [value]:
            return value != ""
        case [one, "=" | "==", two]:
            return fnmatchcase(one, two) if glob else one == two
        case [one, "!=", two]:
            return not (fnmatchcase(one, two) if glob else one == two)
        case [one, sign, two] if sign in _COMPARE and _is_number(one) and _is_number(two):
            return _COMPARE[sign](int(one), int(two))
    return None


_COMPARE = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: lambda one, two: one - two * _divided(one, two),
    ast.FloorDiv: lambda one, two: _divided(one, two),
}


def _divided(one: int, two: int) -> int:
    """Divide towards zero."""
    return abs(one) // abs(two) * (1 if (one < 0) is (two < 0) else -1)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d{1,18}", text) is not None


def _computed(text: str) -> int | None:
    """Return the value of an expression of whole numbers, + - * / % and parentheses; None for any other."""
    try:
        tree = ast.parse(text.strip().replace("/", "//"), mode="eval")
        return _number(tree.body)
    except (SyntaxError, ValueError, ZeroDivisionError, KeyError, RecursionError):
        return None


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp():
            return _BINARY[type(node.op)](_number(node.left), _number(node.right))
        case ast.UnaryOp(op=ast.USub()):
            return -_number(node.operand)
    raise ValueError(ast.dump(node))
