"""The grammar of npy headers: Python literals of strings, integers, booleans, None, tuples, lists and dictionaries.

numpy evaluates the header as a Python literal; here no header can exhaust a stack or grow a number without end.
"""

from __future__ import annotations

import re

from convert.errors import CorruptError
from convert.limits import DEFAULT, Limits, exceeded

_TOKEN = re.compile(
    r"[ \t\r\n\f]*(?:(?P<punctuation>[{}()\[\]:,])|(?P<word>True|False|None)\b|(?P<number>-?[0-9]+)L?\b"
    r"|[uU]?(?P<string>'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\"))"
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[\\'\"nrtabfv0])")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "0": "\0"}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_MAX_DIGITS = 20


class Literal:
    """A Python literal of strings, integers, booleans, None, tuples, lists and dictionaries."""

    def __init__(self, text: str, limits: Limits = DEFAULT) -> None:
        self._text = text
        self._at = 0
        self._depth = 2 * limits.depth + 4  # a list and a tuple for each level, in the dictionary; a shape in them
        self._limit = limits.depth

    def whole(self) -> object:
        """The value the text is; CorruptError if it is not one literal."""
        kind, token = self._token()
        value = self._value(kind, token, 0)
        if self._text[self._at :].strip(" \t\r\n\f\0"):
            raise self._error("nothing more")
        return value

    def _error(self, expected: str) -> CorruptError:
        found = self._text[self._at : self._at + 20]
        return CorruptError(
            f"the header is no plain Python literal (expected {expected}, found {found!r} at character {self._at})"
        )

    def _token(self) -> tuple[str, str]:
        match = _TOKEN.match(self._text, self._at)
        if match is None or match.lastgroup is None:
            raise self._error("a string, number, tuple, list or dictionary")
        self._at = match.end()
        return match.lastgroup, match[match.lastgroup]

    def _value(self, kind: str, token: str, depth: int) -> object:
        if kind == "string":
            return self._string(token[1:-1])
        if kind == "word":
            return {"True": True, "False": False, "None": None}[token]
        if kind == "number":
            digits = token.lstrip("-")
            if len(digits) > _MAX_DIGITS:
                raise CorruptError(f"a number of {len(digits)} digits in the header")
            if digits != "0" and digits[0] == "0":
                raise self._error("a number without leading zeros")
            return int(token)
        if token not in _CLOSERS:
            raise self._error("a value")
        if depth >= self._depth:
            raise exceeded("depth", "a header is nested too deeply", self._depth, needed=2 * self._limit)
        return self._container(token, depth + 1)

    def _container(self, opener: str, depth: int) -> object:
        items: list[object] = []
        pairs: dict[str, object] = {}
        closer = _CLOSERS[opener]
        comma = False
        while True:
            kind, token = self._token()
            if token == closer and kind == "punctuation":
                break
            value = self._value(kind, token, depth)
            if opener == "{":
                if self._token() != ("punctuation", ":"):
                    raise self._error("a colon")
                if not isinstance(value, str) or value in pairs:
                    raise self._error("each key once, as a string")
                pairs[value] = self._value(*self._token(), depth)
            else:
                items.append(value)
            kind, token = self._token()
            comma = (kind, token) == ("punctuation", ",")
            if not comma:
                if (kind, token) != ("punctuation", closer):
                    raise self._error(f"a comma or {closer}")
                break
        if opener == "{":
            return pairs
        if opener == "[":
            return items
        return tuple(items) if comma or len(items) != 1 else items[0]

    def _string(self, body: str) -> str:
        if "\\" not in body:
            return body
        plain = _ESCAPE.sub("", body)
        if "\\" in plain:
            raise self._error("a string without unknown escapes")
        return _ESCAPE.sub(_unescape, body)


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if code[0] in "xuU":
        number = int(code[1:], 16)
        return chr(number) if number < 0x110000 else "\ufffd"
    return _ESCAPES.get(code, code)
