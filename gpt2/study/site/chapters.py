"""A notebook as a chapter of the site: its question, its answer, a picture, minutes to read, and its body as HTML."""

from __future__ import annotations

import base64
import re
import struct
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path

import nbformat

from gpt2.study import paths
from gpt2.study.site import alive

WORDS_A_MINUTE = 200
MINUTES_A_SIGHT = 0.25  # a table, a figure
_TEMPLATE = Path(__file__).with_name("notebook.html.j2")
_LINK = re.compile(r'<a href="(?P<to>[^"]*)"[^>]*>(?P<words>.*?)</a>', re.DOTALL)
_SENTENCE = re.compile(r"(?:(?<=[.:?!])|(?<=[.:?!]\*\*)) (?=[A-Z0-9`])")
_NAMED = re.compile(r"\b(?P<word>[Nn]otebook )(?P<number>\d\d)\b")


@dataclass(frozen=True)
class Picture:
    """A picture of a notebook: its place in the site, its words, its size in pixels."""

    file: str
    alt: str
    png: bytes = field(repr=False)

    def html(self, *, link: bool = True) -> str:
        """The picture as an element; its full size is a tap away."""
        width, height = struct.unpack(">II", self.png[16:24])
        image = f'<img src="{self.file}" alt="{escape(self.alt)}" width="{width}" height="{height}">'
        return f'<a class="figure" href="{self.file}">{image}</a>' if link else image


@dataclass(frozen=True)
class Chapter:
    """A notebook, ready for its page. `question`, `answer` and `body` are HTML."""

    name: str
    question: str
    answer: str
    minutes: int
    pictures: tuple[Picture, ...] = field(repr=False)  # the main one first
    body: str = field(repr=False)

    @property
    def number(self) -> str:
        return self.name.partition("-")[0]

    @property
    def page(self) -> str:
        return f"{self.name}.html"


def chapters(folder: Path | None = None) -> list[Chapter]:
    """Every notebook of a folder, in the order of their names."""
    files = sorted((folder or paths.ROOT / "notebooks").glob("[0-9]*.ipynb"))
    answers = _answers(files[0].parent / "README.md") if files else {}
    names = [file.stem for file in files]
    return [_chapter(file, answers.get(file.stem), names) for file in files]


def _chapter(file: Path, answer: str | None, names: list[str]) -> Chapter:
    notebook = nbformat.read(file, as_version=4)
    minutes, answer = _minutes(notebook), answer or _answer(notebook)
    question = notebook.metadata.get("title") or _question(notebook) or file.stem
    pictures = _pictures(notebook, file.stem)
    alive.wake(notebook)
    body = _exporter().from_notebook_node(notebook, resources={"names": names})[0]
    return Chapter(file.stem, inline(question), _linked(inline(answer), names), minutes, pictures, body)


@cache
def _exporter():
    from nbconvert import HTMLExporter  # slow, and not needed to read a chapter's words

    return HTMLExporter(template_file=str(_TEMPLATE), exclude_anchor_links=True, filters={"linked": _linked})


def inline(text: str) -> str:
    """A line of Markdown as HTML, without a paragraph around it."""
    html = _exporter().environment.from_string("{{ text | markdown2html }}").render(text=text)
    return html.strip().removeprefix("<p>").removesuffix("</p>")


def _question(notebook) -> str:
    """The first heading."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    found = re.search(r"^#+ +(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def _answers(readme: Path) -> dict[str, str]:
    """The answers of notebooks/README.md: its table names notebook, question, answer and minutes."""
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line[:3] == "| ["]
    return {re.split(r"[\[\]]", row[0])[1]: row[2] for row in rows if len(row) >= 3}


def _answer(notebook) -> str:
    """The first paragraph of prose under the heading "Finding"; its first two sentences if it is long."""
    under = ""
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        for part in re.split(r"^(?=#)", cell.source, flags=re.MULTILINE):
            heading, _, rest = part.partition("\n") if part.startswith("#") else ("", "", part)
            under = heading.strip("# ").lower() if heading else under
            prose = rest.strip().partition("\n\n")[0].replace("\n", " ")
            if under == "finding" and prose:
                return " ".join(_SENTENCE.split(prose)[:2])
    return ""


def _minutes(notebook) -> int:
    """Minutes to read a notebook: its words, and a look at each table and figure."""
    prose = sum(len(cell.source.split()) for cell in notebook.cells if cell.cell_type == "markdown")
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    sights = sum(bool(output.get("data", {}).keys() & {"image/png", "text/html"}) for output in outputs)
    return max(1, round(prose / WORDS_A_MINUTE + sights * MINUTES_A_SIGHT))


def _pictures(notebook, name: str) -> tuple[Picture, ...]:
    """The pictures in order, the one of the section "Figure" first; each output gets the element that shows its own."""
    found, main, under = [], None, ""
    for cell in notebook.cells:
        under = (re.findall(r"^#+ *(.*)", cell.source, re.MULTILINE) if cell.cell_type == "markdown" else []) or under
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" not in data:
                continue
            alt = output.metadata.get("image/png", {}).get("alt") or data.get("text/plain", "")
            png = base64.b64decode(data["image/png"])
            picture = Picture(f"pictures/{name}-{len(found) + 1}.png", " ".join(alt.split()), png)
            output.picture = picture.html()
            found.append(picture)
            main = main or (picture if "Figure" in under else None)
    return tuple(found) if main is None else (main, *(picture for picture in found if picture is not main))


def _linked(html: str, names: list[str]) -> str:
    """Links between notebooks become links between pages; a link to what the site does not have becomes its words."""

    def kept(found: re.Match) -> str:
        to, words = found["to"], found["words"]
        if to.startswith("#") or "://" in to:
            return found[0]
        stem = Path(to.partition("#")[0]).stem
        return f'<a href="{stem}.html">{words}</a>' if stem in names else words

    def named(found: re.Match) -> str:
        stem = next((name for name in names if name.startswith(found["number"])), None)
        return f'<a href="{stem}.html">{found[0]}</a>' if stem else found[0]

    return _NAMED.sub(named, _LINK.sub(kept, html))
