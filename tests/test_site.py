"""The exported site: whole, offline, the same twice; its widgets work, and a phone can show it, light and dark."""

import json
import re
import shutil
from html.parser import HTMLParser

import chromium
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from gpt2.cli import main
from gpt2.study import paths
from gpt2.study.interactive import grid, guesses
from gpt2.study.interactive.calculator import by_formula
from gpt2.study.interactive.closed_form import Setting
from gpt2.study.site import alive, build, chapters

MIB = 2**20
SOURCES = sorted((paths.ROOT / "notebooks").glob("[0-9]*.ipynb"))
OURS = "index.html", "calculator.html", "walk.html"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the site of the committed notebooks."""
    patch = pytest.MonkeyPatch()
    patch.setenv("STUDY_OUT", str(tmp_path_factory.mktemp("site")))
    yield build.build()[0]
    patch.undo()


class Page(HTMLParser):
    """Links, assets, pictures and headings of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.links, self.assets, self.alts, self.tags = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        if tag == "img":
            self.alts.append(attributes.get("alt") or "")
        if tag == "a":
            self.links.append(attributes["href"])
        self.assets += [value for name, value in attrs if name in ("src", "srcset", "poster", "data", "action")]
        self.assets += [attributes["href"]] if tag in ("link", "image", "use") else []


def parsed(folder) -> dict[str, Page]:
    return {file.name: Page(file.read_text(encoding="utf-8")) for file in folder.glob("*.html")}


def test_every_notebook_is_a_page_and_on_the_contents_page(built):
    pages = parsed(built)
    assert set(pages) == {*OURS, *(f"{source.stem}.html" for source in SOURCES)}
    index = (built / "index.html").read_text(encoding="utf-8")
    for source in SOURCES:
        title = nbformat.read(source, as_version=4).cells[0].source.splitlines()[0].removeprefix("# ")
        assert f'<a href="{source.stem}.html">' in index and chapters.inline(title) in index
    cards = re.findall(r'<li class="chapter">(.*?)</li>', index, re.DOTALL)
    assert len(cards) == len(SOURCES)
    for source, card in zip(SOURCES, cards, strict=True):
        assert re.search(r"\d+ minutes?<", card) and re.search(r"<p>.*\d.*</p>", card)
        assert ("<img" in card) == ("image/png" in source.read_text(encoding="utf-8"))


def test_no_page_leads_nowhere_or_asks_the_network(built):
    for name, page in parsed(built).items():
        for target in [*page.links, *page.assets]:
            assert not re.match(r"(https?:)?//", target) or target in page.links, f"{name} loads {target}"
            if not re.match(r"https?://|data:|#", target):
                assert (built / target.partition("#")[0]).is_file(), f"{name} leads to {target}"
        text = (built / name).read_text(encoding="utf-8")
        assert not re.search(r"@import|url\(|import\(|fetch\(|XMLHttp|MathJax|require\.", text), name
    assert "url(" not in (built / "style.css").read_text()


def test_pages_follow_each_other(built):
    names = [f"{source.stem}.html" for source in SOURCES]
    for before, after in zip(names, names[1:], strict=False):
        assert f'rel="next" href="{after}"' in (built / before).read_text(encoding="utf-8")
        assert f'rel="prev" href="{before}"' in (built / after).read_text(encoding="utf-8")


def test_every_picture_says_what_it_shows(built):
    for name, page in parsed(built).items():
        for alt in page.alts:
            assert len(alt) >= 40 and "<Figure" not in alt and "object" not in alt, f"{name}: {alt!r}"


def test_words_and_formulas_need_no_script(built):
    for name, page in parsed(built).items():
        text = re.sub(r"<(script|style|pre)\b.*?</\1>", "", (built / name).read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r"\$[^$\n]+\$|\\\(|\\frac|\\text", text), f"{name} holds TeX"
        assert page.tags.count("h1") == 1 and "main" in page.tags


def test_the_site_is_small(built):
    assert sum(file.stat().st_size for file in built.rglob("*") if file.is_file()) < build.MOST_BYTES


def test_nothing_of_this_machine_is_in_it(built):
    for file in built.glob("*.html"):
        assert str(paths.ROOT) not in file.read_text(encoding="utf-8")


def test_a_second_site_has_the_same_bytes_and_an_old_page_goes(built):
    before = {file: file.read_bytes() for file in built.rglob("*") if file.is_file()}
    for old in ("99-gone.html", "pictures/99-gone-1.png"):
        (built / old).write_text("old")
    build.build()
    assert {file: file.read_bytes() for file in built.rglob("*") if file.is_file()} == before


def test_a_notebook_without_anything_still_has_a_page(tmp_path, capsys):
    bare = new_notebook(cells=[new_code_cell(code) for code in ("1 + 1", "%time 3", "widgets.walk(nothing)")])
    told = new_notebook(cells=[new_markdown_cell("# Does `x` < 3?"),
                               new_markdown_cell("See [the other](01-bare.ipynb), [tables](../results/README.md), "
                                                 "notebook 01.\n\n## Finding\n\n**Yes, 2.** It is. More.\n\nNo.")])
    for name, notebook in (("01-bare", bare), ("02-told", told)):
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")
    first, second = chapters.chapters(tmp_path)
    assert (first.question, first.answer, first.minutes, first.pictures) == ("01-bare", "", 1, ())
    assert "cell [3] stays a picture: NameError" in capsys.readouterr().err
    assert second.question == "Does <code>x</code> &lt; 3?" and second.answer == "<strong>Yes, 2.</strong> It is."
    assert second.body.count('href="01-bare.html"') == 2 and "results" not in second.body
    (tmp_path / "README.md").write_text("| notebook | question | answer | minutes |\n|-|-|-|-|\n"
                                        "| [02-told](02-told.ipynb) | ? | **2** | 0.1 |\n")
    assert chapters.chapters(tmp_path)[1].answer == "<strong>2</strong>"


def test_widgets_come_alive_with_what_their_call_depends_on(capsys):
    codes = ("from gpt2.study import widgets\nfrom gpt2.study.interactive.closed_form import Setting",
             "batch = 3\nunused = 1 / 0", "most = batch + 1",
             "widgets.calculator(Setting(batch=most), 'H100')", "yours.scored()", "widgets.other()")
    book = new_notebook(cells=list(map(new_code_cell, codes)))
    alive.wake(book)
    shown = [cell.metadata.get("alive", "") for cell in book.cells]
    assert [bool(html) for html in shown] == [False, False, False, True, True, False] and capsys.readouterr().err == ""
    assert 'max="128" value="4"' in shown[3] and "<option selected>H100</option>" in shown[3]
    assert '"truth":{"optimizer":949.4' in shown[4] and "guessed 95" in shown[4]


def test_a_folder_that_takes_no_files_is_one_line(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("STUDY_OUT", str(tmp_path / "file"))
    monkeypatch.setattr(build, "chapters", lambda folder: [])
    monkeypatch.setattr(build, "pages", lambda found: {"index.html": b"x"})
    assert build.main() == 1
    assert capsys.readouterr().err.startswith("error: cannot write the site to")


# --- the exact answers of the calculator ----------------------------------------------------------------------------


def test_the_tables_hold_what_is_predicted_now():
    table = grid.load()
    assert set(table["gpu"]) == set(grid.gpus.names())
    for row in table.sample(4, random_state=7).to_dict("records"):
        assert grid.differs(row) == []


def test_the_largest_batch_fits_and_the_next_does_not():
    for (gpu, length, precision, loss), rows in grid.load().groupby(["gpu", "length", "precision", "loss"]):
        fits, fails = set(rows["batch"][rows["fits"]]), set(rows["batch"][~rows["fits"]])
        assert max(fits) + 1 == min(fails), (gpu, length, precision, loss)
    rows = grid.load().query("gpu == 'A40' and length == 1024 and precision == 'fp32' and fits")
    assert rows["batch"].max() == 20


# --- in a browser, with the network off -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    with chromium.browser() as opened:
        yield opened


@pytest.fixture
def reader(browser, built):
    """Opens pages of the site from their files, offline; a complaint of a page fails the test."""
    complaints, contexts = [], []

    def read(name: str, **options):
        contexts.append(browser.new_context(offline=True, **options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        page.on("request", lambda request: None if request.url.startswith(("file:", "data:"))
                else complaints.append(request.url))
        page.goto((built / name).as_uri())
        return page

    yield read
    for context in contexts:
        context.close()
    assert complaints == []


def milliseconds(page, selector: str) -> float:
    """The median of 40 moves of a slider, drawing and layout included: other processes may hold up a few."""
    return page.evaluate("""async (selector) => {
        const slider = document.querySelector(selector), taken = [];
        for (let i = 1; i <= 40; i++) {
            const start = performance.now();
            slider.value = i;
            slider.dispatchEvent(new Event('input', {bubbles: true}));
            slider.getBoundingClientRect();
            taken.push(performance.now() - start);
            await new Promise(requestAnimationFrame);
        }
        return taken.sort((a, b) => a - b)[20]; }""", selector)


def test_a_reader_goes_from_the_contents_to_the_last_page(reader):
    page = reader("index.html")
    page.click(f'a[href="{SOURCES[0].stem}.html"]')
    for source in SOURCES[1:]:
        page.click("a[rel=next]")
        page.wait_for_url(f"**/{source.stem}.html")
    page.click("a.next")
    page.wait_for_url("**/index.html")


def test_the_walk_plays_is_dragged_and_takes_keys(reader):
    page = reader("02-activations.html")
    walk = page.locator(".study-widget.alive").first
    total, slider = walk.locator("[data-is=total]"), walk.locator("[data-is=slider]")
    assert total.inner_text() == "17,053.9 MiB allocated"
    walk.locator("button:text-is('forward')").click()
    start = int(slider.input_value())
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert int(slider.input_value()) == start + 1
    box = slider.bounding_box()
    page.mouse.move(box["x"] + 10, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=5)
    page.mouse.up()
    dragged = int(slider.input_value())
    assert dragged > start + 10 and total.inner_text() != "17,053.9 MiB allocated"
    walk.locator("[data-is=play]").click()
    page.wait_for_function("at => document.querySelector('.walk [data-is=slider]').value > at", arg=dragged + 1)
    walk.locator("[data-is=play]").click()
    walk.locator("[data-is=level]").check()
    assert milliseconds(page, ".walk [data-is=slider]") < 50


def test_the_calculator_says_what_predict_says(reader, capsys):
    page = reader("calculator.html")

    def row(name: str) -> list[str]:
        return page.locator(f"[data-is=numbers] tr:has(td:text-is('{name}')) td").all_inner_texts()

    page.select_option("[data-is=gpu]", "H100")
    page.select_option("[data-is=precision]", "bf16")
    page.select_option("[data-is=attention]", "sdpa")
    page.click("[data-is=stops] button:text-is('12')")
    assert main("predict --gpu H100 --precision bf16 --attention sdpa --batch 12 --json".split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert row("allocated")[2] == f"{found['peak_allocated_bytes'] / MIB:,.1f}"
    assert row("reserved")[2] == f"{found['peak_reserved_bytes'] / MIB:,.1f}"
    formula = by_formula(Setting(batch=12, precision="bf16", attention="sdpa"), "H100")
    assert row("allocated")[1] == f"{formula.allocated_bytes / MIB:,.1f}"
    page.focus("[data-is=batch]")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("[data-is=batch-is]") == "13" and row("allocated")[2] == "·"
    page.select_option("[data-is=gpu]", "A40")
    page.select_option("[data-is=checkpoint]", "block")
    page.click("[data-is=stops] button:text-is('124M, 1,024 tokens, fp32')")
    page.click("[data-is=stops] button:text-is('21')")
    assert page.inner_text("[data-is=verdict]") == "does not fit"
    assert "4,122.6 MiB" in page.inner_text("[data-is=who]")
    assert milliseconds(page, "[data-is=batch]") < 20


def test_the_readers_guesses_are_kept(reader):
    page = reader("01-line-by-line.html")
    page.fill("[data-is=optimizer]", "95")
    page.select_option("[data-is=peak]", "backward")
    page.reload()
    assert page.input_value("[data-is=optimizer]") == "95" and page.input_value("[data-is=peak]") == "backward"
    assert page.locator(".guesses label").count() == len(guesses.QUESTIONS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_every_page(reader, built, scheme):
    page = reader("index.html", viewport={"width": 390, "height": 844}, color_scheme=scheme)
    for file in sorted(built.glob("*.html")):
        page.goto(file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, file.name
        ink, paper = page.evaluate("(({color, backgroundColor}) => [color, backgroundColor])"
                                   "(getComputedStyle(document.body))")
        dark = [sum(map(int, re.findall(r"\d+", colour))) < 380 for colour in (ink, paper)]
        assert dark == [scheme == "light", scheme == "dark"], file.name
        small = page.evaluate("[...document.querySelectorAll('button, select, input[type=range]')].filter((one) => "
                              "one.offsetHeight > 0 && one.offsetHeight < 24).length")
        assert small == 0, file.name


def test_without_a_script_the_stills_stay(browser, built):
    context = browser.new_context(offline=True, java_script_enabled=False)
    page = context.new_page()
    page.goto((built / "02-activations.html").as_uri())
    assert page.locator("noscript img").count() == 1
    context.close()


def test_the_makefile_makes_it():
    text = (paths.ROOT / "Makefile").read_text()
    assert re.search(r"^html: venv .*\n\t@\$\(RUN\) -m gpt2\.study\.site\.build$", text, re.MULTILINE)
    assert shutil.which("make") is None or "nbconvert" not in text
