"""How submissions are graded, and against what."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..units import UserError
from . import keeping, lessons, rerun, session
from .sandbox import Limits


@dataclass(frozen=True)
class Options:
    """How to grade: how many submissions at once, in a sandbox or not, keeping results that are there or not, with the
    whole notebook run again or exercises only, the seconds that one of its cells may take and those of an answer."""

    jobs: int = 1
    walled: bool = True
    fresh: bool = False
    exercises_only: bool = False
    cell_seconds: float = rerun.CELL_SECONDS
    answer_seconds: float = session.ANSWER_SECONDS
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class Course:
    """The lessons that submissions are graded against: their files, what they ask, the folder of hidden tests, and of
    those that were handed in the modules that answers will import."""

    files: dict[str, Path]
    lessons: dict[str, lessons.Lesson]
    hidden: Path
    data: str = ""  # a digest of what lies in the course's data
    preload: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, hidden: Path, data: Path) -> Course:
        """Every lesson in `folder`. Raises `UserError` when there is none."""
        files = {f.stem: f for f in sorted(folder.glob("[0-9][0-9]_*.py"))}
        if not files:
            raise UserError(f"no lessons in {folder}: grading needs the course's folder with lessons/ in it")
        return cls(
            files, {name: lessons.read(file) for name, file in files.items()}, hidden, keeping.digest_of_data(data)
        )

    def digest(self, lesson: str) -> str:
        """What of the course besides its hidden tests decides a score of this lesson."""
        return lessons.digest(self.files[lesson], Path(__file__).resolve().parents[1])

    def made_of(self, lesson: str, options: Options) -> dict[str, str]:
        """What besides the submission decides a score of this lesson, by the names in `keeping.NAMES`."""
        if lesson not in self.files:
            return {}
        whole = not options.exercises_only
        return {
            "course": self.digest(lesson),
            "hidden": lessons.digest(self.hidden / f"{lesson}.py"),
            "data": self.data,
            "whole": str(whole),
            "timeout": f"{options.cell_seconds:g}" if whole else "",
            "answer": f"{options.answer_seconds:g}",
            "sandbox": str(options.walled),
            "limits": str(options.limits) if options.walled else "",
            **keeping.machine(),
        }
