"""Reads a shell script into its commands, and runs nothing: words stay as they are written, for
`verl_fuse.cli.shell` to expand.

Invariants (tests/unit/cli/test_shell.py):
- a comment, a line that goes on, quotes, and nested substitutions end where bash ends them;
- text of a here-document, redirections and the background sign are no words of a command;
- a script that ends in the middle of a construct is a FuseError that names the line.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from verl_fuse.errors import FuseError


@dataclass(frozen=True)
class Command:
    """A simple command: its words as written. A word NAME=( ... ) is one word."""

    words: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Match:
    """The condition of an arm of `case`: the word, and the patterns."""

    word: str
    patterns: tuple[str, ...]


@dataclass(frozen=True)
class Branch:
    """`if`, `case`, `&&`, `||` and `while`: bodies with the condition of each, of which the first that holds is run.

    A condition is the commands before `then`, or of `case`; `negated`: that of `||` and `until`; `repeats`: run again
    as long as it holds.
    """

    arms: tuple[tuple["Body | Match", "Body"], ...]
    otherwise: "Body" = ()
    negated: bool = False
    repeats: bool = False


@dataclass(frozen=True)
class Loop:
    """`for NAME in WORDS`."""

    name: str
    words: tuple[str, ...]
    body: "Body"


@dataclass(frozen=True)
class Function:
    """A function's definition."""

    name: str
    body: "Body"


@dataclass(frozen=True)
class Subshell:
    """`( ... )`: commands whose variables are forgotten."""

    body: "Body"


Node = Command | Branch | Loop | Function | Subshell
Body = tuple[Node, ...]
_OPERATORS = (";;&", "&&", "||", ";;", ";&", "|&", "&", "|", ";", "(", ")", "\n")
_REDIRECTIONS = ("&>>", "<<<", "<<-", "&>", ">>", "<<", ">&", "<&", ">|", "<>", ">", "<")
_ENDS = {"then", "elif", "else", "fi", "do", "done", "esac", "}"}


@dataclass(frozen=True)
class _Token:
    """A word, or an operator (`operator`)."""

    text: str
    line: int
    operator: bool = False


def parse(text: str) -> Body:
    """Return the commands of a script; a FuseError names the line of a construct without an end."""
    return _Parser(_Lexer(text.replace("\r\n", "\n")).tokens()).all()


def closing(text: str, start: int, close: str, quotes: str = "'\"`") -> int:
    """Return the index of the `close` that ends the construct whose contents begin at `start`; -1 without one."""
    opening = {")": "(", "}": "{"}.get(close)
    # Commands and arrays have comments, arithmetic and ${...} have none.
    comments = close == ")" and not text.startswith("(", start)
    depth, index = 0, start
    while index < len(text):
        char = text[index]
        if comments and char == "#" and (index == start or text[index - 1] in " \t\n;"):
            end = text.find("\n", index)
            if end < 0:
                return -1
            index = end
            continue
        if char == close and not depth:
            return index
        if char == close:
            depth -= 1
        elif char == opening:
            depth += 1
        if char == "\\":
            index += 1
        elif char in quotes:
            index = end_of_quote(text, index)
            if index < 0:
                return -1
        index += 1
    return -1


def end_of_quote(text: str, start: int) -> int:
    """Return the index of the quote that ends the one at `start`; -1 without one."""
    quote, index = text[start], start + 1
    while index < len(text):
        if text[index] == quote:
            return index
        if quote == "'":
            index += 1
            continue
        if text[index] == "\\":
            index += 1
        elif quote == '"' and text.startswith("${", index):
            # An apostrophe is no quote there.
            index = closing(text, index + 2, "}", '"`')
            if index < 0:
                return -1
        elif quote == '"' and text.startswith("$(", index):
            index = closing(text, index + 2, ")")
            if index < 0:
                return -1
        index += 1
    return -1


class _Lexer:
    def __init__(self, text: str):
        self._text, self._at, self._line = text, 0, 1
        self._documents: list[tuple[str, bool]] = []

    def tokens(self) -> list[_Token]:
        found: list[_Token] = []
        text = self._text
        while self._at < len(text):
            char = text[self._at]
            if text.startswith("\\\n", self._at):
                self._move(2)
            elif char in " \t":
                self._move(1)
            elif char == "#":
                self._move(len(text[self._at :].partition("\n")[0]))
            elif text.startswith("((", self._at) and (
                not found or found[-1].operator or found[-1].text in ("if", "elif", "while", "until", "for")
            ):
                # An arithmetic command; its value is no condition that is decided here.
                self._skip_arithmetic(found)
            elif sign := next((sign for sign in _REDIRECTIONS if text.startswith(sign, self._at)), None):
                self._redirect(sign)
            elif operator := next((one for one in _OPERATORS if text.startswith(one, self._at)), None):
                found.append(_Token(operator, self._line, operator=True))
                self._move(len(operator))
                if operator == "\n":
                    self._skip_documents()
            else:
                line = self._line
                word = self._word()
                at_redirection = self._at < len(text) and text[self._at] in "<>"
                # In `2>file` the number is of the redirection.
                if not (word.isdigit() and at_redirection):
                    found.append(_Token(word, line))
                if word == "[[" and (len(found) < 2 or found[-2].operator or found[-2].text in ("if", "elif", "!")):
                    self._test(found)
        return found

    def _move(self, count: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def _skip_arithmetic(self, found: list[_Token]) -> None:
        end = closing(self._text, self._at + 2, ")")
        end = self._ended(end, "((")
        found.append(_Token(self._text[self._at : end + 2], self._line))
        self._move(end + 2 - self._at)

    def _ended(self, end: int, what: str) -> int:
        if end < 0:
            raise FuseError(f"line {self._line}: {what} has no end")
        return end

    def _redirect(self, sign: str) -> None:
        self._move(len(sign))
        while self._text[self._at : self._at + 1] in (" ", "\t") and self._at < len(self._text):
            self._move(1)
        if self._text.startswith("(", self._at):
            # A process in place of a file.
            self._move(self._ended(closing(self._text, self._at + 1, ")"), f"{sign}(") + 1 - self._at)
            return
        target = self._word() if self._at < len(self._text) else ""
        if sign in ("<<", "<<-"):
            self._documents.append((target.replace("'", "").replace('"', "").replace("\\", ""), sign == "<<-"))

    def _skip_documents(self) -> None:
        for end, indented in self._documents:
            while self._at < len(self._text):
                line = self._text[self._at :].partition("\n")[0]
                self._move(min(len(line) + 1, len(self._text) - self._at))
                if (line.lstrip("\t") if indented else line) == end:
                    break
        self._documents.clear()

    def _test(self, found: list[_Token]) -> None:
        """Read the words of [[ ... ]], in which operators are words."""
        while True:
            while self._at < len(self._text) and (
                self._text[self._at] in " \t\n" or self._text.startswith("\\\n", self._at)
            ):
                self._move(1)
            if self._at >= len(self._text):
                self._ended(-1, "[[")
            line = self._line
            signs = (sign for sign in ("&&", "||", "<", ">", "(", ")") if self._text.startswith(sign, self._at))
            sign = next(signs, "")
            word = sign or self._word()
            if sign:
                self._move(len(sign))
            found.append(_Token(word, line))
            if word == "]]":
                return

    def _word(self) -> str:
        """Return the word that begins here, as written, and move behind it."""
        text, start, index = self._text, self._at, self._at
        pieces: list[str] = []
        while index < len(text) and text[index] not in " \t\n;&|()<>":
            char = text[index]
            if text.startswith("\\\n", index):
                pieces.append(text[start:index])
                start = index = index + 2
                continue
            if char == "\\":
                index += 2
                continue
            if char in "'\"`":
                index = self._ended(end_of_quote(text, index), f"the quote {char}") + 1
                continue
            if text.startswith(("$(", "${"), index):
                close = ")" if text[index + 1] == "(" else "}"
                index = self._ended(closing(text, index + 2, close), text[index : index + 2]) + 1
                continue
            index += 1
            if char == "=" and text[index : index + 1] == "(":
                index = self._ended(closing(text, index + 1, ")"), "=(") + 1
        if index == self._at:
            # A sign that begins no word here, such as the ) of a pattern.
            index += 1
        pieces.append(text[start:index])
        self._move(min(index, len(text)) - self._at)
        return "".join(pieces)


class _Parser:
    def __init__(self, tokens: Sequence[_Token]):
        self._tokens, self._at = tokens, 0

    def all(self) -> Body:
        found: list[Node] = []
        while self._at < len(self._tokens):
            found += self._body()
            # A sign without its partner; bash would end here with an error of syntax.
            self._at += 1
        return tuple(found)

    def _peek(self) -> _Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _is(self, *texts: str) -> bool:
        token = self._peek()
        return token is not None and token.text in texts

    def _skip_lines(self) -> None:
        while self._is("\n", ";"):
            self._at += 1

    def _expect(self, text: str, begun: int) -> None:
        self._skip_lines()
        if not self._is(text):
            raise FuseError(f"line {begun}: there is no {text!r} for what begins here")
        self._at += 1

    def _body(self) -> Body:
        """Read commands up to a word or sign that ends some construct, which is not read."""
        found: list[Node] = []
        while (token := self._peek()) is not None:
            if token.operator and token.text in ("\n", ";", "&", "|", "|&"):
                self._at += 1
            elif token.text in _ENDS or (token.operator and (token.text == ")" or token.text.startswith(";"))):
                break
            elif token.operator and token.text in ("&&", "||"):
                self._at += 1
                while self._is("\n"):
                    self._at += 1
                before, after = found[-1:], tuple(self._command())
                del found[-1:]
                found.append(Branch(((tuple(before), after),), negated=token.text == "||"))
            else:
                found += self._command()
        return tuple(found)

    def _command(self) -> list[Node]:
        token = self._peek()
        if token is None:
            return []
        if token.operator and token.text == "(":
            self._at += 1
            body = self._body()
            self._expect(")", token.line)
            return [Subshell(body)]
        match token.text:
            case "{":
                self._at += 1
                body = self._body()
                self._expect("}", token.line)
                return list(body)
            case "if":
                return [self._if()]
            case "while" | "until":
                self._at += 1
                condition = self._body()
                return [Branch(((condition, self._rounds(token.line)),), negated=token.text == "until", repeats=True)]
            case "for" | "select":
                return [self._for(token.line)]
            case "case":
                return [self._case(token.line)]
            case "function":
                name = self._tokens[self._at + 1].text if self._at + 1 < len(self._tokens) else ""
                self._at += 2
                if self._is("("):
                    self._at += 2
                return [self._function(name)]
        return self._simple()

    def _if(self) -> Branch:
        arms: list[tuple[Body, Body]] = []
        otherwise: Body = ()
        begun = self._tokens[self._at].line
        while self._is("if", "elif"):
            self._at += 1
            condition = self._body()
            self._expect("then", begun)
            arms.append((condition, self._body()))
        if self._is("else"):
            self._at += 1
            otherwise = self._body()
        self._expect("fi", begun)
        return Branch(tuple(arms), otherwise)

    def _for(self, begun: int) -> Loop:
        self._at += 1
        name = self._peek()
        self._at += 1
        self._skip_lines()
        words: list[str] = []
        if self._is("in"):
            self._at += 1
            while (token := self._peek()) is not None and not token.operator:
                words.append(token.text)
                self._at += 1
        else:
            words = ['"$@"']
        body = self._rounds(begun)
        # for ((...)) counts: what it counts to is not computed.
        return Loop(name.text if name else "", () if name and name.text.startswith("((") else tuple(words), body)

    def _rounds(self, begun: int) -> Body:
        """Read what stands between `do` and `done`."""
        self._expect("do", begun)
        body = self._body()
        self._expect("done", begun)
        return body

    def _case(self, begun: int) -> Branch:
        self._at += 1
        subject = self._peek()
        self._at += 1
        self._expect("in", begun)
        arms: list[tuple[Match, Body]] = []
        self._skip_lines()
        while not self._is("esac"):
            patterns: list[str] = []
            while (token := self._peek()) is not None and not (token.operator and token.text == ")"):
                if not token.operator:
                    patterns.append(token.text)
                self._at += 1
            self._expect(")", begun)
            body = self._body()
            arms.append((Match(subject.text if subject else "", tuple(patterns)), body))
            if self._is(";;", ";&", ";;&"):
                self._at += 1
            self._skip_lines()
        self._expect("esac", begun)
        return Branch(tuple(arms))

    def _simple(self) -> list[Node]:
        words: list[str] = []
        line = self._tokens[self._at].line if self._at < len(self._tokens) else 0
        while (token := self._peek()) is not None and not token.operator:
            words.append(token.text)
            self._at += 1
        signs = [token.text for token in self._tokens[self._at : self._at + 2]]
        if len(words) == 1 and signs == ["(", ")"]:
            self._at += 2
            return [self._function(words[0])]
        if not words:
            self._at += 1
        return [Command(tuple(words), line)] if words else []

    def _function(self, name: str) -> Function:
        self._skip_lines()
        return Function(name, tuple(self._command()))
