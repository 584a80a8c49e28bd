"""Which files were handed in, and which of what lies there is not graded: nothing is passed over in silence.

``SUBMISSIONS/<student>/`` holds notebooks and files made by ``labkit submit``, in itself or up to three folders deeper,
as learning-management systems export them. Taken are notebooks, whatever a download has made of their names
(``.IPYNB``, ``name (1).ipynb``, ``name.ipynb.txt``), and zip files that ``labkit submit`` wrote, whatever they are
called now. Everything else is named with a reason. No link is followed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import bundles, executing
from ..units import UserError

FILE = "not-graded.json"
DEEPEST = 3  # folders below a student's own
MOST = 2000  # entries that are looked at below one student's folder
_BOOK = re.compile(r"\.ipynb([ _]*\(\d+\))?(\.txt|\.json)?$", re.IGNORECASE)
_BUNDLE = re.compile(r"\.labkit[^./]{0,20}\.zip$", re.IGNORECASE)
_COPY = re.compile(r"[ _]*\((\d+)\)$")
_NAMES = 8  # of files on one line
MOST_LINES = 20  # on a terminal
_SPECIAL = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


@dataclass(frozen=True)
class Entry:
    """A file that was handed in."""

    student: str
    file: Path
    relative: str  # to the folder of submissions
    depth: int = 2  # how many of the last parts of the path lie inside that folder

    @property
    def bundled(self) -> bool:
        """Whether it is to be read as a file of ``labkit submit``."""
        return self.file.name.lower().endswith(".zip")

    @property
    def linked(self) -> bool:
        """Whether the file, or a folder between it and the folder of submissions, is a link."""
        return any(part.is_symlink() for part in [self.file, *self.file.parents][: self.depth])

    @property
    def stem(self) -> str:
        """The file's name without its endings and without the number that a download gave it."""
        name = (_BUNDLE if self.bundled else _BOOK).sub("", self.file.name)
        return _COPY.sub("", name.removesuffix(".zip"))

    @property
    def copy(self) -> int:
        """The number that a download gave the file: 1 for ``name (1).ipynb``, 0 for none."""
        numbers = re.findall(r"\((\d{1,6})\)", self.file.name)
        return int(numbers[-1]) if numbers else 0


@dataclass(frozen=True)
class LeftOut:
    """What is not graded: whose it is (empty where it lies in no student's folder), its path below the folder of
    submissions (empty: the whole folder of the student), and why."""

    student: str
    path: str
    reason: str


@dataclass(frozen=True)
class Intake:
    """What a folder of submissions holds."""

    entries: tuple[Entry, ...]
    left_out: tuple[LeftOut, ...] = ()


def collect(folder: Path) -> Intake:
    """Everything below `folder`, in order. Raises `UserError` when nothing in it can be graded."""
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: submissions are expected as {folder}/<student>/<lesson>.ipynb")
    found: list[Entry] = []
    left: list[LeftOut] = []
    for entry in _listed(folder, LeftOut("", "", ""), left):
        name = safe(entry.name)
        if entry.name.startswith("."):
            left.append(LeftOut("", name, "hidden: its name begins with a dot"))
        elif entry.is_symlink():
            left.append(LeftOut("", name, "a link; copy what it leads to"))
        elif not entry.is_dir():
            left.append(LeftOut("", name, f"in no student's folder; expected is {folder.name}/<student>/{name}"))
        else:
            _student(folder, Path(entry.path), found, left)
    if not found:
        why = f" ({'; '.join(lines(left)[:3])})" if left else ""
        raise UserError(
            f"no submissions in {folder}: they are expected as {folder}/<student>/<lesson>.ipynb, or as the "
            f"{bundles.SUFFIX} that labkit submit writes{why}"
        )
    return Intake(tuple(_apart(found)), tuple(left))


def lines(left: Sequence[LeftOut], most: int = MOST_LINES) -> list[str]:
    """What was left out, a line for each student and reason: ``not graded: ada/notes.pdf: neither ...``; past `most` of
    them, how many more there are."""
    found = [f"not graded: {', '.join(names)}: {reason}" for _, names, reason in grouped(left)]
    more = len(found) - most
    return [*found[:most], f"not graded: and {more} more, all in summary.html"] if more > 1 else found


def grouped(left: Iterable[LeftOut]) -> list[tuple[str, list[str], str]]:
    """Student, paths (the first few, the rest counted) and reason of what was left out for the same reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for one in left:
        found.setdefault((one.student, one.reason), []).append(one.path or f"{one.student}/")
    return [
        (student, [*names[:_NAMES], *([f"and {len(names) - _NAMES} more"] if len(names) > _NAMES else [])], reason)
        for (student, reason), names in found.items()
    ]


def save(out: Path, folder: Path, left: Sequence[LeftOut]) -> None:
    """Keep what was left out of `folder` beside the results, for the class summary; other folders' lists stay."""
    known = _known(out) | {str(folder.resolve()): [asdict(one) for one in left]}
    text = json.dumps(known, indent=1, ensure_ascii=False).encode("utf-8", "replace").decode()
    executing.write_text(out / FILE, text + "\n")


def load(out: Path) -> list[LeftOut]:
    """What was left out of every folder that was graded into `out`."""
    try:
        return [LeftOut(**row) for rows in _known(out).values() for row in rows]
    except TypeError:  # edited by hand, or of another version: the next grading writes it anew
        return []


def safe(name: str, most: int = 120) -> str:
    """A name as it may stand in a path, a table and a terminal: no half or control characters, at most `most` bytes."""
    clean = "".join(c if c.isprintable() else "?" for c in name.encode("utf-8", "replace").decode())
    if len(clean.encode()) <= most:
        return clean
    return f"{clean.encode()[: most - 9].decode('utf-8', 'ignore')}-{_mark(name)}"


def _mark(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:8]


def _known(out: Path) -> dict[str, list[dict[str, str]]]:
    found = executing.read_json(out / FILE)
    return found if isinstance(found, dict) else {}


def _student(folder: Path, own: Path, found: list[Entry], left: list[LeftOut]) -> None:
    """All that lies in one student's folder."""
    student, before = safe(own.name), len(found)
    looked, lost = 0, len(left)
    waiting = [own]
    while waiting:
        here = waiting.pop(0)
        for entry in _listed(here, LeftOut(student, _below(folder, here), ""), left):
            looked += 1
            path = Path(entry.path)
            relative, depth = _below(folder, path), len(path.relative_to(own).parts)
            if looked > MOST:
                left.append(LeftOut(student, relative, f"not looked at: more than {MOST} files in one folder"))
                waiting.clear()
                break
            try:
                reason = _refused(entry, depth)
            except OSError as error:  # it went while we looked
                reason = f"cannot be looked at: {error.strerror or error}"
            if reason:
                left.append(LeftOut(student, relative, reason))
            elif entry.is_dir(follow_symlinks=False):
                waiting.append(path)
            else:
                found.append(Entry(student, path, relative, depth + 1))
    if len(found) == before:
        left.append(LeftOut(student, "", "nothing in this folder can be graded" if len(left) > lost else "empty"))


def _refused(entry: os.DirEntry[str], depth: int) -> str:
    """Why what lies in a student's folder is not taken; empty when it is, or when it is a folder to look into."""
    name, link = entry.name, entry.is_symlink()
    if name.startswith(".") or name == "__MACOSX":
        return "hidden, or a copy that a system keeps for itself"
    if entry.is_dir(follow_symlinks=False):
        return f"more than {DEEPEST} folders deep" if depth > DEEPEST else ""
    if link and not (_BOOK.search(name) or _BUNDLE.search(name)):
        return "a link"
    if link:
        return ""  # opening it says what it is, in the student's own line of the scores
    if not entry.is_file(follow_symlinks=False):
        return f"{_SPECIAL.get(stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode), 'a special file')}, not a file"
    if _BOOK.search(name) or _BUNDLE.search(name):
        return ""
    if name.lower().endswith(".zip"):
        return "" if _submitted(Path(entry.path)) else "a zip file that labkit submit did not write; unpack it"
    return "neither a notebook nor a file that labkit submit wrote"


def _submitted(file: Path) -> bool:
    """Whether a zip file of any name holds what ``labkit submit`` writes."""
    try:
        bundles.read(file)
    except UserError:
        return False
    return True


def _listed(folder: Path, about: LeftOut, left: list[LeftOut]) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as listing:
            yield from sorted(listing, key=lambda entry: entry.name)
    except OSError as error:
        if not about.student:
            raise UserError(f"cannot look into {folder}: {error.strerror or error}") from error
        left.append(LeftOut(about.student, about.path, f"cannot be looked into: {error.strerror or error}"))


def _below(folder: Path, path: Path) -> str:
    return safe(path.relative_to(folder).as_posix(), 400)


def _apart(entries: Sequence[Entry]) -> Iterator[Entry]:
    """The entries; students whose folders' names come out the same once they are fit to be shown are kept apart."""
    owners: dict[str, set[str]] = {}
    for entry in entries:
        owners.setdefault(entry.student, set()).add(_owner(entry))
    for entry in entries:
        if len(owners[entry.student]) == 1 or _owner(entry) == entry.student:
            yield entry
        else:
            yield Entry(f"{entry.student}-{_mark(_owner(entry))}", entry.file, entry.relative, entry.depth)


def _owner(entry: Entry) -> str:
    """The name of the student's folder as it is."""
    return entry.file.parts[-entry.depth]
