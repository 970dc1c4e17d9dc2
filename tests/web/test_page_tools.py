"""The viewer, filters, crops, selection, marks and shortcuts of the page, in a real browser."""

import csv
import io
import itertools
import signal
import time

import httpx
import numpy as np
import pytest

from proximetry.data import Catalog, open_image
from proximetry.search import index
from tests.web.browser import Visit, give, needs_chromium, ranks, until
from tests.web.conftest import CLASSES, EACH, TOKEN, cache_map, png, start

pytestmark = needs_chromium
TOTAL = CLASSES * EACH


def search(page, *queries, **options):
    """Open the results of images of the gallery by their URL."""
    words = "&".join(f"{name}={value}" for name, value in options.items())
    page.evaluate("hash => { location.hash = hash }", f"item/{','.join(map(str, queries))}?{words}")
    wait_for(page, {*range(TOTAL)} - {*queries})


def ids(page):
    entries = page.locator("#grid li[data-id]:not([hidden])")
    return [int(number) for number in entries.evaluate_all("all => all.map(e => e.dataset.id)")]


def wait_for(page, expected):
    """Wait until the results are these images, in this order if it is a list."""
    end = time.monotonic() + 30
    while type(expected)(ids(page)) != expected or page.locator(".skeleton").count():
        assert time.monotonic() < end, (ids(page), expected)
        page.wait_for_timeout(20)


def saved(page, click):
    """Return the text of a file that a button saves."""
    with page.expect_download() as download:
        page.locator(click).click()
    return open(download.value.path(), newline="").read()


def table(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_result_opens_large_with_metadata_and_path(visit, shared):
    page = visit()
    search(page, 0)
    near = ids(page)
    page.locator("#grid .card").nth(1).click()
    viewer = page.locator("#viewer")
    until(page, "document.querySelector('#viewer-picture img')?.naturalWidth > 0")
    assert page.url.endswith(f"?image={near[1]}")
    row = shared.rows([near[1]])
    assert viewer.locator("#viewer-title").inner_text() == f"2. {row['label'][0]}"
    for value in (row["label"][0], str(row["year"][0]), row["split"][0]):
        assert value in viewer.locator("#viewer-facts").inner_text()
    file = page.locator("#viewer-file").inner_text()
    assert row["path"][0].endswith(f"/{file}")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy path").click()
    page.get_by_text("Copied the path.").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == file
    page.keyboard.press("ArrowRight")
    until(page, f"location.hash.endsWith('image={near[2]}')")
    page.keyboard.press("Escape")
    assert not viewer.is_visible()
    until(page, "!location.hash.includes('image=')")
    assert page.evaluate("document.activeElement.closest('li').dataset.id") == str(near[2])
    # The URL of an image can be shared, and the back button closes the viewer.
    page.locator("#grid .card").first.click()
    page.wait_for_selector("#viewer[open]")
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("#viewer[open]")
    assert other.locator("#viewer-title").inner_text().startswith("1. ")
    page.go_back()
    until(page, "!document.querySelector('#viewer').open")
    assert ids(page) == near


def test_filters_of_any_column_are_in_the_url(visit, shared):
    page = visit()
    search(page, 0, results=96)
    page.get_by_role("button", name="Add a filter").click()
    page.locator(".filter select").first.select_option("year")
    page.get_by_label("Condition").select_option(">=")
    page.get_by_label("Value").fill("2004")
    page.get_by_label("Value").press("Enter")
    until(page, "location.hash.includes('where=year')")
    wait_for(page, set(shared.ids({"year": {">=": 2004}}).tolist()) - {0})
    page.locator("#class").fill("CLASS03")  # in any case
    page.locator("#class").press("Enter")
    until(page, "location.hash.includes('label')")
    both = set(shared.ids({"year": {">=": 2004}, "label": "class03"}).tolist())
    wait_for(page, both)
    url = page.url
    page.reload()
    wait_for(page, both)
    assert page.locator("#class").input_value() == "class03"
    assert page.get_by_label("Value").input_value() == "2004"
    page.locator(".filter .remove").click()
    until(page, "!location.hash.includes('year')")
    wait_for(page, set(shared.ids({"label": "class03"}).tolist()))
    page.go_back()
    page.wait_for_url(url)
    wait_for(page, both)


def test_threshold_is_in_the_url(visit, shared):
    page = visit()
    search(page, 0)
    near = sorted(shared.search(shared.vectors([0]), TOTAL).similarities[0])
    page.locator("#threshold").fill(f"{near[TOTAL // 2]:.2f}")
    few = len(ids(page))
    assert 0 < few < TOTAL - 1
    page.reload()
    ranks(page)
    assert len(ids(page)) == few


def test_several_query_images(visit, shared):
    page = visit()
    search(page, 0)
    page.locator("#grid .card").nth(5).click()
    other = int(page.locator("#grid li").nth(5).get_attribute("data-id"))
    page.locator("#viewer").get_by_role("button", name="Add to query").click()
    until(page, "document.querySelectorAll('#queries li').length === 2")
    vectors = shared.vectors([0, other])
    expected = shared.search(vectors.mean(0), TOTAL).ids[0].tolist()
    wait_for(page, [one for one in expected if one not in (0, other)])
    page.locator("#combine").select_option("max")
    until(page, "location.hash.includes('combine=max')")
    nearest = shared.search([0, other], TOTAL, combine="max").ids[0].tolist()
    wait_for(page, [one for one in nearest if one >= 0])
    assert page.locator("#grid .why").count() == 0  # for one query image only
    page.get_by_role("button", name="Remove class").first.click()
    until(page, f"location.hash.startsWith('#item/{other}')")
    give(page, "pick", png(), "mine.png")
    until(page, "location.hash.startsWith('#item/u0')")
    page.set_input_files(
        "#more-files",
        [{"name": "two.png", "mimeType": "image/png", "buffer": png((9, 200, 9))}] * 2,
    )
    until(page, "location.hash.startsWith('#item/u0,u1,u2')")
    wait_for(page, set(range(TOTAL)))
    assert page.locator("#query-caption").inner_text() == "3 images"
    page.reload()  # uploads are gone
    page.wait_for_selector("#problem:not([hidden])")
    assert "Choose it again" in page.locator("#problem").inner_text()
    assert page.locator("#results-title").inner_text() == "Start with one of these"


def test_search_for_a_part_of_an_image(visit, live, shared):
    page = visit()
    search(page, 0)
    page.get_by_role("button", name="Search for a part of").click()
    until(page, "document.querySelector('#crop-image').naturalWidth > 0")
    box = page.locator("#crop-frame").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.1, box["y"] + box["height"] * 0.2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.8, steps=3)
    page.mouse.up()
    page.get_by_role("button", name="Search for this part").click()
    until(page, "location.hash.includes('@')")
    sides = page.url.partition("@")[2].split("-")
    np.testing.assert_allclose([float(side) for side in sides], [0.1, 0.2, 0.6, 0.8], atol=0.06)
    image = open_image(shared.rows([0])["path"][0])
    left, top, right, bottom = (float(side) for side in sides)
    part = image.crop(
        (
            int(left * image.width),
            int(top * image.height),
            round(right * image.width),
            round(bottom * image.height),
        )
    )
    wait_for(page, [one for one in shared.search(part, TOTAL).ids[0].tolist() if one != 0])
    page.locator("#grid .why").first.click()  # explains the part
    page.wait_for_selector("#why-image:not([hidden])")
    page.keyboard.press("Escape")
    # With the keyboard: move it to the left, and search the whole image again.
    page.get_by_role("button", name="Search for a part of").click()
    page.locator("#crop-frame").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Shift+ArrowRight")
    moved = page.evaluate("[...document.querySelector('#crop-box').style.width].length")
    assert moved
    page.get_by_role("button", name="Whole image").click()
    until(page, "!location.hash.includes('@')")


def test_selection_is_exported(visit, shared):
    page = visit()
    search(page, 0)
    near = ids(page)
    boxes = page.locator("#grid .pick input")
    boxes.nth(1).check()
    boxes.nth(4).click(modifiers=["Shift"])
    assert page.locator("#selection-count").inner_text() == "4 images selected"
    boxes.nth(2).uncheck()
    chosen = [near[1], near[3], near[4]]
    rows = table(saved(page, "#selection-csv"))
    assert [int(row["id"]) for row in rows] == chosen
    expected = shared.rows(chosen)
    assert [row["label"] for row in rows] == expected["label"]
    assert [row["year"] for row in rows] == [str(year) for year in expected["year"]]
    assert all(float(row["similarity"]) for row in rows)
    paths = saved(page, "#selection-paths").splitlines()
    assert paths == [row["path"] for row in rows]
    assert all(map(str.endswith, expected["path"], paths))
    page.get_by_role("button", name="Add to query").click()
    until(page, "document.querySelectorAll('#queries li').length === 4")


def test_labels_are_corrected_and_exported(visit, shared, tmp_path):
    page = visit()
    search(page, 0)
    near = ids(page)
    page.locator("#grid .card").first.focus()
    page.keyboard.press("c")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("r")
    page.locator("#ask-input").fill("CLASS05")
    page.keyboard.press("Enter")
    until(page, "!document.querySelector('#ask').open")
    page.keyboard.press("x")
    page.locator("#grid .pick input").nth(2).check()
    page.get_by_role("button", name="Tag", exact=True).click()
    page.locator("#ask-input").fill('blurry, "maybe"')
    page.keyboard.press("Enter")
    page.locator("#selection-clear").click()
    page.locator("#grid .pick input").nth(3).check()
    page.get_by_role("button", name="Drop").click()
    assert page.locator("#grid li").nth(0).locator(".mark").inner_text() == "class confirmed"
    assert "class05" in page.locator("#grid li").nth(1).locator(".marks").inner_text()
    page.reload()  # marks are kept
    ranks(page)
    page.get_by_role("link", name="Marked (4)").click()
    until(page, "document.querySelectorAll('#marked .card').length === 4")
    (tmp_path / "labels.csv").write_text(saved(page, "#export-labels"))
    tags = table(saved(page, "#export-tags"))
    assert [row["tag"] for row in tags] == ['blurry, "maybe"'] * 2
    images = shared.path.parent / "images"
    catalog = Catalog.from_folder(images)
    applied = catalog.apply_suggestions(tmp_path / "labels.csv")
    files = [str(path).removeprefix(f"{images}/") for path in shared.rows(near[:4])["path"]]
    labels = dict(zip(applied.paths, applied.labels, strict=True))
    assert labels[files[0]] == shared.rows([near[0]])["label"][0]
    assert labels[files[1]] == "class05"
    assert files[3] not in labels
    page.locator("#marked-tags button").click()
    until(page, "document.querySelectorAll('#marked .card').length === 2")
    page.get_by_role("button", name="Remove all marks").click()
    until(page, "!document.querySelector('#marked .card')")
    assert page.get_by_text("Nothing is marked").is_visible()


def test_keyboard_shortcuts(visit):
    page = visit()
    search(page, 0)
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    assert page.locator("#keys div").count() >= 12
    page.keyboard.press("Escape")
    page.locator("#grid .card").nth(2).focus()
    target = page.locator("#grid li").nth(2).get_attribute("data-id")
    page.keyboard.press("x")
    assert page.locator("#selection-count").inner_text() == "1 image selected"
    page.keyboard.press("w")
    page.wait_for_selector("#why[open]")
    page.keyboard.press("Escape")
    page.keyboard.press("m")
    page.wait_for_url(f"**#item/{target}")
    wait_for(page, {*range(TOTAL)} - {int(target)})
    page.keyboard.press("/")
    page.keyboard.type("2m")  # goes into the field
    assert page.locator("#class").input_value() == "2m"
    assert page.evaluate("location.hash").startswith("#item/")
    page.locator("#class").fill("")
    page.locator("#main").focus()
    page.keyboard.press("4")
    page.wait_for_selector("#view-about:not([hidden])")
    page.get_by_role("link", name="Search", exact=True).click()  # back to the results
    assert len(ranks(page)) == TOTAL - 1


def test_results_come_first_on_a_phone(visit):
    page = visit(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    search(page, 0)
    assert page.locator("#grid .card").first.bounding_box()["y"] < 600
    assert not page.locator("#threshold").is_visible()
    page.get_by_role("button", name="Filters").tap()
    assert page.locator("#threshold").is_visible()
    page.get_by_role("button", name="Filters").tap()
    page.locator("#grid .card").first.tap()
    page.wait_for_selector("#viewer[open]")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator("#viewer-picture").bounding_box()["y"] < 200
    page.keyboard.press("Escape")
    search(page, 0, 1, 2, 3, 4, 5)  # they scroll, side by side
    boxes = [entry.bounding_box() for entry in page.locator("#queries li").all()]
    for left, right in itertools.pairwise(boxes):
        assert left["x"] + left["width"] <= right["x"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_progress_while_the_gallery_loads(browser, live):
    context = browser.new_context()
    page = context.new_page()
    answers = [503, 503]

    def load(route):
        if not answers:
            return route.continue_()
        route.fulfill(
            status=answers.pop(),
            headers={"Retry-After": "1"},
            json={"detail": "loading the gallery, 3 s"},
        )

    page.route("**/gallery", load)
    page.goto(live)
    page.get_by_text("Loading the gallery, 3 s.").wait_for()
    page.wait_for_selector("#grid .card")
    assert page.locator("#results-title").inner_text() == "Start with one of these"
    context.close()


def test_sign_in_page(browser, live):
    context = browser.new_context()
    page = context.new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(live.partition("?")[0] + "#item/3")
    page.get_by_label("Access token").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_text("This is not the token").wait_for()
    page.get_by_label("Access token").fill(TOKEN)
    page.keyboard.press("Enter")
    page.wait_for_selector("#grid .rank")
    assert page.url.endswith("#item/3")
    assert errors == []
    cookie = next(one for one in context.cookies() if one["name"].startswith("proximetry-"))
    assert cookie["httpOnly"]
    context.close()


def test_vectors_without_images_or_classes(browser, server, tmp_path):
    texts = [f"a sentence about number {number}" for number in range(20)]
    vectors = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    np.savez(tmp_path / "texts.npz", vectors=vectors, text=texts)
    gallery = index(tmp_path / "texts.npz", tmp_path / "texts")
    cache = cache_map(gallery, tmp_path / "cache")
    process, url = start(server, tmp_path / "log", gallery.path, PROXIMETRY_CACHE=str(cache))
    visit = Visit(browser, url)
    page = visit.page
    assert not page.locator("#choose").is_visible()
    page.locator("#grid .card").first.click()
    assert len(ranks(page)) == 19
    assert not page.locator("#verdict").is_visible()
    assert page.locator("#grid .thumbnail").first.inner_text() in texts
    page.locator("#grid .card").first.click()
    page.wait_for_selector("#viewer[open]")
    assert page.locator("#viewer-picture").inner_text() in texts
    assert not page.get_by_role("button", name="Confirm class").is_visible()
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Map").click()
    page.wait_for_selector("#map-waiting", state="hidden")
    page.get_by_role("button", name="List images in view").click()
    until(page, "document.querySelectorAll('#selection .card').length === 20")
    answer = httpx.post(f"{url}search", files={"image": ("x.png", png())})
    assert answer.status_code == 422
    assert "not images" in answer.json()["detail"]
    visit.end()
    process.send(signal.SIGINT)
    assert process.ended() == 0, process.output()


@pytest.mark.parametrize("size", [(390, 844), (1200, 860)])
def test_dialogs_fit_the_window(visit, size):
    phone = size[0] < 500
    options = {"has_touch": True, "is_mobile": True} if phone else {}
    page = visit(viewport={"width": size[0], "height": size[1]}, **options)
    search(page, 0)
    page.locator("#grid .card").first.click()
    for dialog, opener in (
        ("viewer", None),
        ("ask", "#viewer-tag"),
        ("why", "#viewer-why"),
    ):
        if opener:
            page.locator(opener).click()
        page.wait_for_selector(f"#{dialog}[open]")
        box = page.locator(f"#{dialog}").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= size[0]
        assert box["y"] + box["height"] <= size[1]
        if opener:
            page.keyboard.press("Escape")
