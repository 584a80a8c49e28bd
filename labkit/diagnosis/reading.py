"""Reading a text or a log of any size in bounded memory: what repeats is counted, what is new is kept.

A line is new when no line with the same letters was seen before (digits do not count). The beginning and the end are
kept as they are, so that a traceback at the end is whole. Series of numbers are read from every line.
"""

from __future__ import annotations

import io
import os
import re
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ..units import UserError
from .series import Series

_PIECE = 1 << 20  # bytes read at once
_LONGEST = 1600  # characters of a line that are looked at
HEAD, TAIL, NEW = 1500, 3000, 6000  # lines kept
_KEPT_CHARACTERS = 500_000
_EVERY = 10_000  # after so many lines, series are read from one line in _SAMPLED, and from the last TAIL lines
_SAMPLED = 16
_TEMPLATES = 200_000
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b\x0e-\x1f]")
_ENDLESS = re.compile(r"\S{300,}")
_DIGITS = str.maketrans("0123456789", "0" * 10)
_LOWER = str.maketrans({chr(c): chr(c + 32) for c in range(65, 91)})
_MAGIC = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zX": "xz", b"(\xb5/\xfd": "zstd"}


@dataclass
class Reading:
    """What was kept of a text: ``text`` (lines joined) and ``lower`` (the same in lower case, letter for letter), the
    number of each kept line, how many lines there were, and the series of numbers."""

    text: str
    lower: str
    numbers: list[int]
    count: int
    series: Series
    _starts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        position = 0
        for line in self.text.split("\n"):
            self._starts.append(position)
            position += len(line) + 1

    def at(self, position: int) -> tuple[int, str]:
        """Line number in the source and the text of the line that holds `position` of ``text``."""
        index = bisect_right(self._starts, position) - 1
        end = self.text.find("\n", position)
        line = self.text[self._starts[index] : end if end >= 0 else len(self.text)]
        return self.numbers[index] if index < len(self.numbers) else 0, line.strip()

    def lines(self) -> Iterator[tuple[int, str]]:
        """Kept lines with their numbers."""
        return zip(self.numbers, self.text.split("\n"), strict=False)

    @property
    def short(self) -> bool:
        """Whether this can be what a person wrote, rather than a log."""
        return self.count <= 400


def read(text: str | None = None, file: str | Path | None = None) -> Reading:
    """Read a text, a file, or standard input (file ``-``).

    Raises `UserError` for what is missing, empty, compressed or binary.
    """
    if text is not None:
        if not text.strip():
            raise UserError("the text is empty: there is nothing to diagnose")
        return keep(_split(io.BytesIO(text.encode("utf-8", "replace")), "the text"))
    if file is None:
        raise UserError("nothing to diagnose: give a text, --file LOG, --file - or --recipe FILE")
    if str(file) == "-":
        return _read_stream(sys.stdin.buffer, "standard input")
    path = Path(file).expanduser()
    try:
        with path.open("rb") as stream:
            return _read_stream(stream, str(path))
    except IsADirectoryError:
        raise UserError(f"{path} is a folder: give the log file in it") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _read_stream(stream: IO[bytes], name: str) -> Reading:
    reading = keep(_split(stream, name))
    if not reading.text.strip():
        raise UserError(f"{name} is empty: there is nothing to diagnose")
    return reading


def keep(lines: Iterable[str]) -> Reading:
    """What `Reading` holds of these lines."""
    series = Series()
    seen: set[str] = set()
    kept: list[tuple[int, str]] = []
    tail: deque[tuple[int, str]] = deque(maxlen=TAIL)
    number = size = 0
    for number, line in enumerate(lines, start=1):
        if len(line) > 300:
            line = _ENDLESS.sub(lambda m: f"{m[0][:200]}...", line[:_LONGEST])
        room = len(kept) < HEAD + NEW and size < _KEPT_CHARACTERS
        if room:
            template = line[:160].translate(_DIGITS)
            fresh = template not in seen
            if fresh and len(seen) < _TEMPLATES:
                seen.add(template)
            if fresh or number <= HEAD:
                kept.append((number, line))
                size += len(line)
        if len(tail) == TAIL:
            _feed(series, *tail[0])
        tail.append((number, line))
    for item in tail:
        series.feed(*item)
    size = 0
    ending: list[tuple[int, str]] = []
    for item in reversed(tail):
        size += len(item[1]) + 1
        if size > _KEPT_CHARACTERS:
            break
        ending.append(item)
    rows = sorted({*kept, *ending})
    text = "\n".join(line for _, line in rows)
    return Reading(text, text.translate(_LOWER), [n for n, _ in rows], number, series)


def _feed(series: Series, number: int, line: str) -> None:
    """Read the numbers of a line that the end of the log has left behind; of a long log, of some of them."""
    if number <= _EVERY or number % _SAMPLED == 0 or "nan" in line:
        series.feed(number, line)


def _split(stream: IO[bytes], name: str) -> Iterator[str]:
    """Lines of a stream; a carriage return ends a line too, as progress bars use it."""
    first = stream.read(_PIECE)
    if not first:
        return
    encoding = _encoding(first, name)
    rest = ""
    decoder = io.IncrementalNewlineDecoder(_decoder(encoding), translate=True)
    piece = first
    while piece:
        lines = (rest + decoder.decode(piece)).split("\n")
        rest = lines.pop()
        while len(rest) > 4 * _LONGEST:  # a line without an end is cut, not collected
            lines.append(rest[:_LONGEST])
            rest = ""
        for line in lines:
            yield _COLOURS.sub("", line) if "\x1b" in line or "\x08" in line or "\x00" in line else line
        piece = stream.read(_PIECE)
    if rest + decoder.decode(b"", final=True):
        yield _COLOURS.sub("", rest)


def _decoder(encoding: str):  # type: ignore[no-untyped-def]
    import codecs

    return codecs.getincrementaldecoder(encoding)(errors="replace")


def _encoding(first: bytes, name: str) -> str:
    """How the text is written. Raises `UserError` for what is no text."""
    for magic, kind in _MAGIC.items():
        if first.startswith(magic):
            raise UserError(f"{name} is compressed ({kind}): unpack it first")
    if first.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"  # what `>` writes in older PowerShells
    sample = first[: 1 << 16]
    control = sum(sample.count(bytes([c])) for c in (*range(1, 7), 14, 15, 16, 17, 18, 19, 20, 21, 22, 23))
    if sample.count(0) > 0.001 * len(sample) or control > 0.02 * len(sample):
        raise UserError(f"{name} is binary, not a log")
    try:
        sample.decode("utf-8")
    except UnicodeDecodeError as error:
        strange = sum(c >= 0x80 for c in sample)
        if error.start < len(sample) - 4:
            if strange > 0.3 * len(sample):
                raise UserError(f"{name} is binary, not a log") from error
            return "latin-1" if os.name != "nt" else "cp1252"
    return "utf-8-sig"
