// The page: query, results and views.
// The URL contains the query (#item/12), so that the back button works.

import { MapView } from "./map.js";

const $ = (id) => document.getElementById(id);
const VIEWS = ["search", "map", "about"];

let gallery = null;
let current = null; // {query, prediction, results, similarity, match_threshold, source, milliseconds} of the grid
let controller = null; // aborts the current search
let explained = null; // the result in the dialog
const uploads = []; // by the number in the URL

/** Create an element; set properties, append children. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("aria-") || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

const formatCount = (number) => String(number).replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");
const pluralize = (number, one, many) => `${formatCount(number)} ${number === 1 ? one : many}`;

/** Send a request; throw the server's error message. Retry while the server is busy. */
export async function request(path, options = {}, tries = 4) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached. Is `proximetry serve` still running?");
  }
  if (response.status === 503 && response.headers.has("Retry-After") && tries > 1) {
    const seconds = Number(response.headers.get("Retry-After")) || 1;
    await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
    return request(path, options, tries - 1);
  }
  if (response.ok && response.headers.get("Content-Type")?.startsWith("image/")) return response.blob();
  const content = await response.json().catch(() => null);
  if (!response.ok) throw new Error(asSentence(content?.detail ?? `The server returned status ${response.status}`));
  return content;
}

function asSentence(text) {
  return text[0].toUpperCase() + text.slice(1) + (/[.?!]$/.test(text) ? "" : ".");
}

export function announce(text) {
  $("status").textContent = text;
}

// Results

const cosine = () => gallery.similarity === "cosine";
const percent = (probability) => probability < 0.01 ? "< 1 %" : `${Math.round(100 * probability)} %`;
const score = (similarity) => Math.abs(similarity) < 0.0005 ? "0.000" : (cosine() ? similarity : -similarity).toFixed(3);

/** Create a thumbnail, or a note if the file is not readable. */
export function thumbnail(id, size) {
  const image = make("img", { alt: "", loading: "lazy", decoding: "async", src: `items/${id}/image?size=${size}` });
  image.addEventListener("error", () => image.replaceWith(make("span", {}, "not readable")));
  image.addEventListener("load", () => image.classList.toggle("tiny", image.naturalWidth <= 64));
  return make("span", { className: "thumbnail" }, image);
}

function card(match, query) {
  const label = match.label === null ? "" : String(match.label);
  const sameClass = query && query.label !== null && query.label === match.label;
  const measure = cosine() ? "similarity" : "distance";
  const button = make("button", {
    type: "button",
    className: `card${sameClass ? " same" : ""}${match.match === false ? " unmatched" : ""}`,
    title: match.file,
    "aria-label": `Rank ${match.rank}${label && `, ${label}`}${sameClass ? ", the same class" : ""}, ${measure} ${score(match.similarity)}${match.probability === null ? "" : `, ${percent(match.probability)} the same class`}${match.match === false ? ", no match" : ""}: search with this image`,
  });
  const words = make("span", { className: "words" });
  words.append(
    make("span", { className: "line" },
      make("span", { className: "label" }, label || "\u2014"),
      make("span", { className: "score", title: match.probability === null ? "" : "Probability of the same class" },
        match.probability === null ? score(match.similarity) : percent(match.probability))),
  );
  if (cosine()) {
    const bar = make("i");
    bar.style.width = `${100 * Math.max(0, Math.min(1, match.similarity))}%`;
    words.append(make("span", { className: "bar" }, bar));
  }
  if (match.probability !== null) {
    words.append(make("span", { className: "file" }, `${measure} ${score(match.similarity)}`));
  }
  words.append(make("span", { className: "file" }, match.file));
  button.append(thumbnail(match.id, 320), make("span", { className: "rank" }, String(match.rank)), words);
  button.addEventListener("click", () => { location.hash = `item/${match.id}`; });
  const entry = make("li", {}, button);
  if (gallery.explains) {
    const why = make("button", { type: "button", className: "why", "aria-label": `Why is rank ${match.rank} similar?` }, "Why?");
    why.addEventListener("click", () => explain(match));
    entry.append(why);
  }
  entry.dataset.similarity = match.similarity;
  return entry;
}

/** Show which regions make a result similar to the query. */
async function explain(match) {
  const form = new FormData();
  form.set("result", match.id);
  for (const [name, value] of Object.entries(current.source)) form.set(name, value);
  const label = match.label === null ? "" : `, ${match.label}`;
  $("why-title").textContent = `Why rank ${match.rank}${label}?`;
  $("why-about").textContent = "computing \u2026";
  $("why-image").hidden = true;
  $("why").showModal();
  explained = match;
  try {
    const image = await request("explain", { method: "POST", body: form });
    if (explained !== match) return;
    URL.revokeObjectURL($("why-image").src);
    $("why-image").src = URL.createObjectURL(image);
    $("why-image").alt = `The query and the result, similarity ${score(match.similarity)}, with the regions that contribute most`;
    $("why-image").hidden = false;
    $("why-about").textContent = "Yellow to red regions add to the similarity, blue ones reduce it. Equal numbers match.";
  } catch (error) {
    if (explained === match) $("why-about").textContent = error.message;
  }
}

function showResults() {
  const { results, query } = current;
  $("grid").replaceChildren(...results.map((match) => card(match, query)));
  if (!cosine()) {
    const farthest = Math.max(0, ...results.map((match) => -match.similarity));
    Object.assign($("threshold"), { max: farthest.toFixed(3), step: (farthest / 200).toFixed(4), value: farthest.toFixed(3) });
  }
  applyThreshold();
}

/** Hide results below the threshold. */
function applyThreshold() {
  const slider = $("threshold");
  const all = cosine() ? slider.value === slider.min : Number(slider.value) >= Number(slider.max);
  $("threshold-value").textContent = all ? "all" : Number(slider.value).toFixed(2);
  slider.setAttribute("aria-valuetext", all ? "all images" : $("threshold-value").textContent);
  if (!current) return;
  let visible = 0;
  for (const entry of $("grid").querySelectorAll("li[data-similarity]")) {
    const similarity = Number(entry.dataset.similarity);
    entry.hidden = !all && (cosine() ? similarity < Number(slider.value) : -similarity > Number(slider.value));
    visible += !entry.hidden;
  }
  $("grid").querySelector(".empty")?.remove();
  const total = current.results.length;
  if (!visible) {
    const reason = total ? "No results within the threshold. Move the slider to see more." : "No results.";
    $("grid").append(make("li", { className: "empty" }, reason));
  }
  const summary = visible === total ? pluralize(total, "image", "images") : `${formatCount(visible)} of ${pluralize(total, "image", "images")}`;
  const { label, votes, neighbors } = current.prediction;
  const vote = label === null ? "" : ` \u00b7 most frequent: ${label} (${votes} of ${neighbors})`;
  const noMatch = total && current.results[0].match === false;
  const verdict = noMatch ? `No match: the nearest ${cosine() ? "similarity is below" : "distance is above"} ${score(current.match_threshold)} \u00b7 ` : "";
  $("results-about").classList.toggle("no-match", Boolean(noMatch));
  $("results-about").textContent = `${verdict}${summary}${noMatch ? "" : vote} \u00b7 ${Math.round(current.milliseconds)} ms`;
  announce(`${verdict}${summary}${visible ? `, the nearest ${cosine() ? "with similarity" : "at distance"} ${score(current.results[0].similarity)}` : ""}.`);
}

function showWaiting() {
  const entries = Array.from({ length: 12 }, () => make("li", { className: "skeleton" }));
  $("grid").replaceChildren(...entries);
  $("grid").setAttribute("aria-busy", "true");
  $("results-title").textContent = "Nearest images";
  $("results-about").textContent = "searching \u2026";
}

function showError(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

// Queries

function showQuery(source, caption, more) {
  $("preview").src = source;
  $("preview").alt = `Query: ${caption}`;
  $("preview").hidden = false;
  $("invite").hidden = true;
  $("drop").classList.add("filled");
  $("query-caption").replaceChildren(caption, ...(more ? [make("span", {}, more)] : []));
}

function showStart() {
  controller?.abort();
  current = null;
  map.mark([]);
  showError("");
  $("preview").hidden = true;
  $("preview").removeAttribute("src");
  $("invite").hidden = false;
  $("drop").classList.remove("filled");
  $("query-caption").replaceChildren();
  $("grid").removeAttribute("aria-busy");
  $("results-title").textContent = gallery.images ? "Start with one of these" : "This gallery is empty";
  $("results-about").textContent = gallery.images ? "or drop, paste or choose an image" : "Add images with `proximetry index`";
  $("grid").replaceChildren(...gallery.suggested.map((id) => {
    const button = make("button", { type: "button", className: "card", "aria-label": `Search with image ${id} of the gallery` }, thumbnail(id, 320));
    button.addEventListener("click", () => { location.hash = `item/${id}`; });
    return make("li", {}, button);
  }));
}

async function search(fields) {
  controller?.abort();
  controller = new AbortController();
  const { signal } = controller;
  const form = new FormData();
  form.set("k", $("count").value);
  const label = $("class").value.trim();
  if (label) form.set("where", `label=${label}`);
  for (const [name, value] of Object.entries(fields)) form.set(name, value);
  showError("");
  showWaiting();
  const started = performance.now();
  try {
    const content = await request("search", { method: "POST", body: form, signal });
    current = { ...content, source: fields, milliseconds: performance.now() - started };
    if (content.query) {
      const label = content.query.label === null ? `Image ${content.query.id}` : String(content.query.label);
      showQuery(`items/${content.query.id}/image?size=512`, label, content.query.file);
    }
    map.mark(content.results.map((match) => match.id));
    showResults();
  } catch (error) {
    if (error.name === "AbortError") return;
    current = null;
    $("grid").replaceChildren();
    $("results-about").textContent = "";
    showError(error.message);
  } finally {
    if (!signal.aborted) $("grid").removeAttribute("aria-busy");
  }
}

function searchUpload(number) {
  const { file, source } = uploads[number];
  showQuery(source, file.name || "Pasted image", "");
  search({ image: file });
}

function searchFile(file) {
  showError("");
  if (!file.type.startsWith("image/")) {
    showError(`${file.name || "The dropped file"} is not an image.`);
  } else if (file.size > gallery.limits.bytes) {
    showError(`${file.name || "The image"} is too large: the limit is ${Math.round(gallery.limits.bytes / 1e6)} MB.`);
  } else {
    uploads.push({ file, source: URL.createObjectURL(file) });
    location.hash = `upload/${uploads.length - 1}`;
    return;
  }
  if ($("view-search").hidden) location.hash = "search";
}

// Views

function route() {
  const [name, value] = location.hash.slice(1).split("/");
  const view = VIEWS.includes(name) ? name : "search";
  for (const one of VIEWS) {
    $(`view-${one}`).hidden = one !== view;
    if (one === view) $(`to-${one}`).setAttribute("aria-current", "page");
    else $(`to-${one}`).removeAttribute("aria-current");
  }
  const title = { search: "Search", map: "Map", about: "Gallery" }[view];
  document.title = `${title} \u00b7 ${gallery.name} \u00b7 Proximetry`;
  if (view === "map") map.show();
  else if (view === "search") {
    if (name === "item" && /^\d+$/.test(value)) search({ id: value });
    else if (name === "upload" && uploads[value]) searchUpload(Number(value));
    else showStart();
    window.scrollTo(0, 0);
  }
}

/** Repeat the search with the current options. */
function repeatSearch() {
  if (/^#(item|upload)\//.test(location.hash)) route();
}

function showGallery() {
  const classes = gallery.class_count;
  $("gallery-name").textContent = `${gallery.name} \u00b7 ${pluralize(gallery.images, "image", "images")}`;
  const facts = {
    Images: formatCount(gallery.images),
    Classes: formatCount(classes),
    Embedder: gallery.backbone,
    "Image size": gallery.image_size.join(" \u00d7 "),
    Dimensions: formatCount(gallery.dim),
    Metric: cosine() ? "cosine" : "Euclidean distance",
    Index: gallery.index,
  };
  $("facts").replaceChildren(...Object.entries(facts).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  $("metrics").replaceChildren(metricsTable(gallery.metrics));
  $("classes").replaceChildren(...gallery.classes.map((one) => make("option", { value: one.name })));
  $("class-field").hidden = $("highlight-field").hidden = !classes;
  $("threshold-name").textContent = cosine() ? "Minimum similarity" : "Maximum distance";
}

const isGroup = (value) => value !== null && typeof value === "object";
const formatMetric = (value) => (value === undefined || value === null ? "\u2014" : typeof value === "number" && !Number.isInteger(value) ? value.toFixed(4) : String(value));

/** Return the [name, value] pairs of a nested object. */
function flatten(values, prefix = "") {
  return Object.entries(values).flatMap(([name, value]) => (isGroup(value) ? flatten(value, `${prefix}${name} \u203a `) : [[prefix + name, value]]));
}

/** Create a table with a column per evaluated split and a row per metric. */
function metricsTable(metrics) {
  if (!metrics) return make("p", { className: "hint" }, "None: the embedder has no training run.");
  const sets = Object.entries(metrics).filter(([, value]) => isGroup(value)).map(([name, value]) => [name, new Map(flatten(value))]);
  const scalars = Object.entries(metrics).filter(([, value]) => !isGroup(value));
  if (!sets.length) sets.push(["value", new Map(scalars.splice(0))]);
  const names = [...new Set(sets.flatMap(([, values]) => [...values.keys()]))];
  const head = make("tr", {}, make("td", {}), ...sets.map(([name]) => make("th", { scope: "col" }, name.replaceAll("_", " "))));
  const rows = names.map((name) => make("tr", {}, make("th", { scope: "row" }, name.replaceAll("_", " ")), ...sets.map(([, values]) => make("td", {}, formatMetric(values.get(name))))));
  const caption = scalars.map(([name, value]) => `${name.replaceAll("_", " ")} ${formatMetric(value).replaceAll("_", " ")}`).join(" \u00b7 ");
  const table = make("table", {}, make("caption", {}, caption), make("thead", {}, head), make("tbody", {}, ...rows));
  const region = make("div", { className: "scroll", tabIndex: 0, "aria-label": "Metrics" }, table);
  region.setAttribute("role", "region");
  return region;
}

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

// Dropping, pasting, choosing

let dragDepth = 0;
const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
addEventListener("dragenter", (event) => {
  if (!hasFiles(event)) return;
  dragDepth += 1;
  $("overlay").hidden = false;
});
addEventListener("dragleave", (event) => {
  if (!hasFiles(event)) return;
  dragDepth = Math.max(0, dragDepth - 1);
  $("overlay").hidden = dragDepth > 0 ? $("overlay").hidden : true;
});
addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
addEventListener("drop", (event) => {
  dragDepth = 0;
  $("overlay").hidden = true;
  const file = event.dataTransfer?.files[0];
  if (!file) return;
  event.preventDefault();
  searchFile(file);
});
addEventListener("paste", (event) => {
  const file = [...(event.clipboardData?.files ?? [])].find((one) => one.type.startsWith("image/"));
  if (file) {
    event.preventDefault();
    searchFile(file);
  } else if (!["INPUT", "TEXTAREA"].includes(document.activeElement?.tagName)) {
    showError("The clipboard contains no image.");
  }
});
$("file").addEventListener("change", () => {
  const file = $("file").files[0];
  if (file) searchFile(file);
  $("file").value = "";
});

// Arrow keys move through the grid.
$("grid").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 0, ArrowUp: 0 }[event.key];
  const cards = [...$("grid").querySelectorAll("li:not([hidden]) .card")];
  const index = cards.indexOf(document.activeElement);
  if (step === undefined || index < 0) return;
  event.preventDefault();
  const columns = cards.filter((one) => one.offsetTop === cards[0].offsetTop).length;
  const offset = event.key === "ArrowDown" ? columns : event.key === "ArrowUp" ? -columns : step;
  cards[index + offset]?.focus();
});

$("why-close").addEventListener("click", () => $("why").close());
$("threshold").addEventListener("input", applyThreshold);
$("count").addEventListener("change", repeatSearch);
$("class").addEventListener("change", repeatSearch);
$("skip").addEventListener("click", (event) => {
  event.preventDefault();
  $("main").focus();
});
addEventListener("hashchange", route);

const map = new MapView({ isDark });
try {
  gallery = await request("gallery");
  showGallery();
  showTheme();
  route();
} catch (error) {
  showError(error.message);
}
