"""The study as a site to read: `python -m gpt2.study.site.build`, into build/site (or `$STUDY_OUT/site`).

A contents page, a page per notebook, a walk through the step and a calculator: plain files that need no kernel, no
network and no server. The same study gives the same bytes.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from html import escape, unescape
from pathlib import Path
from string import Template

from gpt2.memory import gpus
from gpt2.step import Recipe
from gpt2.study import hooks, paths, runs
from gpt2.study.interactive import calculator, grid, page
from gpt2.study.site.chapters import Chapter, chapters

TITLE = "Where training memory goes"
ABOUT = "Every byte of a GPT-2 training step: accounted for, predicted without a GPU, and beside what a real one did."
MOST_BYTES = 15 * 10**6
_HERE = Path(__file__).parent
WALKS = (  # (heading, what to look for, recipe, card)
    ("As published", "fp32, attention written out, AdamW. The summit is the loss, at the start of backward.",
     Recipe(), "A40"),
    ("With 16 bits, fused attention and a loss in chunks", "No T x T matrix, and an eighth of the logits at a time: "
     "what is left is activations.", Recipe(precision="bf16", attention="sdpa", loss="chunked"), "H100"),
    ("With checkpointed blocks", "Each block keeps its input only, and runs forward again inside backward.",
     Recipe(checkpoint="block"), "A40"),
)


def main() -> int:
    """Make the site; says where it is. 1 if it cannot be written."""
    start = time.perf_counter()
    try:
        folder, count, size = build()
    except OSError as error:
        print(f"error: cannot write the site to {paths.shorten(place())}: {error.strerror or error}", file=sys.stderr)
        return 1
    taken = time.perf_counter() - start
    print(f"{count} files, {size / 1e6:.1f} MB, in {taken:.0f} s: open {paths.shorten(folder / 'index.html')}")
    return 0


def place() -> Path:
    """The folder of the site."""
    return paths.out() / ("site" if paths.out() != paths.ROOT else "build/site")


def build(notebooks: Path | None = None) -> tuple[Path, int, int]:
    """Write the site of a folder of notebooks; returns its folder, how many files it has, and their bytes.

    Files of an earlier site that this one does not have are removed.
    """
    folder, files = place(), pages(chapters(notebooks))
    paths.sweep(folder)
    for name, data in files.items():
        paths.write(folder / name, data)
    for old in [*folder.glob("*.html"), *folder.glob("pictures/*")]:
        if str(old.relative_to(folder)) not in files:
            old.unlink()
    return folder, len(files), sum(map(len, files.values()))


def pages(found: Sequence[Chapter]) -> dict[str, bytes]:
    """Every file of the site by its name."""
    texts = {"index.html": contents(found), "calculator.html": calculator_page(), "walk.html": walk_page(),
             "style.css": (_HERE / "site.css").read_text(encoding="utf-8")}
    for chapter, before, after in zip(found, [None, *found], [*found[1:], None], strict=False):
        kicker = f'<p class="kicker">Notebook {chapter.number} · {_minutes(chapter.minutes)}</p>'
        texts[chapter.page] = sheet(plain(chapter.question), kicker + chapter.body, around(before, after))
    files = {name: text.encode() for name, text in texts.items()}
    return files | {picture.file: picture.png for chapter in found for picture in chapter.pictures}


def contents(found: Sequence[Chapter]) -> str:
    """The first page: what this is, the two things to touch, and every notebook with its answer."""
    cards = "".join(map(_card, found))
    minutes = sum(chapter.minutes for chapter in found)
    return sheet(TITLE, (
        f"<h1>{TITLE}</h1><p class=\"lede\">Train GPT-2 small on 8 sequences of 1,024 tokens. The weights are 475 MiB. "
        "The step takes 17,054. Here is every byte of the difference, predicted without a GPU and set beside what real "
        "ones did.</p>"
        '<div class="doors"><a href="walk.html"><b>Walk through the step</b>Play it or drag it, allocation by '
        'allocation.</a><a href="calculator.html"><b>Turn the knobs</b>Model, batch, precision, card: what fits, and '
        "what fails first.</a></div>"
        f"<h2>{len(found)} questions</h2><p>Each page asks one, commits to a guess, measures, and says how far off the "
        f"guess was. All of them: {_minutes(minutes)}.</p><ol class=\"chapters\">{cards}</ol>"),
        "<p>Made from the executed notebooks of the study by <code>make html</code>. Nothing here asks the network for "
        "anything.</p>")


def _card(chapter: Chapter) -> str:
    picture = chapter.pictures[0].html(link=False) if chapter.pictures else ""
    return (f'<li class="chapter"><h3><a href="{chapter.page}">{chapter.question}</a></h3><p>{chapter.answer}</p>'
            f'<p class="about">{chapter.number} · {_minutes(chapter.minutes)}</p>{picture}</li>')


def calculator_page() -> str:
    """The calculator alone, with the exact answers of every card."""
    table = grid.load()
    words = (f"Formulas answer while you drag. Where the step has been simulated, {len(table):,} times on "
             f"{len(gpus.names())} cards, the exact answer stands beside them, with the request that sets the peak or "
             "fails. Memory in MiB, AdamW, a full training step.")
    return sheet("Calculator", f"<h1>What fits?</h1><p>{words}</p>{page.calculator_html(table)}"
                 "<p>Exact answers to any setting: <code>python -m gpt2 predict --batch 12 --gpu H100</code>, or the "
                 "same calculator in a running notebook.</p>")


def walk_page() -> str:
    """Three steps to walk through."""
    parts = []
    for heading, look, recipe, gpu in WALKS:
        experiment = replace(runs.of_recipe(recipe), readings=True)
        trace = runs.predicted(experiment, gpu, calculator.TORCH.get(gpu))
        walk = page.walk_html(trace, readings=hooks.of_step(trace), recipe=recipe.describe())
        parts.append(f"<h2>{heading}</h2><p>{look}</p>{walk}")
    return sheet("Walk through the step", "<h1>Walk through the step</h1><p>Every reading of the second step, or every "
                 "allocator event: who asked, for how much, and what was there already. Play it, drag it, or use the "
                 f"arrow keys.</p>{''.join(parts)}")


def sheet(title: str, main: str, foot: str = '<p><a href="index.html">All questions</a></p>') -> str:
    """A whole page. `title` is text; `main` and `foot` are HTML."""
    whole = title if title == TITLE else f"{title} · {TITLE}"
    shell = Template((_HERE / "site.html").read_text(encoding="utf-8"))
    return shell.substitute(title=escape(whole), description=escape(ABOUT), main=main, around=foot)


def around(before: Chapter | None, after: Chapter | None) -> str:
    """Links to the chapters before and after, the contents where there is none."""
    links = [(before, "prev", "Before this"), (after, "next", "Next")]
    parts = [f'<a class="{rel}" rel="{rel}" href="{chapter.page}"><span>{words}</span>{chapter.question}</a>' if chapter
             else f'<a class="{rel}" href="index.html"><span>Contents</span>All questions</a>'
             for chapter, rel, words in links]
    return f'<div class="around">{"".join(parts)}</div>'


def _minutes(count: int) -> str:
    return f"{count} minute{'' if count == 1 else 's'}"


def plain(html: str) -> str:
    """The text of a line of HTML."""

    return unescape(re.sub(r"<[^>]+>", "", html))


if __name__ == "__main__":
    sys.exit(main())
