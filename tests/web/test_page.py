"""The page, in a real browser: no requests to other hosts, an empty console."""

import os
import signal

import pytest

from proximetry.data import open_image
from tests.web.browser import Visit, give, needs_chromium, ranks, until
from tests.web.conftest import CLASSES, EACH, cache_map, png, start

pytestmark = needs_chromium
TOTAL = CLASSES * EACH


def test_start_page_and_search_by_click(visit, shared):
    page = visit()
    assert "token" not in page.url
    assert f"{TOTAL} images" in page.locator("#gallery-name").inner_text()
    page.locator("#grid .card").first.click()
    assert ranks(page) == [str(rank + 1) for rank in range(TOTAL - 1)]
    first = page.url
    query = int(first.rpartition("/")[2])
    expected = shared.search(shared.vectors([query]), 4)
    card = page.locator("#grid .card").nth(2)
    near = f"{expected.similarities[0, 3]:.3f}"
    assert near in card.inner_text()
    assert str(expected.labels[0, 3]) in card.inner_text()
    assert card.get_attribute("aria-label").startswith("Rank 3, class")
    assert f"{TOTAL - 1} images" in page.locator("#results-about").inner_text()
    vote = shared.search(shared.vectors([query]), 13).labels[0, 1:].tolist()
    votes = max(vote.count(label) for label in vote)
    text = f", {votes} of the nearest 12" if votes < 12 else "The nearest 12 are all"
    assert text in page.locator("#verdict .vote").inner_text()
    page.get_by_role("button", name="More like rank 3", exact=True).click()
    page.wait_for_url(f"**#item/{expected.ids[0, 3]}")
    ranks(page)
    page.go_back()
    page.wait_for_url(first)
    ranks(page)
    label = shared.rows([query])["label"][0]
    until(page, f"document.querySelector('#query-caption').textContent.startsWith('{label}')")


@pytest.mark.parametrize("query", ["item", "upload"])
def test_why_shows_explanation_of_result(visit, query):
    page = visit()
    if query == "item":
        page.locator("#grid .card").first.click()
    else:
        give(page, "pick", png())
    ranks(page)
    why = page.locator("#grid .why").nth(1)
    assert why.get_attribute("aria-label") == "Why is rank 2 similar?"
    url = page.url
    why.click()
    page.wait_for_selector("#why-image:not([hidden])")
    until(page, "document.querySelector('#why-image').naturalWidth > 400")
    assert page.locator("#why-title").inner_text().startswith("Why rank 2, class")
    page.keyboard.press("Escape")
    assert not page.locator("#why").is_visible()
    assert page.url == url


@pytest.mark.parametrize("way", ["pick", "drop", "paste"])
def test_search_by_picked_dropped_or_pasted_image(visit, shared, way):
    page = visit()
    give(page, way, png())
    assert len(ranks(page)) == TOTAL
    assert page.locator("#queries img").is_visible()
    assert page.locator("#query-caption").inner_text() == "mine.png"
    best = shared.search([open_image(png())], 1)
    assert f"{best.similarities[0, 0]:.3f}" in page.locator("#grid .card").first.inner_text()


def test_other_files_are_rejected(visit):
    page = visit()
    give(page, "drop", b"hello", "notes.txt", "text/plain")
    assert page.locator("#problem").inner_text() == "notes.txt is not an image."
    assert page.locator("#problem").get_attribute("role") == "alert"
    give(page, "pick", png())
    ranks(page)
    assert not page.locator("#problem").is_visible()


def test_errors_of_the_server_are_shown(browser, live):
    visit = Visit(browser, live)
    give(visit.page, "drop", png()[:150])
    visit.page.wait_for_selector("#problem:not([hidden])")
    assert "damaged or truncated" in visit.page.locator("#problem").inner_text()
    # Browsers write failed requests to the console.
    assert all("415" in line for line in visit.console)
    visit.console.clear()
    visit.end()


def test_threshold_class_filter_and_number_of_results(visit, shared):
    page = visit()
    page.evaluate("location.hash = 'item/0'")
    assert page.locator("#threshold-value").inner_text() == "all"
    ranks(page)
    near = sorted(shared.search(shared.vectors([0]), TOTAL).similarities[0])
    least = round(float(near[TOTAL // 2]), 2)
    page.locator("#threshold").fill(str(least))
    left = sum(value >= least for value in near) - 1
    assert page.locator("#grid li:not([hidden])").count() == left
    assert f"{left} of {TOTAL - 1} images" in page.locator("#results-about").inner_text()
    assert f"{left} of {TOTAL - 1} images" in page.locator("#status").inner_text()
    page.locator("#threshold").fill("1")
    assert "No results within" in page.locator("#grid").inner_text()
    page.locator("#threshold").fill("0")
    assert page.locator("#grid li:not([hidden])").count() == TOTAL - 1
    page.locator("#class").fill("class03")
    page.locator("#class").press("Enter")
    until(page, f"document.querySelectorAll('#grid .rank').length === {EACH}")
    assert set(page.locator("#grid .label").all_inner_texts()) == {"class03"}
    page.locator("#class").fill("")
    page.locator("#count").select_option("12")
    until(page, "document.querySelectorAll('#grid .rank').length === 12")


def open_map(page):
    page.get_by_role("link", name="Map").click()
    page.wait_for_selector("#map-waiting", state="hidden", timeout=120_000)
    until(page, "document.querySelector('#legend button')")
    return page.locator("#canvas").bounding_box()


def point(page, number):
    """Return the position of an image on the screen."""
    return page.evaluate(
        """async (number) => {
            const map = await (await fetch("map")).json();
            const box = document.querySelector("#canvas").getBoundingClientRect();
            const scale = 0.92 * Math.min(box.width, box.height);
            return [box.left + (box.width - scale) / 2 + map.x[number] * scale,
                    box.top + (box.height - scale) / 2 + (1 - map.y[number]) * scale];
        }""",
        number,
    )


def listed(page):
    """Return the number of images below the map."""
    number = "Number.parseInt(document.querySelector('#selection-title').textContent)"
    until(page, f"document.querySelectorAll('#selection .card').length === {number}")
    return page.locator("#selection .card").count()


def test_map_thumbnails_and_selection(visit, shared):
    page = visit()
    box = open_map(page)
    assert f"{TOTAL} images" in page.locator("#map-about").inner_text()
    assert page.locator("#legend button").count() == CLASSES
    x, y = point(page, 5)
    page.mouse.move(x, y)
    page.wait_for_selector("#tip:not([hidden])")
    assert "/image?size=" in page.locator("#tip-image").get_attribute("src")
    assert page.locator("#tip-text").inner_text() in set(shared.rows(shared.ids())["label"])
    until(page, "document.querySelector('#tip-image').naturalWidth > 0")
    # Select everything by Shift-dragging.
    page.keyboard.down("Shift")
    page.mouse.move(box["x"] + 20, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 200)
    assert page.locator("#box").is_visible()
    page.mouse.move(box["x"] + box["width"] - 20, box["y"] + box["height"] - 20)
    page.mouse.up()
    page.keyboard.up("Shift")
    until(page, f"document.querySelectorAll('#selection .card').length === {TOTAL}")
    assert page.locator("#selection-title").inner_text() == f"{TOTAL} images"
    assert page.locator("#selection-count").inner_text() == f"{TOTAL} images selected"
    page.get_by_role("button", name="Clear").click()
    assert not page.locator("#selection-bar").is_visible()
    # Select one point in select mode.
    page.get_by_role("button", name="Select", exact=True).click()
    page.locator("#canvas").scroll_into_view_if_needed()
    x, y = point(page, 5)
    page.mouse.move(x - 6, y - 6)
    page.mouse.down()
    page.mouse.move(x + 6, y + 6, steps=3)
    page.mouse.up()
    until(page, f"document.querySelectorAll('#selection .card').length < {TOTAL}")
    few = page.locator("#selection .card").count()
    assert 1 <= few
    assert page.locator("#selection-count").inner_text().startswith(f"{few} image")
    page.locator("#selection .card").first.click()
    page.locator("#viewer").get_by_role("button", name="More like this").click()
    ranks(page)
    assert "#item/" in page.url


def test_map_pan_and_zoom(visit):
    page = visit()
    box = open_map(page)
    x, y = point(page, 0)
    page.mouse.move(x, y)
    page.wait_for_selector("#tip:not([hidden])")
    page.mouse.down()
    page.mouse.move(x + 90, y + 40, steps=4)
    page.mouse.up()
    page.mouse.move(box["x"] + 4, box["y"] + 4)
    page.mouse.move(x + 90, y + 40)  # the point has moved along
    page.wait_for_selector("#tip:not([hidden])")
    page.mouse.wheel(0, -700)
    page.mouse.move(box["x"] + 4, box["y"] + 4)
    page.mouse.move(x + 90, y + 40)  # and stays below the pointer
    page.wait_for_selector("#tip:not([hidden])")
    page.get_by_role("button", name="List images in view").click()
    assert 1 <= listed(page) < TOTAL
    page.get_by_role("button", name="Show all").click()
    page.get_by_role("button", name="List images in view").click()
    assert listed(page) == TOTAL


def test_keyboard(visit):
    page = visit()
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        focused = page.evaluate(
            """() => {
                const one = document.activeElement;
                const drawn = one.id === "file" ? document.querySelector(".button") : one;
                const style = getComputedStyle(drawn);
                return [one.id || one.className || one.textContent.trim(),
                        style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
            }"""
        )
        assert focused[1], f"the focus on {focused[0]} cannot be seen"
        seen.append(focused[0])
        if focused[0] == "card":
            break
    assert seen[0] == "skip"
    controls = ["file", "threshold", "class", "count", "card"]
    assert [one for one in seen if one in controls] == controls
    page.keyboard.press("Enter")
    assert len(ranks(page)) == TOTAL - 1
    page.locator("#grid .card").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.innerText.startsWith('2')")
    page.locator("#threshold").focus()
    page.keyboard.press("End")
    assert page.locator("#threshold-value").inner_text() == "1.00"
    page.locator("#to-map").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#map-waiting", state="hidden", timeout=120_000)
    until(page, "document.querySelector('#legend button')")
    page.locator("#canvas").focus()
    page.keyboard.press("Enter")
    assert listed(page) == TOTAL
    page.locator("#canvas").focus()
    for key in ["+"] * 9 + ["ArrowLeft", "ArrowUp"]:
        page.keyboard.press(key)
    page.keyboard.press("Enter")
    assert listed(page) < TOTAL
    page.locator("#canvas").focus()
    page.keyboard.press("0")
    page.keyboard.press("Enter")
    assert listed(page) == TOTAL


def brightness(page):
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in color.strip("rgb()").split(",")) / 3


def test_light_and_dark_theme(visit):
    page = visit(color_scheme="dark")
    assert brightness(page) < 60
    switch = page.get_by_role("button", name="Dark theme")
    assert switch.get_attribute("aria-pressed") == "true"
    switch.click()
    assert brightness(page) > 200
    assert switch.get_attribute("aria-pressed") == "false"
    page.reload()
    page.wait_for_selector("#grid .card")
    assert brightness(page) > 200
    assert brightness(visit(color_scheme="light")) > 200


def test_phone_layout(visit):
    page = visit(viewport={"width": 320, "height": 700}, has_touch=True, is_mobile=True)
    for view in ("search", "item/0", "map", "about"):
        page.evaluate("view => { location.hash = view }", view)
        if view == "item/0":
            ranks(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 320, view
    for name in ("#to-search", "#to-map", "#theme"):
        assert page.locator(name).is_visible()


CONTRAST = """() => {
    const parse = (color) => (color.match(/[\\d.]+/g) ?? []).map(Number);
    const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
        .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = (one) => {
        for (let at = one; at; at = at.parentElement) {
            const color = parse(getComputedStyle(at).backgroundColor);
            if (color.length === 3 || color[3] === 1) return color;
        }
        return [255, 255, 255];
    };
    const poor = [];
    for (const one of document.querySelectorAll("main *, header *")) {
        const text = [...one.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
        if (!text || !one.offsetParent || one.className === "rank") continue;
        const [a, b] = [light(parse(getComputedStyle(one).color)), light(behind(one))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) poor.push([one.textContent.trim().slice(0, 30), ratio]);
    }
    return poor;
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_accessibility(visit, theme):
    page = visit(color_scheme=theme)
    assert page.evaluate("document.documentElement.lang") == "en"
    for role in ("banner", "main", "navigation", "search", "status"):
        assert page.get_by_role(role).count() == 1, role
    for view in ("search", "item/0", "map", "about"):
        page.evaluate("view => { location.hash = view }", view)
        if view == "item/0":
            ranks(page)
        until(page, "!document.querySelector('.skeleton')")
        assert page.get_by_role("heading", level=1).count() == 1, view
        assert page.locator("nav [aria-current=page]").count() == 1
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, a, input, select, canvas")]
                .filter((one) => one.offsetParent)
                .filter((one) => !(one.getAttribute("aria-label") || one.textContent.trim()
                    || [...(one.labels ?? [])].some((label) => label.textContent.trim())))
                .map((one) => one.outerHTML)"""
        )
        assert nameless == [], view
        assert page.locator("img:not([alt])").count() == 0
        assert page.evaluate(CONTRAST) == [], view
    assert "recall@1" in page.locator("#metrics").inner_text()
    assert "0.8750" in page.locator("#metrics").inner_text()
    page.evaluate("location.hash = 'item/0'")
    until(page, "document.querySelector('#status').textContent.includes('images, the nearest')")


def test_missing_files_and_stopped_server(browser, server, editable, tmp_path):
    cache = cache_map(editable, tmp_path / "cache")
    for path in editable.rows(editable.ids())["path"]:
        os.unlink(path)
    process, url = start(server, tmp_path / "log", editable.path, PROXIMETRY_CACHE=str(cache))
    visit = Visit(browser, url)
    page = visit.page
    page.evaluate("location.hash = 'item/0'")
    ranks(page)
    page.get_by_text("not readable").first.wait_for()
    process.send(signal.SIGINT)
    assert process.ended() == 0, process.output()
    page.locator("#grid .more").first.click()
    page.wait_for_selector("#problem:not([hidden])")
    assert "The server cannot be reached" in page.locator("#problem").inner_text()
    assert page.locator("#results-title").inner_text() == "No results"
    # Browsers write failed requests to the console.
    assert all("410" in line or "ERR_CONNECTION" in line for line in visit.console)
    visit.console.clear()
    visit.end()
