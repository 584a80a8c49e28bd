"""What a learner's code must not do, noticed from inside its process: functions exchanged, files and sockets opened.

This is no wall (that is `sandbox`): it is how a score of zero gets its reason. Only what the learner's own cells do
counts, seen by the first frame outside the standard library.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable
from typing import Any

_FILES = {
    "open": "opens", "os.listdir": "lists", "os.scandir": "lists", "os.remove": "removes", "os.rename": "renames",
    "os.mkdir": "makes", "os.rmdir": "removes", "os.chmod": "changes", "os.link": "links", "os.symlink": "links",
    "os.truncate": "changes", "os.chdir": "goes to",
}  # fmt: skip
_SOCKETS = {"socket.__new__", "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname"}
_PRYING = {
    "sys._getframe", "sys._current_frames", "sys._current_exceptions", "sys.settrace", "sys.setprofile",
    "gc.get_objects", "gc.get_referrers", "gc.get_referents", "object.__getattr__",
}  # fmt: skip
_PROCESSES = {"subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn"}
MOST_TOLD = 100  # observations of one answer
_STANDARD = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
_LEARNERS = ("<answer:", "<own:")
_PATCHED = (
    "builtins", "math", "time", "random", "statistics", "json", "operator", "torch", "torch.cuda", "torch.cuda.memory",
    "torch.nn.functional", "torch.nn.utils", "torch.utils.checkpoint", "torch.autograd", "torch.amp", "torch.compiler",
    "numpy",
)  # fmt: skip
_CLASSES = (("torch", "Tensor"), ("torch.nn", "Module"), ("torch.optim", "Optimizer"), ("torch.autograd", "Function"))


class Watch:
    """Tells `say` what the learner's cells do outside their `own` and `readable` folders, and, where they must not
    look for `inputs`, that they look into frames, closures and the collector. A hook cannot be taken out again."""

    def __init__(
        self, say: Callable[[str, str], None], own: Iterable[str], readable: Iterable[str], inputs: bool = False
    ):
        self._say, self._own, self._inputs = say, tuple(os.path.realpath(a) for a in own), inputs
        self._readable = self._own + tuple(os.path.realpath(a) for a in readable)
        self._busy, self._told = False, set[str]()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        pries = self._inputs and event in _PRYING
        if self._busy or not (pries or event in _FILES or event in _SOCKETS or event in _PROCESSES):
            return
        self._busy = True  # what is done here raises events, too
        try:
            frame = sys._getframe(1)
            if pries and frame.f_code.co_filename.startswith(_LEARNERS):  # libraries do this all the time
                self._tell("tampered", f"looks into the process that grades it ({event})")
            elif pries or not _by_learner(frame):
                return
            elif event in _SOCKETS:
                self._tell("tampered", "opens a network connection")
            elif event in _PROCESSES:
                self._tell("note", "starts another process")
            else:
                self._files(event, arguments)
        finally:
            self._busy = False

    def _tell(self, kind: str, text: str) -> None:
        """Each thing once, however often it is done."""
        if text not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(text)
            self._say(kind, text)

    def _files(self, event: str, arguments: tuple[Any, ...]) -> None:
        reads = event in ("os.listdir", "os.scandir", "os.chdir") or (event == "open" and not _for_writing(*arguments))
        allowed = self._readable if reads else self._own
        for place in arguments[: 2 if event in ("os.rename", "os.link", "os.symlink") else 1]:
            if isinstance(place, bytes):
                place = os.fsdecode(place)
            if not isinstance(place, str):
                continue
            real = os.path.realpath(place)
            if not any(real == a or real.startswith(a + os.sep) for a in allowed):
                does = _FILES[event] if reads or event != "open" else "writes to"
                self._tell("tampered", f"{does} {place[:100]}, which is outside its folder")


def _for_writing(place: Any, mode: Any = None, flags: Any = 0) -> bool:
    if isinstance(mode, str):
        return bool(set(mode) & set("wax+"))
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def _by_learner(frame: types.FrameType | None) -> bool:
    """Whether the first frame outside the standard library is one of the learner's cells."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not (name.startswith(("<frozen", _STANDARD)) and "site-packages" not in name):
            return name.startswith(_LEARNERS)
        frame = frame.f_back
    return False


class Fingerprints:
    """The functions of labkit, torch and the standard library as they are now, to be compared with later."""

    def __init__(self) -> None:
        self._before = dict(_functions())

    def changed(self) -> list[str]:
        """The names of those that are others now; of modules that were not there then, those that a cell put in."""
        now = dict(_functions())
        other = [
            name for name, (value, code) in self._before.items() if name not in now or not _same(now[name], value, code)
        ]
        planted = [n for n, (value, code) in now.items() if n not in self._before and _of_a_cell(value, code)]
        return sorted([*other, *planted])


def _same(now: tuple[Any, Any], value: Any, code: Any) -> bool:
    return (now[0] is value and now[1] is code) or _wrapped(now[0], value)


def _of_a_cell(value: Any, code: Any) -> bool:
    if isinstance(code, types.CodeType):
        return code.co_filename.startswith(_LEARNERS)
    return isinstance(value, type) and getattr(value, "__module__", None) == "__main__"


def _wrapped(value: Any, before: Any) -> bool:
    """Whether torch's compiler has put its own function in place of another, as it does when it is first used."""
    code = getattr(value, "__code__", None)
    if not isinstance(code, types.CodeType) or not code.co_filename.startswith(sys.prefix):
        return False
    return getattr(value, "__wrapped__", None) is before or f"torch{os.sep}_dynamo{os.sep}" in code.co_filename


def _functions() -> Iterable[tuple[str, tuple[Any, Any]]]:
    owners: list[tuple[str, dict[str, Any]]] = []
    for name, module in list(sys.modules.items()):
        if name in _PATCHED or name.split(".")[0] == "labkit":
            owners.append((name, vars(module)))
            if name.split(".")[0] == "labkit":
                kinds = [(k, v) for k, v in list(vars(module).items()) if isinstance(v, type) and v.__module__ == name]
                owners += [(f"{name}.{k}", dict(vars(v))) for k, v in kinds]
    for name, kind in _CLASSES:
        if name in sys.modules and hasattr(sys.modules[name], kind):
            owners.append((f"{name}.{kind}", dict(vars(getattr(sys.modules[name], kind)))))
    for owner, found in owners:
        for key, value in list(found.items()):
            inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if callable(inner) or isinstance(value, property):
                yield f"{owner}.{key}", (inner, getattr(inner, "__code__", None))


def pretends(value: Any, depth: int = 0) -> bool:
    """Whether the class of a value, or of one inside it, was written by the learner and decides what comparing or
    computing with it gives."""
    if type(value) in (list, tuple, dict) and depth < 4:
        inner = value.values() if type(value) is dict else value
        return any(pretends(item, depth + 1) for item in list(inner)[:1000])
    special = {
        "__eq__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__float__",
        "__int__",
        "__index__",
        "__sub__",
        "__rsub__",
    }
    for kind in type.__dict__["__mro__"].__get__(type(value)):
        found = type.__dict__["__dict__"].__get__(kind)
        if found.get("__module__") == "__main__" and special & set(found) and "__dataclass_fields__" not in found:
            return True
    return False
