"""The course as a static site to read: executed lessons, contents, search, and nothing loaded from anywhere else.

    python tools/book.py                    the fullest run in runs/, or a run made now; writes book/
    python tools/book.py --run runs/ID      the executed notebooks of that run
    python tools/book.py --lessons 00 01    these alone

Open book/index.html; it needs no server.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from labkit import course, summary
from labkit.results import Ledger
from labkit.runs import Run
from labkit.units import UserError

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "tools" / "site"
COURSE = "Train and run GPT-2-class models inside a small GPU"
_HEADING = re.compile(r'<h([23]) id="([^"]+)">(.*?)<a class="anchor-link"', re.DOTALL)
_LINK = re.compile(
    r'<a href="(?P<name>[0-9]{2}_[a-z0-9_]+)\.ipynb(?P<anchor>#[^"]*)?"(?P<more>[^>]*)>(?P<text>.*?)</a>', re.DOTALL
)
_WORD = re.compile(r"[^\W]+", re.UNICODE)
_INLINE = ("a", "b", "code", "em", "i", "span", "strong", "sub", "sup")  # a word may go on across these
_LEAST, _MOST = 2, 40  # letters of a word that is worth finding


@dataclass(frozen=True)
class Page:
    """One page: its file, the lesson's number (empty for others), title, and body in HTML."""

    file: str
    number: str
    title: str
    body: str


@dataclass
class Section:
    """A stretch of text under one heading: what the search finds."""

    page: str
    title: str
    link: str
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join("".join(self.parts).split())


def build(notebooks: Sequence[Path], out: Path, foot: str, claims: Sequence[tuple[str, ...]] = ()) -> list[Path]:
    """Write the site of these executed notebooks to the folder `out`, replacing what is there; returns its pages.

    `foot` stands below every page (where the numbers come from); `claims` are rows of the page of claims. Raises
    `UserError` for a folder that holds something else than a site.
    """
    if out.exists() and not (out / "search-index.js").is_file() and any(out.iterdir()):
        raise UserError(f"{out} holds something else than the book: choose another folder")
    names = {path.stem for path in notebooks}
    lessons = [_lesson(path, names) for path in notebooks]
    pages = [_index(notebooks, lessons), *lessons, *([_claims(claims)] if claims else [])]
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    written, sections = [], []
    template = _template()
    for place, page in enumerate(pages):
        around = {
            "before": pages[place - 1] if place else None,
            "after": pages[place + 1] if place + 1 < len(pages) else None,
        }
        contents = [{"anchor": a, "title": _plain(t)} for level, a, t in _HEADING.findall(page.body) if level == "2"]
        text = template.render(
            title=page.title,
            course=COURSE,
            file=page.file,
            pages=pages,
            contents=contents,
            body=page.body,
            foot=foot,
            **around,
        )
        (out / page.file).write_text(text, encoding="utf-8")
        written.append(out / page.file)
        sections += _sections(page)
    (out / "search-index.js").write_text(f"window.COURSE_INDEX = {_index_of(sections)};\n", encoding="utf-8")
    (out / "search.js").write_text((SITE / "search.js").read_text(encoding="utf-8"), encoding="utf-8")
    (out / "site.css").write_text((SITE / "site.css").read_text(encoding="utf-8") + _colours(), encoding="utf-8")
    return written


def _lesson(path: Path, names: Collection[str]) -> Page:
    import nbformat
    from nbconvert import HTMLExporter

    notebook = nbformat.read(path, as_version=4)
    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True)
    exporter.language_code = "en"
    body, _ = exporter.from_notebook_node(notebook)

    def linked(match: re.Match[str]) -> str:
        if match["name"] not in names:
            return match["text"]  # a lesson that this book lacks
        return f'<a href="{match["name"]}.html{match["anchor"] or ""}"{match["more"]}>{match["text"]}</a>'

    body = _LINK.sub(linked, body)
    title = notebook.metadata.get("labkit", {}).get("title") or path.stem.replace("_", " ")
    return Page(f"{path.stem}.html", path.stem[:2], title, body)


def _index(notebooks: Sequence[Path], lessons: Sequence[Page]) -> Page:
    rows = []
    for path, page in zip(notebooks, lessons, strict=True):
        front: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["metadata"].get("labkit", {})
        link = f'<a href="{page.file}">{page.number} {html.escape(page.title)}</a>'
        after = f"you can {front['after']}" if front.get("after") else ""
        rows.append(
            f"<tr><td>{link}</td><td>{html.escape(front.get('question', ''))}</td><td>{html.escape(after)}</td></tr>"
        )
    body = (
        f"<h1>{html.escape(COURSE)}</h1><p>Lessons to read, with what they gave when they were run. To work through"
        " them, guess before you measure and have your answers checked, open the notebooks: <code>make lab</code>.</p>"
        '<table class="course"><thead><tr><th>Lesson</th><th>Question</th><th>Afterwards</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
    return Page("index.html", "", "The course", body)


def _claims(claims: Sequence[tuple[str, ...]]) -> Page:
    parts = ["<h1>Claims of the field, and what was measured</h1>"]
    for lesson in dict.fromkeys(row[0] for row in claims):
        mine = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row[1:]) for row in claims if row[0] == lesson]
        rows = "".join(f"<tr>{cells}</tr>" for cells in mine)
        head = "".join(f"<th>{name}</th>" for name in ("Claim", "Said by", "Found", "Verdict", "For"))
        title = lesson.replace("_", " ")
        parts.append(
            f'<h2 id="{lesson}">{title}<a class="anchor-link" href="#{lesson}">¶</a></h2><p><a href="{lesson}.html">The'
            f" lesson</a></p><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        )
    return Page("claims.html", "", "Claims", "".join(parts))


def _template() -> Any:
    import jinja2

    return jinja2.Environment(autoescape=False).from_string((SITE / "page.html.j2").read_text(encoding="utf-8"))


def _colours() -> str:
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    rules = [re.sub(r"\.highlight *\{ *background:[^}]*\}", "", sheet) for sheet in (light, dark)]
    return f"\n{rules[0]}\n@media (prefers-color-scheme:dark){{\n{rules[1]}\n}}\n"


class _Reader(HTMLParser):
    """The text of a page, cut at its headings; scripts, styles and pictures left out."""

    def __init__(self, page: Page):
        super().__init__()
        self.sections = [Section(page.title, page.title, page.file)]
        self.page, self.skipped, self.heading = page, 0, False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self._space(tag)
        if tag in ("style", "script") or found.get("class") == "anchor-link":
            self.skipped += 1
        elif tag in ("h2", "h3"):
            self.sections.append(Section(self.page.title, "", f"{self.page.file}#{found.get('id')}"))
            self.heading = True
        elif tag == "img" and found.get("alt"):
            self.sections[-1].parts.append(f" {found['alt']} ")

    def _space(self, tag: str) -> None:
        if tag not in _INLINE:
            self.sections[-1].parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        self._space(tag)
        if tag in ("h2", "h3"):
            self.heading = False
        if self.skipped and tag in ("style", "script", "a"):
            self.skipped -= 1

    def handle_data(self, data: str) -> None:
        if self.skipped:
            return
        if self.heading:
            self.sections[-1].title += data
        self.sections[-1].parts.append(data)


def _sections(page: Page) -> list[Section]:
    reader = _Reader(page)
    reader.feed(page.body)
    return [section for section in reader.sections if section.text]


def _index_of(sections: Iterable[Section]) -> str:
    """The index as JSON: sections, and for each word the sections it stands in and how often."""
    found = list(sections)
    words: dict[str, dict[int, int]] = {}
    for number, section in enumerate(found):
        for word in _WORD.findall(f"{section.title} {section.text}".lower()):
            if _LEAST <= len(word) <= _MOST:
                places = words.setdefault(word, {})
                places[number] = places.get(number, 0) + 1
    index = {
        "sections": [{"page": s.page, "title": s.title.strip(), "link": s.link, "text": s.text} for s in found],
        "words": {word: list(places.items()) for word, places in sorted(words.items())},
    }
    return json.dumps(index, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")


def _plain(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", markup)).strip()


def _newest(runs: Path, wanted: Sequence[Path]) -> Path | None:
    """Of the finished runs, one with the most of the lessons that are wanted; the newest of several."""
    found = []
    for path in runs.glob("*"):
        run = Run.load(path)
        there = sum((path / "notebooks" / one.name).is_file() for one in wanted)
        if run is not None and run.finished and there:
            found.append((there, run.started, path))
    return max(found)[2] if found else None


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's text; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--run", type=Path, help="the folder of a run; by default the fullest in runs/, or one made now"
    )
    parser.add_argument("--lessons", nargs="*", default=[], help="names or numbers; all by default")
    parser.add_argument("--out", type=Path, default=ROOT / "book")
    wish = parser.parse_args(arguments)
    try:
        wanted = course.choose(wish.lessons, ROOT / "notebooks")
        folder = wish.run or _newest(ROOT / "runs", wanted)
        if folder is None:
            folder = ROOT / "runs" / "book"
            course.run([path.stem for path in wanted], out=folder)
        run = Run.load(folder)
        books = [folder / "notebooks" / path.name for path in wanted if (folder / "notebooks" / path.name).is_file()]
        if run is None or not books:
            raise UserError(f"{folder} holds no run with executed lessons")
        missing = [path.stem for path in wanted if folder / "notebooks" / path.name not in books]
        found = summary.by_lesson(Ledger(folder / "ledger.jsonl").rows())
        claims = [(name, *claim.cells()) for name, one in found.items() for claim in one.claims]
        where = run.machine.get("card") or "a machine without a GPU: memory is predicted, times are reference rows"
        foot = f"Run on {where}, {run.started[:10]}, labkit {run.labkit}, PyTorch {run.machine.get('torch')}."
        pages = build(books, wish.out, foot, [row for row in claims if any(row[0] == b.stem for b in books)])
    except UserError as error:
        print(f"book: {error}", file=sys.stderr)
        return 2
    if missing:
        print(f"not in that run: {', '.join(missing)}")
    print(f"{len(pages)} pages: {wish.out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
