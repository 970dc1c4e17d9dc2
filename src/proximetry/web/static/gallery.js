// What the gallery contains, and the metrics of its embedder.

import { $, formatCount, make } from "./dom.js";

const MAX_CLASSES = 60;
const isGroup = (value) => value !== null && typeof value === "object";
const formatMetric = (value) => (value === undefined || value === null ? "\u2014" : typeof value === "number" && !Number.isInteger(value) ? value.toFixed(4) : String(value));

export function showGallery(gallery) {
  const cosine = gallery.similarity === "cosine";
  const facts = {
    [gallery.searches_images ? "Images" : "Items"]: formatCount(gallery.images),
    Classes: formatCount(gallery.class_count),
    Embedder: gallery.backbone,
    ...(gallery.image_size.length ? { "Image size": gallery.image_size.join(" \u00d7 ") } : {}),
    Dimensions: formatCount(gallery.dim),
    Metric: cosine ? "cosine" : "Euclidean distance",
    Index: gallery.index,
    Probabilities: gallery.calibrated ? "calibrated" : "not calibrated",
  };
  $("facts").replaceChildren(...Object.entries(facts).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  $("metrics").replaceChildren(metricsTable(gallery.metrics));
  $("class-counts-title").hidden = !gallery.class_count;
  const classes = gallery.classes.slice(0, MAX_CLASSES).map(({ name, images }) => make("li", {},
    make("span", {}, name), make("span", {}, formatCount(images))));
  if (gallery.class_count > MAX_CLASSES) classes.push(make("li", {}, `and ${formatCount(gallery.class_count - MAX_CLASSES)} more`));
  $("class-counts").replaceChildren(...classes);
}

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
  return make("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Metrics" }, table);
}
