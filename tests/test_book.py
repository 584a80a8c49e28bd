"""The static course: links that resolve, figures with words, an index that finds, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

from labkit.runs import Run
from labkit.units import UserError

ROOT = Path(__file__).resolve().parents[1]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
FOOT = "Run on NVIDIA H200, 2026-12-01."


@pytest.fixture(scope="module")
def book() -> ModuleType:
    spec = importlib.util.spec_from_file_location("book", ROOT / "tools" / "book.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["book"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def lesson(folder: Path, name: str, title: str, *markdown: str) -> Path:
    front = {"title": title, "question": f"What is {title}?", "after": "say what <it> is"}
    found = nbformat.v4.new_notebook(metadata={"labkit": front, "kernelspec": {"name": "python3", "display_name": ""}})
    found.cells = [nbformat.v4.new_markdown_cell(text, id=f"text-{i}") for i, text in enumerate(markdown)]
    code = nbformat.v4.new_code_cell("plot_the_wedge(1)", id="code", execution_count=1)
    code.outputs = [
        nbformat.v4.new_output(
            "display_data", {"image/png": PIXEL}, metadata={"image/png": {"alt": "A falling wedge."}}
        ),
        nbformat.v4.new_output("display_data", {"text/html": '<a href="02_two.ipynb">next</a>', "text/plain": "next"}),
        nbformat.v4.new_output("stream", text="peak 4.00 GiB\n"),
    ]
    found.cells.append(code)
    folder.mkdir(exist_ok=True)
    nbformat.write(found, folder / f"{name}.ipynb")
    return folder / f"{name}.ipynb"


@pytest.fixture(scope="module")
def site(book: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("book")
    one = lesson(
        folder / "run", "01_one", "One", "# One", "## The experiment\n\nA *selective* recompute. [Two](02_two.ipynb)"
    )
    two = lesson(
        folder / "run",
        "02_two",
        "Two",
        "# Two",
        "## Pitfalls\n\nSee [one](01_one.ipynb#The-experiment), later [nine](09_nine.ipynb).",
        "### `seq` and batch\n\nx",
    )
    claims = [("01_one", "it halves", "blogs", "53 %", "✗ does not hold", "sm_90 · measured")]
    pages = book.build([one, two], folder / "site", FOOT, claims)
    assert [page.name for page in pages] == ["index.html", "01_one.html", "02_two.html", "claims.html"]
    return folder / "site"


class Seen(HTMLParser):
    """Links, anchors, pictures and everything that a browser would load."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []
        self.silent = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        self.loaded += [found[name] for name in ("src", "data", "poster") if name in found]
        self.loaded += [found["href"]] if tag == "link" else []
        self.silent += tag == "img" and not found.get("alt")


def test_every_link_resolves_and_nothing_comes_from_elsewhere(site: Path) -> None:
    pages = {path.name: Seen(path.read_text()) for path in site.glob("*.html")}
    followed = 0
    for name, page in pages.items():
        for link in page.links:
            if re.match(r"https?://", link):
                continue
            file, _, anchor = link.partition("#")
            target = pages.get(file or name)
            assert target is not None, f"{name} links to {link}"
            assert not anchor or anchor in target.anchors, f"{name} links to {link}, which has no such heading"
            followed += 1
        outside = [one for one in page.loaded if not one.startswith("data:") and not (site / one).is_file()]
        assert outside == [], f"{name} loads {outside}"
        assert page.silent == 0, f"{name} has a picture without words"
    assert followed > 20
    for sheet in site.glob("*.css"):
        assert not re.search(r"@import|url\(", sheet.read_text())
    assert not re.search(r"https?:|fetch\(|XMLHttp", (site / "search.js").read_text())


def test_a_lesson_is_there_with_its_outputs_and_its_neighbours(site: Path) -> None:
    page = (site / "01_one.html").read_text()
    for wanted in ('alt="A falling wedge."', "peak 4.00 GiB", "plot_the_wedge", FOOT, '<a href="#The-experiment">'):
        assert wanted in page
    assert 'rel="prev" href="index.html"' in page and 'rel="next" href="02_two.html"' in page
    assert ".ipynb" not in page and 'name="viewport"' in page
    other = (site / "02_two.html").read_text()
    assert '<a href="01_one.html#The-experiment">one</a>, later nine.' in other  # a lesson that is not in the book
    index = (site / "index.html").read_text()
    assert "What is One?" in index and "say what &lt;it&gt; is" in index
    assert "✗ does not hold" in (site / "claims.html").read_text()


def test_the_index_finds_words_where_they_stand(site: Path) -> None:
    text = (site / "search-index.js").read_text()
    index: dict[str, Any] = json.loads(text.removeprefix("window.COURSE_INDEX = ").rstrip(";\n"))

    def found(word: str) -> list[str]:
        return [index["sections"][number]["link"] for number, _ in index["words"].get(word, [])]

    assert found("selective") == ["01_one.html#The-experiment"]
    assert found("wedge") == ["01_one.html#The-experiment", "02_two.html#seq-and-batch"]  # the words of a figure
    assert found("batch") == ["02_two.html#seq-and-batch"]
    assert found("halves") == ["claims.html#01_one"]
    assert "</" not in text.replace("<\\/", "")  # nothing that could end the script


def test_figures_of_a_notebook_are_those_of_its_page(site: Path) -> None:
    found = re.findall(r"data:image/png;base64,([^\"]+)", (site / "01_one.html").read_text())
    assert [base64.b64decode(one) for one in found] == [base64.b64decode(PIXEL)]


def test_another_folder_is_not_overwritten(book: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(UserError, match="something else than the book"):
        book.build([lesson(tmp_path / "run", "01_one", "One", "# One")], tmp_path, FOOT)
    assert (tmp_path / "mine.txt").read_text() == "keep me"


def test_a_folder_without_a_run_is_one_sentence(
    book: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert book.main(["--run", str(tmp_path), "--out", str(tmp_path / "site")]) == 2
    assert capsys.readouterr().err.strip() == f"book: {tmp_path} holds no run with executed lessons"


def test_without_a_run_one_is_made_and_the_fullest_is_taken(
    book: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["01_one", "02_two"]
    for name in names:
        lesson(tmp_path / "notebooks", name, name, f"# {name}")

    def run(chosen: list[str], *, out: Path, started: str = "2026-12-01T10:00:00Z") -> None:
        (out / "notebooks").mkdir(parents=True)
        for name in chosen:
            lesson(out / "notebooks", name, name, f"# {name}, executed")
        Run(started, {"card": "NVIDIA H200", "torch": "2.11"}, "a line", (), finished=started).save(out)

    monkeypatch.setattr(book, "ROOT", tmp_path)
    monkeypatch.setattr(book.course, "run", run)
    assert book.main(["--out", str(tmp_path / "first")]) == 0
    assert "02_two, executed" in (tmp_path / "first" / "02_two.html").read_text()
    run(["01_one"], out=tmp_path / "runs" / "later", started="2026-12-02T10:00:00Z")
    assert book.main(["--out", str(tmp_path / "second")]) == 0
    assert (tmp_path / "second" / "02_two.html").is_file() and "not in that run" not in capsys.readouterr().out
