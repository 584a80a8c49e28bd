"""Written answers read in nbgrader's formgrader, by the way that instructor/README.md gives, in a headless Chromium.

Pictures go to the folder in `PICTURES`, if that is set.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Page, browser, executable, jupyter
from graded import LESSON
from test_grading_manual import handed_in, of

from labkit.grading import feedback, manual

pytestmark = pytest.mark.grading
EVIL = '<script>document.title = "owned"</script><b>no idea</b>'


@pytest.fixture
def formgrader(tmp_path: Path) -> Iterator[str]:
    """The address of formgrader, in the folder that `labkit grade --manual` laid out for two students."""
    if executable() is None:
        pytest.fail("make test-grading needs a browser: apt install chromium")
    handed_in(tmp_path, "ada", "The logits and their gradient are alive together when the backward pass begins.")
    handed_in(tmp_path, "bob", EVIL)
    folder = manual.sync(tmp_path).folder

    def command(port: int) -> list[str]:
        options = [
            "--no-browser",
            "--allow-root",
            "--ip=127.0.0.1",
            f"--port={port}",
            "--IdentityProvider.token=course",
        ]
        return [sys.executable, "-m", "jupyterlab", *options]

    with jupyter(command, folder, tmp_path) as address:
        yield f"{address}/formgrader?token=course"


def link(text: str, where: str = "a") -> str:
    """A JavaScript expression: the first link with this text."""
    return f"[...document.querySelectorAll({where!r})].find(e => e.textContent.includes({text!r}))"


def follow(page: Page, text: str, where: str = "a") -> None:
    """Click a link, and wait until another page is there."""
    before = page.run("location.href")
    page.click(link(text, where))
    page.wait(f"location.href !== {before!r} && document.readyState === 'complete'", 60)


def picture(page: Page, name: str) -> None:
    if folder := os.environ.get("PICTURES"):
        page.picture(Path(folder) / f"formgrader-{name}.png")


def test_an_answer_is_read_marked_and_comes_back(formgrader: str, tmp_path: Path) -> None:
    with browser(1300, 950) as page:
        page.open(formgrader, 90)
        follow(page, "Manual Grading")
        follow(page, LESSON, "td a")
        follow(page, LESSON, "td a")
        page.wait(f"!!({link('Submission #1', 'td a')})")
        picture(page, "list")
        assert "ada" not in page.run("document.querySelector('tbody').innerText"), "names are hidden until asked for"
        students = {}
        for number in (1, 2):
            if number > 1:
                page.run("history.back()")
                page.wait(f"!!({link('Submission #2', 'td a')})", 60)
            follow(page, f"Submission #{number}", "td a")
            page.wait(
                "document.querySelector('input#why') && document.querySelector('input#block_mib-check').placeholder"
            )
            text = page.run("document.body.innerText")
            students["bob" if "no idea" in text else "ada"] = number
            assert page.run("document.title") != "owned" and not page.run("[...document.querySelectorAll('b')].length")
            page.run("document.querySelector('input#why').scrollIntoView({block: 'center'})")
            if "no idea" in text:
                assert EVIL in text, "what a learner wrote is shown as text"
                page.click("document.querySelector('#why').closest('.panel').querySelector('.no-credit')")
            else:
                page.click("document.querySelector('#why').closest('.panel').querySelector('.full-credit')")
                page.run("document.querySelector('textarea#why-comment').focus()")
                page.type("Well said.")
                page.run("document.activeElement.blur()")  # leaving the field saves it
            time.sleep(1)
            page.wait("$.active === 0")  # saved
            picture(page, f"answer-{number}")
        assert set(students) == {"ada", "bob"}
    done = manual.sync(tmp_path)
    assert (done.marked, done.waiting) == (2, 0)
    ada, bob = (of(tmp_path, student, "why") for student in ("ada", "bob"))
    assert (ada.points, ada.status, ada.message) == (2, "graded", "Well said.")
    assert (bob.points, bob.status) == (0, "wrong")
    feedback.write(tmp_path)
    assert "Well said." in (tmp_path / "feedback" / "ada.html").read_text()
