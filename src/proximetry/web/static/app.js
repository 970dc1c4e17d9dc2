// The page: views, searches and the theme. Its state is in the URL (state.js).

import { findItems, loadGallery, remember, request } from "./api.js";
import { $, asSentence, pluralize, showError } from "./dom.js";
import { addFilter, readConditions, setColumns, showConditions } from "./filters.js";
import { showGallery } from "./gallery.js";
import { MapView } from "./map.js";
import { listenForMarks, loadMarks, showMarked } from "./marks.js";
import { listenForImages, setQueries, showQueries, uploaded } from "./query.js";
import { VOTERS, applyThreshold, setUp, showFailure, showResults, showStart, showWaiting } from "./results.js";
import { listenForShortcuts } from "./shortcuts.js";
import { VIEWS, go, readState, replace } from "./state.js";
import { explain, listenForViewer, showImage } from "./viewer.js";

let gallery = null;
let controller = null; // aborts the current search
let searched = null; // what the grid shows
let lastSearch = "#search";

async function search(state) {
  controller?.abort();
  controller = new AbortController();
  const { signal } = controller;
  const form = new FormData();
  form.set("k", state.results);
  form.set("neighbors", VOTERS);
  form.set("combine", state.combine);
  for (const condition of state.where) form.append("where", condition);
  setQueries(form, state.queries);
  showError("");
  showWaiting();
  showQueries(state.queries);
  const started = performance.now();
  try {
    const answer = await request("search", { method: "POST", body: form, signal });
    remember([...answer.queries, ...answer.results]);
    showQueries(state.queries); // with their classes
    map.mark(answer.results.map((match) => match.id));
    showResults({ ...answer, milliseconds: performance.now() - started });
    if (answer.images !== gallery.images) describe(await request("gallery")); // it has changed
  } catch (error) {
    if (error.name === "AbortError") return;
    showFailure();
    showError(error.message);
  } finally {
    if (!signal.aborted) $("grid").removeAttribute("aria-busy");
  }
}

async function start() {
  controller?.abort();
  map.mark([]);
  showQueries([]);
  showStart(await findItems(gallery.suggested));
}

/** Show the state of the URL. */
async function route() {
  const state = readState();
  if (state.queries.some((query) => !uploaded(query))) {
    replace({ queries: [] });
    await route();
    showError("An uploaded image is kept until the page is closed. Choose it again.");
    return;
  }
  for (const view of VIEWS) {
    $(`view-${view}`).hidden = view !== state.view;
    if (view === state.view) $(`to-${view}`).setAttribute("aria-current", "page");
    else $(`to-${view}`).removeAttribute("aria-current");
  }
  if (state.view === "search") lastSearch = location.hash;
  $("to-search").href = state.view === "search" ? "#search" : lastSearch; // back to the results
  const title = { search: "Search", map: "Map", marked: "Marked", about: "Gallery" }[state.view];
  document.title = `${title} \u00b7 ${gallery.name} \u00b7 Proximetry`;
  if (state.view === "map") map.show();
  else if (state.view === "marked") showMarked();
  else if (state.view === "search") {
    const { queries, where, results, combine } = state;
    const key = JSON.stringify([queries, where, results, combine]);
    if (key !== searched) {
      searched = key;
      showError("");
      showConditions(where);
      $("count").value = results;
      $("combine").value = combine;
      window.scrollTo(0, 0);
      await (queries.length ? search(state) : start());
    }
  }
  await showImage(state.image);
}

/** Show what the gallery contains, and the controls that it needs. */
function describe(description) {
  gallery = description;
  $("gallery-name").textContent = `${gallery.name} \u00b7 ${pluralize(gallery.images, "image", "images")}`;
  $("threshold-name").textContent = gallery.similarity === "cosine" ? "Minimum similarity" : "Maximum distance";
  $("highlight-field").hidden = !gallery.class_count;
  $("choose").hidden = !gallery.searches_images;
  $("drop").classList.toggle("vectors", !gallery.searches_images);
  map.hasImages = gallery.has_images;
  setUp(gallery, explain);
  setColumns(gallery, applyOptions);
  showGallery(gallery);
}

const applyOptions = () => go({ where: readConditions(), results: $("count").value, combine: $("combine").value });

// Theme

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function showTheme() {
  $("theme").setAttribute("aria-pressed", String(isDark()));
  map.redraw();
}

$("theme").addEventListener("click", () => {
  const next = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("proximetry-theme", next);
  } catch {
    // Without storage, the theme lasts until the page is closed.
  }
  showTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);

// Controls

$("threshold").addEventListener("input", applyThreshold);
for (const id of ["count", "combine", "class"]) $(id).addEventListener("change", applyOptions);
$("add-filter").addEventListener("click", addFilter);
$("filters-toggle").addEventListener("click", () => {
  const open = $("panel").classList.toggle("open");
  $("filters-toggle").setAttribute("aria-expanded", String(open));
});
$("skip").addEventListener("click", (event) => {
  event.preventDefault();
  $("main").focus();
});

const map = new MapView({ isDark });
try {
  gallery = await loadGallery((message) => { $("results-about").textContent = asSentence(message); });
  describe(gallery);
  loadMarks(gallery, () => map.redraw());
  listenForImages(gallery);
  listenForMarks();
  listenForViewer();
  listenForShortcuts();
  showTheme();
  addEventListener("hashchange", route);
  await route();
} catch (error) {
  showFailure();
  showError(error.message);
}
