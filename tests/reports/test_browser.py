"""The page in a browser: map, search field, phone width, no script errors."""

import shutil

import pytest

from proximetry.reports import report_page
from tests.reports.conftest import HOSTILE

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def file(records, evaluations, tmp_path_factory):
    place = tmp_path_factory.mktemp("page") / "report.html"
    place.write_bytes(report_page(records[0], evaluations[0]))
    return place


@pytest.fixture
def page(browser, file):
    context = browser.new_context(viewport={"width": 1000, "height": 900})
    opened, errors = context.new_page(), []
    opened.on("console", lambda message: errors.append(message.text))
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("dialog", lambda dialog: errors.append(dialog.message))
    opened.goto(file.as_uri())
    yield opened
    context.close()
    assert errors == []


def test_hovering_a_dot_shows_its_class(page):
    dot = page.locator(".map g[data-class] circle").first
    name = dot.evaluate("dot => dot.parentNode.dataset.class")
    tip = page.locator(".map .tip")
    assert tip.is_hidden()
    dot.scroll_into_view_if_needed()
    dot.hover(force=True)
    tip.wait_for(state="visible")
    shown = page.evaluate(
        "([x, y]) => document.elementFromPoint(x, y).parentNode.dataset.class",
        [dot.bounding_box()["x"] + 4, dot.bounding_box()["y"] + 4],
    )
    assert tip.inner_text().strip() in (name, shown)
    assert "data:image/webp" in page.locator(".map .tip i").evaluate(
        "image => getComputedStyle(image).backgroundImage"
    )


def test_name_highlights_its_class(page):
    field = page.locator("#map-class")
    assert field.is_visible()
    field.fill("alert('CLASS')")
    assert page.locator("g.on").count() == 1
    assert page.locator("g.on").get_attribute("data-class") == HOSTILE
    assert page.locator("#map-count").inner_text() == "1 classes"
    field.fill("")
    assert page.locator(".map.filtered").count() == 0


def test_search_field_filters_the_table(page):
    page.locator("summary", has_text="All 6 classes").click()
    page.locator("#find-row").fill("class11")
    rows = page.locator("#every-class tbody tr:visible")
    assert rows.count() == 1
    assert rows.locator("th").inner_text() == "class11"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_a_phone(browser, file, scheme):
    context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    opened = context.new_page()
    opened.goto(file.as_uri())
    assert opened.evaluate("document.documentElement.scrollWidth") <= 360
    ground, ink = opened.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    brightness = [sum(int(c) for c in value[4:-1].split(",")) for value in (ground, ink)]
    assert (brightness[0] > brightness[1]) == (scheme == "light")
    context.close()
