"""The walk, the calculator and the guesses: instant, calm, readable without a kernel, and the same on a page."""

import asyncio
import time

import chromium
import matplotlib
import pytest

from gpt2.memory import formulas, gpus
from gpt2.memory.simulator import SimulatedGpu
from gpt2.memory.trace import Category, Trace
from gpt2.model import SIZES
from gpt2.step import Recipe, Training
from gpt2.study import widgets
from gpt2.study.interactive import calculator, closed_form, guesses, page, svg
from gpt2.study.interactive.calculator import Answer, by_formula, by_simulation
from gpt2.study.interactive.closed_form import Setting
from gpt2.study.interactive.still import Calm
from gpt2.study.interactive.walk import walk_of

MIB = 2**20
TINY = Setting(layers=2, width=32, heads=2, vocabulary=101, context=16, batch=4, length=16)
PUBLISHED = {8: 17_054, 16: 32_611, 18: 36_489, 20: 40_375}  # MiB, A40
VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def trace() -> Trace:
    """The published step, at batch 2."""
    with SimulatedGpu("A40", torch="2.5.1") as card:
        training = Training(Recipe(batch=2), watch=card.watch)
        for name, module in training.model.named_modules():
            if name.startswith("transformer.h.") and name.count(".") == 2:
                module.register_forward_hook(lambda *_, name=name: card.mark(f"{name} out"))
                module.register_full_backward_hook(lambda *_, name=name: card.mark(f"{name} back"))
        for step in (1, 2):
            training.step(step)
        return card.trace()


@pytest.fixture(scope="module")
def walk(trace):
    return walk_of(trace)


@pytest.fixture
def widget(trace):
    return widgets.walk(trace)


def answered(setting: Setting, gpu: str) -> Answer:
    """An exact answer that costs nothing."""
    return Answer("exact", {Category.PARAMETERS: 2**30}, 2**31, 2**32, True, f"batch {setting.batch}")


# --- the walk -------------------------------------------------------------------------------------------------------


def test_a_frame_takes_less_than_a_millisecond(walk):
    ground = svg.mountain(walk)
    start = time.perf_counter()
    for i in range(len(walk)):
        svg.draw(walk, ground, i)
    assert (time.perf_counter() - start) / len(walk) < 1e-3
    assert svg.draw(walk, ground, 7) == svg.draw(walk, ground, 7) and len(ground) < 40_000


def test_every_event_has_the_bytes_of_the_trace(trace, walk):
    assert walk.totals == trace.allocated_bytes()[walk.first:walk.first + len(walk)]
    assert walk.totals[walk.peak] == max(walk.totals)


def test_words_name_who_asks_and_whose_is_freed(walk):
    where, what, who = walk.words(walk.peak)
    assert "backward" in where and what == "asked for 392.6 MiB"
    assert who == "_log_softmax_backward_data · GPT2 · 2,048×50,257 · float32 · loss"
    free = next(i for i in range(walk.peak, len(walk)) if walk.event(i).action == "free" and "loss" in walk.words(i)[2])
    assert walk.words(free)[1].startswith("freed 392.6 MiB")


@pytest.mark.parametrize("name", ["forward", "backward", "optimizer", "zero_grad"])
def test_buttons_land_on_the_first_event_of_their_phase(widget, name):
    widget.buttons[name].click()
    at = widget.stops[widget.slider.value]
    assert widget.data.event(at).phase == name and (at == 0 or widget.data.event(at - 1).phase != name)


def test_buttons_land_on_the_loss_and_on_the_peak(widget):
    widget.buttons["loss"].click()
    at = widget.stops[widget.slider.value]
    assert widget.data.event(at).shape[-1] == 50_257 and widget.data.event(at).phase == "forward"
    widget.buttons["peak"].click()
    assert widget.stops[widget.slider.value] == widget.data.peak
    assert "blind spot" in widget.screen.value or "the peak: " in widget.screen.value


def test_the_levels_keep_the_place(widget):
    widget.buttons["backward"].click()
    here = widget.stops[widget.slider.value]
    widget.level.value = "every event"
    assert widget.stops[widget.slider.value] == here and len(widget.stops) == len(widget.data)
    widget.slider.value += 1
    assert widget.stops[widget.slider.value] == here + 1
    widget.level.value = "readings"
    assert set(widget.data.readings) <= set(widget.stops)


def test_the_picture_shows_the_blind_spot(walk):
    assert walk.blind[0] <= walk.peak < walk.blind[1]
    assert walk.highest_reading < walk.totals[walk.peak]
    assert "above every reading" in svg.words(walk, walk.peak)
    assert "blind spot" in svg.words(walk, walk.peak + 1)


def test_every_widget_has_a_picture_and_words(widget, study_out):
    for each in (widget, widgets.calculator(TINY, exactly=answered), widgets.guesses()):
        bundle = each._repr_mimebundle_()
        assert VIEW in bundle and bundle["image/png"].startswith(b"\x89PNG") and len(bundle["text/plain"]) >= 40
    assert widgets.walk(widget.data.trace).picture == widget.picture


def test_a_step_that_is_not_there_is_said(trace):
    with pytest.raises(ValueError, match="no step 7"):
        widgets.walk(trace, step=7)


# --- calm -----------------------------------------------------------------------------------------------------------


def test_a_burst_gives_two_redraws_and_one_simulation():
    simulated = []

    def exactly(setting, gpu):
        simulated.append(setting.batch)
        return answered(setting, gpu)

    async def drag():
        shown = widgets.calculator(TINY, exactly=exactly, quiet_s=0.1)
        simulated.clear()
        before = shown.redraws
        for batch in range(1, 51):
            shown.knobs["batch"].value = batch
        await asyncio.sleep(0.07)
        assert shown.redraws - before <= 2 and simulated == [] and shown.exact is None
        await asyncio.sleep(0.2)
        assert simulated == [50] and shown.exact.moment == "batch 50" and shown.redraws - before == 3

    asyncio.run(drag())


def test_a_long_drag_is_drawn_while_it_lasts():
    seen = []

    async def drag():
        calm = Calm(seen.append, 0.02)
        for n in range(30):
            calm(n)
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)

    asyncio.run(drag())
    assert 4 <= len(seen) <= 12 and seen[0] == 0 and seen[-1] == 29


def test_without_a_loop_every_call_runs():
    seen = []
    calm = Calm(seen.append)
    calm(1)
    calm(2)
    assert seen == [1, 2]


# --- the calculator -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", PUBLISHED)
def test_published_peaks_within_13_mib_by_formula(batch):
    assert abs(by_formula(Setting(batch=batch)).allocated_bytes / MIB - PUBLISHED[batch]) < 13


def test_published_peaks_within_1_mib_exactly():
    assert abs(by_simulation(Setting()).allocated_bytes / MIB - PUBLISHED[8]) < 1


def test_the_formulas_are_those_of_the_study():
    for size in (SIZES["tiny"], SIZES["124M"], SIZES["350M"]):
        setting = Setting(size.layers, size.width, size.heads, size.vocabulary, size.context, 3, size.context // 2)
        assert closed_form.evaluate(closed_form.PARAMETERS, setting.letters()) == formulas.parameters(size)
        terms = closed_form.moments(setting)["loss"]
        total = sum(term.bytes_each * closed_form.evaluate(term.formula, setting.letters()) for term in terms)
        expected = formulas.total(formulas.peak(size, 3, size.context // 2)) + formulas.PUBLISHED_SLACK_BYTES
        assert total == expected


@pytest.mark.parametrize("knobs", [
    {}, {"precision": "bf16"}, {"attention": "sdpa"}, {"precision": "bf16", "attention": "sdpa"}, {"loss": "chunked"},
    {"checkpoint": "block"}, {"precision": "bf16", "checkpoint": "block"},
    {"precision": "bf16", "attention": "sdpa", "checkpoint": "block", "loss": "chunked"}], ids=str)
def test_formula_and_simulation_agree_within_3_percent(knobs):
    setting = Setting(layers=4, batch=4, length=512, **knobs)
    assert by_formula(setting).allocated_bytes == pytest.approx(by_simulation(setting).allocated_bytes, rel=0.03)


def test_the_formula_takes_less_than_20_milliseconds():
    by_formula(Setting())
    start = time.perf_counter()
    for batch in range(1, 21):
        found = by_formula(Setting(batch=batch))
        calculator.bar(found) + calculator.words(found, None)
    assert (time.perf_counter() - start) / 20 < 0.02


def test_the_largest_batch_fits_and_the_next_does_not():
    largest = by_formula(Setting()).largest_batch
    assert largest == 20
    assert by_formula(Setting(batch=largest)).fits and not by_formula(Setting(batch=largest + 1)).fits
    assert closed_form.largest_batch(Setting(), 2**20) == 0


def test_a_setting_that_cannot_be_built_is_one_clear_line():
    shown = widgets.calculator(TINY, exactly=answered)
    shown.knobs["model"].value = "custom"
    shown.knobs["heads"].value = 7
    assert "width 32 is not divisible by 7 heads" in shown.screen.value
    shown.knobs["heads"].value = 4
    assert "fits" in shown.screen.value


def test_a_model_of_any_shape_is_simulated():
    found = by_simulation(TINY, "T4")
    assert found.fits and found.allocated_bytes < 40 * MIB and "step 2" in found.moment
    failing = by_simulation(Setting(layers=1, width=64, heads=1, batch=64), "T4")
    assert not failing.fits and "GPT2" in failing.failure and "12,564.2 MiB" in failing.failure
    assert failing.allocated_bytes <= failing.reserved_bytes <= gpus.find("T4").free_bytes_at_start


# --- the guesses ----------------------------------------------------------------------------------------------------


def test_guesses_are_kept_and_scored(study_out):
    form = widgets.guesses()
    form.fields["optimizer"].value = 95
    form.fields["batch"].value = 20
    form.fields["largest"].value = "token embedding"
    assert guesses.kept() == {"optimizer": 95, "batch": 20, "largest": "token embedding"}
    assert guesses.place().is_relative_to(study_out)
    verdicts = list(widgets.score()["verdict"])
    assert verdicts == ["10.0 times too low", "right", "no guess", "wrong"]
    assert widgets.guesses().fields["optimizer"].value == 95
    guesses.place().write_text("{half")
    assert guesses.kept() == {} and set(widgets.score()["verdict"]) == {"no guess"}
    with pytest.raises(KeyError, match="no question"):
        guesses.keep("weather", 1)


# --- pages without a kernel -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fragments(trace) -> dict[str, str]:
    exact = calculator.grid([(TINY, "A40")])
    return {"walk": page.walk_html(trace, recipe="GPT-2 <124M>"), "calculator": page.calculator_html(exact)}


def test_fragments_need_no_network_and_no_other_file(fragments):
    for text in fragments.values():
        assert "http:" not in text and "https:" not in text and "import(" not in text and "src=" not in text
        assert text.startswith("<section") and text.endswith("</section>") and len(text) < 400_000
    assert "GPT-2 &lt;124M&gt;" in fragments["walk"]


@pytest.fixture(scope="module")
def browser():
    with chromium.browser() as opened:
        yield opened


def opened(browser, text: str, folder, **options):
    """A page from a file, which must not complain and must not ask for anything."""
    file = folder / "page.html"
    file.write_text(f'<!doctype html><meta charset="utf-8"><body>{text}', encoding="utf-8")
    shown, complaints = browser.new_page(**options), []
    shown.on("pageerror", lambda error: complaints.append(str(error)))
    shown.on("request", lambda request: complaints.append(request.url) if not request.url.startswith("file:") else None)
    shown.goto(file.as_uri())
    shown.wait_for_selector(".study-widget.alive")
    return shown, complaints


def milliseconds(shown, slider: str) -> float:
    """How long one move of a slider takes, drawing included."""
    return shown.evaluate("""(name) => {
        const slider = document.querySelector(`[data-is=${name}]`), start = performance.now();
        for (let i = 1; i <= 50; i++) { slider.value = i; slider.dispatchEvent(new Event('input')); }
        return (performance.now() - start) / 50; }""", slider)


def test_the_walk_works_on_a_page(browser, fragments, walk, tmp_path):
    shown, complaints = opened(browser, fragments["walk"], tmp_path)

    def total() -> str:
        return shown.inner_text("[data-is=total]")

    assert total() == f"{walk.totals[walk.peak] / MIB:,.1f} MiB allocated"
    for name, index in walk.moments.items():
        shown.click(f"button:text-is('{name}')")
        assert total() == f"{walk.totals[index] / MIB:,.1f} MiB allocated"
        assert shown.inner_text("[data-is=who]") == walk.words(index)[2]
        assert shown.inner_text("[data-is=where]") == walk.words(index)[0]
    shown.check("[data-is=level]")
    shown.click("button:text-is('backward')")
    shown.focus("[data-is=slider]")
    shown.keyboard.press("ArrowRight")
    assert shown.inner_text("[data-is=where]").startswith(f"event {walk.moments['backward'] + 2:,} of")
    rows = shown.locator("[data-is=owners] td:last-child").all_inner_texts()
    assert sum(float(row.replace(",", "")) for row in rows) == pytest.approx(
        walk.totals[walk.moments["backward"] + 1] / MIB, abs=1)
    shown.click("[data-is=play]")
    shown.wait_for_function("document.querySelector('[data-is=slider]').value > 480")
    assert milliseconds(shown, "slider") < 50 and complaints == []


def test_the_calculator_works_on_a_page(browser, fragments, tmp_path):
    shown, complaints = opened(browser, fragments["calculator"], tmp_path)

    def cells(row: str) -> list[str]:
        return shown.locator(f"[data-is=numbers] tr:has(td:text-is('{row}')) td").all_inner_texts()

    for knobs in ({}, {"precision": "bf16", "attention": "sdpa"}, {"checkpoint": "block", "loss": "chunked"}):
        for name, options in calculator.KNOBS.items():
            shown.select_option(f"[data-is={name}]", knobs.get(name, options[0]))
        assert cells("allocated")[1] == f"{by_formula(Setting(**knobs)).allocated_bytes / MIB:,.1f}"
        assert f"by formula: {by_formula(Setting(**knobs)).largest_batch:,}" in shown.inner_text("[data-is=largest]")
    for name, options in calculator.KNOBS.items():
        shown.select_option(f"[data-is={name}]", options[0])
    shown.select_option("[data-is=model]", "tiny")
    shown.fill("[data-is=batch]", "4")
    exact = by_simulation(TINY)
    assert cells("allocated")[2] == f"{exact.allocated_bytes / MIB:,.1f}"
    assert shown.inner_text("[data-is=who]") == f"peak set by: {exact.moment}"
    assert milliseconds(shown, "batch") < 20 and complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["walk", "calculator"])
def test_pages_can_be_read_on_a_phone(browser, fragments, name, scheme, tmp_path):
    phone = {"width": 390, "height": 800}
    shown, complaints = opened(browser, fragments[name], tmp_path, viewport=phone, color_scheme=scheme)
    assert shown.evaluate("document.documentElement.scrollWidth") <= 390 and complaints == []
    ink, paper = shown.evaluate(
        "(() => { const style = getComputedStyle(document.querySelector('.study-widget')); "
        "return [style.color, style.backgroundColor]; })()")
    assert (ink == "rgb(26, 26, 26)") == (scheme == "light") and ink != paper


def test_pictures_of_widgets_leave_the_settings_of_matplotlib_alone(trace):
    before = dict(matplotlib.rcParams)
    widgets.walk(trace)
    assert dict(matplotlib.rcParams) == before
