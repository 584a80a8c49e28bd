"""The course as a person sees it: JupyterLab through `make lab`'s own command, and the book, in a headless Chromium.

`make test-browser` runs this file (its name keeps it out of the other tests), and `make test` does where Chromium is
installed. The variable PICTURES names a folder that keeps screenshots.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib.util
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from browser import Page, browser, jupyter

ROOT = Path(__file__).resolve().parents[1]
LESSON = "00_environment"
# most is fixed, so that few recipes are tried
PLAN = """import labkit as lab
fixed = dict(precision="amp-fp16", optimizer="adamw", loss="full", gradients="card", offload="none", clip=None)
lab.plan("gpt2", card="rtx3060-12gb", seq=256, batch=4, compile=False, **fixed).show()
"""
CELLS = "[...document.querySelectorAll('.jp-Notebook .jp-CodeCell')]"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return Path(os.environ.get("PICTURES") or tmp_path)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a JupyterLab that `make lab` started, in a copy of the course; nobody's work/ is touched. Besides
    the lessons it has a notebook with a plan."""
    tmp_path = tmp_path_factory.mktemp("lab")
    course = tmp_path / "course"
    for name in ("labkit", "notebooks", "tools", "data/reference"):
        shutil.copytree(ROOT / name, course / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Makefile", course)
    plan = nbformat.v4.new_code_cell(PLAN, id="plan")
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}  # or JupyterLab asks which
    nbformat.write(nbformat.v4.new_notebook(cells=[plan], metadata=kernel), course / "notebooks" / "plan.ipynb")
    (course / ".venv").symlink_to(sys.prefix)

    def command(port: int) -> list[str]:
        own = f"--ip=127.0.0.1 --port={port} --ServerApp.port_retries=0 --IdentityProvider.token=course"
        return ["make", "--old-file=setup", "lab", f"LAB=--no-browser {own}"]

    more = {"PYTHONPATH": str(course), "IPYTHONDIR": str(tmp_path / "ipython")}
    with jupyter(command, course, tmp_path, **more) as address:
        yield f"{address}/lab/workspaces/NAME/tree/NAME.ipynb?token=course"


def cell(text: str) -> str:
    """A JavaScript expression: the code cell whose source has this text."""
    return f"{CELLS}.find(c => c.querySelector('.jp-InputArea')?.textContent.includes({json.dumps(text)}))"


def output(text: str) -> str:
    """What stands below the code cell whose source has this text."""
    return f"({cell(text)}?.querySelector('.jp-OutputArea')?.textContent || '')"


def menu(page: Page, name: str, entry: str) -> None:
    """Open a menu and click an entry. A page that is still busy drops a click: it is then made again."""
    entry_of = f"[...document.querySelectorAll('.lm-Menu-item')].find(e => e.textContent.includes({json.dumps(entry)}))"
    until = time.monotonic() + 60
    while not page.run(f"!!({entry_of})"):
        assert time.monotonic() < until, f"the menu {name} does not open"
        page.click(f"[...document.querySelectorAll('.lm-MenuBar-item')].find(e => e.textContent.trim() === '{name}')")
        time.sleep(2)
    page.click(entry_of)


def write(page: Page, field: str, text: str) -> None:
    """Replace what stands in a field or an editor; a click that a busy page drops is made again."""
    until = time.monotonic() + 60
    while not page.run(f"({field}).contains(document.activeElement)"):
        assert time.monotonic() < until, f"cannot write into {field}"
        page.click(field)
        time.sleep(0.5)
    page.key("a", 65, modifiers=2)
    page.type(text)
    page.wait(f"(({field}).value ?? ({field}).textContent).includes({json.dumps(text)})")


def show(page: Page, element: str, picture: Path) -> None:
    """Bring an element into view and take its picture; JupyterLab lays cells out as they come into view."""
    for _ in range(3):
        page.run(f"({element}).scrollIntoView({{block: 'center'}})")
        time.sleep(0.3)
    # JupyterLab asks whether to send news; nobody answers for the learner here, the question only hides the text
    page.run("document.querySelectorAll('.Toastify').forEach(toast => toast.style.display = 'none')")
    page.picture(picture)


@contextlib.contextmanager
def opened(lab: str, name: str, pictures: Path) -> Iterator[Page]:
    """A notebook in JupyterLab, its kernel waiting."""
    with browser(1400, 1000) as page:
        page.open(lab.replace("NAME", name), 90)
        page.wait(f"{CELLS}.length > 0 && !document.querySelector('#jupyterlab-splash')", 90)
        page.wait("!!document.querySelector('.jp-Notebook-ExecutionIndicator[data-status=idle]')", 90)
        try:
            yield page
        except AssertionError:
            page.picture(pictures / f"failed-{name}.png")
            raise
        outside = [r for r in page.requests if not r.startswith(("http://127.0.0.1", "data:", "blob:"))]
        assert outside == []


def test_a_lesson_in_jupyterlab(lab: str, pictures: Path) -> None:
    with opened(lab, LESSON, pictures) as page:
        page.picture(pictures / "lab-1-opened.png")

        menu(page, "Run", "Run All Cells")
        page.wait(f"{output('lab.finish(')}.includes('Rows')", 240)
        assert (
            page.run(f"{CELLS}.filter(c => c.querySelector('[data-mime-type*=\"error\"], .jp-mod-error')).length") == 0
        )
        numbered = f"{CELLS}.filter(c => /\\[\\d+\\]/.test(c.querySelector('.jp-InputPrompt').textContent)).length"
        assert page.run(numbered) == page.run(f"{CELLS}.length")
        figures = page.run(
            "[...document.querySelectorAll('.jp-OutputArea img')]"
            ".map(i => [i.naturalWidth, i.alt.length, i.clientWidth])"
        )
        assert len(figures) >= 4 and all(width > 300 and words > 20 and shown > 300 for width, words, shown in figures)
        show(page, "document.querySelectorAll('.jp-OutputArea img')[1]", pictures / "lab-2-figure.png")

        check = output("lab.check.number(")
        before = page.wait(check)
        assert "put a number in place of" in before
        for answer, sign in (("product_rate = 4096", "✗"), ("product_rate = 2 * 4096 * 1024 * 8192 / 0.8e-3", "✓")):
            write(page, f"({cell('product_rate = ')}).querySelector('.cm-content')", answer)
            for _ in range(2):  # the answer, then the check right below
                page.key("Enter", 13, modifiers=8)
            page.wait(f"{check} !== {json.dumps(before)} && {check}.includes('product_rate')", 60)
            before = page.run(check)
            assert sign in before, before
            show(page, cell("lab.check.number("), pictures / f"lab-3-{'right' if sign == '✓' else 'wrong'}.png")


def test_the_planners_widgets_move_the_bar(lab: str, pictures: Path) -> None:
    bar = "[...document.querySelectorAll('.widget-html [style*=relative] > span')].map(e => e.style.width).join(' ')"
    with opened(lab, "plan", pictures) as page:
        menu(page, "Run", "Run All Cells")
        page.wait(f"document.querySelectorAll('.widget-dropdown select').length >= 5 && {bar} !== ''", 180)
        before = page.run(bar)
        show(page, "document.querySelector('.widget-html')", pictures / "plan-1.png")
        write(page, "document.querySelector('.widget-text input[type=number]')", "64")  # the batch
        page.key("Enter", 13)
        page.wait(f"{bar} !== {json.dumps(before)}", 60)
        show(page, "document.querySelector('.widget-html')", pictures / "plan-2.png")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The book of two small lessons, as tests/test_book.py makes them."""
    import test_book

    folder = tmp_path_factory.mktemp("book")
    spec = importlib.util.spec_from_file_location("book", ROOT / "tools" / "book.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["book"] = module
    spec.loader.exec_module(module)
    wide = "## Wide\n\n```\n" + "a wide line " * 30 + "\n```\n\n| " + "cell | " * 30 + "\n|" + " --- |" * 30 + "\n"
    books = [
        test_book.lesson(
            folder / "run", "01_one", "One", "# One", "## The experiment\n\nA *selective* recompute.", wide
        ),
        test_book.lesson(
            folder / "run", "02_two", "Two", "# Two", "## Pitfalls\n\nA recompute, and selective <b>x</b>"
        ),
    ]
    module.build(books, folder / "site", "Run on a card.")
    return folder / "site"


@pytest.fixture(params=["file", "http"])
def address(request: pytest.FixtureRequest, site: Path) -> Iterator[str]:
    """The book, from the disk and from a web server."""
    if request.param == "file":
        yield site.as_uri()
        return

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_the_book_is_searched_and_read_on_a_phone(address: str, pictures: Path) -> None:
    hits = "[...document.querySelectorAll('#found a')].map(a => a.getAttribute('href'))"
    with browser(1280, 900) as page:
        page.open(f"{address}/index.html")
        page.run("document.querySelector('#search input').focus()")
        page.type("recompute selec")
        page.wait("!document.getElementById('found').hidden")
        assert page.run(hits) == ["01_one.html#The-experiment", "02_two.html#Pitfalls"]
        page.type("tively wrong")
        assert page.run(f"{hits}.length") == 0 and "Nothing found" in page.run(
            "document.getElementById('found').innerText"
        )
        page.run("document.querySelector('#search input').value = ''")
        page.type("the exp")
        assert page.run(f"{hits}[0]") == "01_one.html#The-experiment"  # a word of the title comes first
        page.key("Enter", 13)
        page.wait("location.href.endsWith('01_one.html#The-experiment') && document.readyState === 'complete'")
        page.picture(pictures / "book-wide.png")
        page.click("document.querySelector('a[rel=next]')")
        page.wait("location.href.endsWith('02_two.html') && document.readyState === 'complete'")
        page.resize(390, 800, mobile=True)
        page.open(f"{address}/01_one.html")
        assert page.run("document.documentElement.scrollWidth") <= 390  # what is wide scrolls by itself
        assert page.run("document.querySelector('details.lessons').open") is False
        page.picture(pictures / "book-phone.png")
        assert page.errors == []
        assert [r for r in page.requests if not r.startswith((address, "data:"))] == []
