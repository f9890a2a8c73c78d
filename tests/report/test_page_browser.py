"""The page of the demo in a real browser: every chart is drawn, nothing is wider than the screen."""

import shutil
import time

import pytest

from prunecli import demo
from prunecli.commands.prune import prune_experts, prune_heads
from prunecli.model.checkpoint import open_model
from prunecli.report.collect import collect
from prunecli.report.page import report_page
from prunecli.tensors.transaction import write_json
from tests.commands.calls import done
from tests.commands.gates import write_gates
from tests.commands.heads import scored
from tests.report import results

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser: install chromium")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(scope="module")
def page(shared_path):
    """The page of checkpoints made from the demo, and of results of every kind."""
    shutil.copytree(demo.CHECKPOINT, shared_path / "demo")
    opened = open_model(shared_path / "demo")
    write_json(shared_path / "heads.json", scored(opened))
    models = [{"path": "demo", "fingerprint": opened.fingerprint}, results.MODELS[1]]
    fewer, smaller = str(shared_path / "fewer-experts"), str(shared_path / "fewer-experts-and-heads")
    done(prune_experts, shared_path / "demo", "--metric random --ratio 0.5 -o", fewer)
    done(prune_heads, fewer, "--scores", shared_path / "heads.json", "--count 9 -o", smaller)
    write_json(shared_path / "evaluation.json", results.evaluation(models))
    write_json(shared_path / "latency.json", results.latency((1, 4, 16)))
    write_json(shared_path / "latency-1.json", results.latency())
    for name in ("languages", "similarity", "finetune", "head_comparison"):
        write_json(shared_path / f"{name}.json", getattr(results, name)())
    write_gates(shared_path / "gates.json")
    path = shared_path / "page.html"
    path.write_text(report_page(collect(shared_path)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=BROWSER, args=OPTIONS)
        yield opened.new_context(offline=True)
        opened.close()


def wait_for(tab, condition: str) -> None:
    """Wait until JavaScript finds a condition true. Playwright's own wait needs eval, which the page forbids."""
    for _ in range(200):
        if tab.evaluate(condition):
            return
        time.sleep(0.1)
    raise AssertionError(condition)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (420, "dark")])
def test_every_chart_is_drawn_within_the_screen(page, browser, width, scheme):
    tab = browser.new_page()
    messages = []
    tab.on("console", lambda message: messages.append(message.text))
    tab.on("pageerror", lambda error: messages.append(str(error)))
    tab.on("request", lambda request: messages.append(request.url) if request.url[:4] == "http" else None)
    tab.set_viewport_size({"width": width, "height": 900})
    tab.emulate_media(color_scheme=scheme)
    tab.goto(page.as_uri())
    wait_for(tab, "[...document.querySelectorAll('.chart')].every((chart) => chart.querySelector('svg'))")
    assert tab.locator(".chart").count() > 15
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert messages == []
    colours = "getComputedStyle(document.querySelector('.chart svg')).filter"
    assert (tab.evaluate(colours) == "none") == (scheme == "light")
    tab.emulate_media(color_scheme="dark", media="print")
    assert tab.evaluate(colours) == "none"
    tab.close()


def test_pointing_at_a_cell_tells_its_value(page, browser):
    tab = browser.new_page()
    tab.goto(page.as_uri())
    tab.locator(".wide .chart svg .mark-rect path").first.hover()
    tab.wait_for_selector("#vg-tooltip-element.visible")
    told = tab.locator("#vg-tooltip-element").inner_text().split()
    assert told[:3] == ["row", "encoder", "layer"]
    assert told[-1] in ("kept", "dropped")
    tab.close()
