// The grid of results, and the class that they predict.

import { $, announce, asSentence, breakable, button, formatCount, make, nameOf, percent, pluralize, thumbnail } from "./dom.js";
import { checkbox, describeMarks } from "./marks.js";
import { go, readState, replace, searchFor } from "./state.js";

export const VOTERS = 12; // the nearest results vote for the class

let gallery = null;
let current = null; // the server's answer, and the milliseconds until it came
let explain = () => {};

export function setUp(description, onExplain) {
  gallery = description;
  explain = onExplain;
}

const cosine = () => gallery.similarity === "cosine";
export const measure = () => (cosine() ? "similarity" : "distance");
export const score = (similarity) => (Math.abs(similarity) < 0.0005 ? "0.000" : (cosine() ? similarity : -similarity).toFixed(3));
export const match = (id) => current?.results.find((one) => one.id === id);

/** Whether "Why?" can be answered: for one image, not several. */
export const explains = (id) => gallery.explains && match(id) !== undefined && readState().queries.length === 1;

/** Create a card: its image opens large, its buttons search. */
export function card(item, { size = 320, rank = null } = {}) {
  const { similarity, probability = null } = item;
  const label = item.label === null ? "" : String(item.label);
  const sameClass = rank !== null && label && current?.queries.some((query) => query && query.label === item.label);
  const facts = [
    rank === null ? nameOf(item) : `Rank ${rank}`,
    rank !== null && label,
    sameClass && "the same class",
    rank !== null && `${measure()} ${score(similarity)}`,
    probability !== null && `${percent(probability)} the same class`,
    item.match === false && "no match",
  ];
  const words = make("span", { className: "words" });
  const open = make("button", {
    type: "button",
    className: `card${sameClass ? " same" : ""}${item.match === false ? " unmatched" : ""}`,
    title: item.file,
    "aria-label": `${facts.filter(Boolean).join(", ")}: open`,
  }, thumbnail(item, size));
  if (rank === null) {
    words.append(make("span", { className: "label" }, ...breakable(nameOf(item))));
  } else {
    open.append(make("span", { className: "rank" }, String(rank)));
    const title = probability === null ? `${measure()} (${cosine() ? "cosine" : "Euclidean"})` : "Probability of the same class";
    const line = make("span", { className: "line" });
    if (cosine()) {
      const bar = make("i");
      bar.style.width = `${100 * Math.max(0, Math.min(1, similarity))}%`;
      line.append(make("span", { className: "bar" }, bar));
    }
    line.append(make("span", { className: "score", title }, probability === null ? score(similarity) : percent(probability)));
    words.append(make("span", { className: "label" }, ...breakable(label || nameOf(item))), line);
    if (probability !== null) words.append(make("span", { className: "file" }, `${measure()} ${score(similarity)}`));
  }
  words.append(make("span", { className: "marks", data: { marks: item.id } }, ...describeMarks(item)));
  open.append(words);
  open.addEventListener("click", () => go({ image: item.id }));
  const entry = make("li", { data: { id: item.id } }, open, checkbox(item));
  if (rank !== null) {
    entry.dataset.similarity = similarity;
    const actions = make("div", { className: "actions" }, button("More like this", () => searchFor([{ id: item.id }]), { className: "more", "aria-label": `More like rank ${rank}` }));
    if (explains(item.id)) actions.append(button("Why?", () => explain(item), { className: "why", "aria-label": `Why is rank ${rank} similar?` }));
    entry.append(actions);
  }
  return entry;
}

/** Show images to start with. */
export function showStart(items) {
  current = null;
  $("verdict").hidden = true;
  $("grid").removeAttribute("aria-busy");
  $("results-title").textContent = gallery.images ? "Start with one of these" : "This gallery is empty";
  $("results-about").textContent = !gallery.images ? "Add images with `proximetry index`" : gallery.searches_images ? `or ${matchMedia("(pointer: coarse)").matches ? "" : "drop, paste or "}choose an image` : "";
  $("grid").replaceChildren(...items.map((item) => {
    const start = make("button", { type: "button", className: "card", "aria-label": `Search with ${nameOf(item)}` }, thumbnail(item, 320),
      make("span", { className: "words" }, make("span", { className: "label" }, ...breakable(nameOf(item)))));
    start.addEventListener("click", () => searchFor([{ id: item.id }]));
    return make("li", {}, start);
  }));
}

export function showWaiting() {
  $("verdict").hidden = true;
  $("grid").replaceChildren(...Array.from({ length: 12 }, () => make("li", { className: "skeleton" })));
  $("grid").setAttribute("aria-busy", "true");
  $("results-title").textContent = "Nearest images";
  $("results-about").textContent = "searching \u2026";
}

/** Show that a search failed; the message is above the grid. */
export function showFailure() {
  current = null;
  $("grid").replaceChildren();
  $("results-title").textContent = "No results";
  $("results-about").textContent = "";
}

export function showResults(answer) {
  current = answer;
  const { results } = answer;
  $("grid").replaceChildren(...results.map((item) => card(item, { rank: item.rank })));
  const slider = $("threshold");
  if (!cosine()) {
    const farthest = Math.max(0, ...results.map((one) => -one.similarity));
    Object.assign(slider, { max: farthest.toFixed(3), step: (farthest / 200).toFixed(4) });
  }
  slider.value = readState().minimum ?? (cosine() ? slider.min : slider.max);
  const threshold = answer.match_threshold;
  $("ticks").replaceChildren(...(threshold === null ? [] : [make("option", { value: Math.abs(threshold).toFixed(2) })]));
  $("threshold-hint").textContent = threshold === null ? "" : `A match: ${score(threshold)} or ${cosine() ? "more" : "less"}.`;
  showVerdict();
  applyThreshold();
}

/** Show the predicted class, and the probability that the nearest image is of the same class. */
function showVerdict() {
  const { prediction, results } = current;
  const { label, votes, neighbors } = prediction;
  const lines = [];
  if (label !== null) {
    const name = make("b", {}, String(label));
    if (votes === neighbors) lines.push(make("p", { className: "vote" }, `The nearest ${votes === 1 ? "image is" : `${votes} are all`} `, name));
    else lines.push(make("p", { className: "vote" }, votes * 2 > neighbors ? "Most are " : "Most frequent: ", name, `, ${votes} of the nearest ${neighbors}`));
  }
  const [nearest] = results;
  if (nearest?.match === false) {
    lines.push(make("p", { className: "no-match" }, `No match: the nearest ${measure()}, ${score(nearest.similarity)}, is ${cosine() ? "below" : "above"} ${score(current.match_threshold)}.`));
  }
  if (nearest && (nearest.probability ?? null) !== null) {
    lines.push(make("p", { className: "chance" }, "Same class as the nearest image: ", make("b", {}, percent(nearest.probability)), " probability"));
  }
  $("verdict").replaceChildren(...lines);
  $("verdict").hidden = !lines.length;
}

/** Hide results below the threshold. */
export function applyThreshold() {
  const slider = $("threshold");
  const all = cosine() ? slider.value === slider.min : Number(slider.value) >= Number(slider.max);
  $("threshold-value").textContent = all ? "all" : Number(slider.value).toFixed(2);
  slider.setAttribute("aria-valuetext", all ? "all images" : $("threshold-value").textContent);
  if (!current) return;
  replace({ minimum: all ? null : slider.value });
  let visible = 0;
  for (const entry of $("grid").querySelectorAll("li[data-similarity]")) {
    const similarity = Number(entry.dataset.similarity);
    entry.hidden = !all && (cosine() ? similarity < Number(slider.value) : -similarity > Number(slider.value));
    visible += !entry.hidden;
  }
  $("grid").querySelector(".empty")?.remove();
  const total = current.results.length;
  if (!visible) {
    const reason = total ? "No results within the threshold. Move the slider to see more." : readState().where.length ? "No other images match the filters." : "No other images in the gallery.";
    $("grid").append(make("li", { className: "empty" }, reason));
  }
  const summary = visible === total ? pluralize(total, "image", "images") : `${formatCount(visible)} of ${pluralize(total, "image", "images")}`;
  $("results-about").textContent = `${summary} \u00b7 ${Math.round(current.milliseconds)} ms`;
  const nearest = visible ? `, the nearest ${cosine() ? "with similarity" : "at distance"} ${score(current.results[0].similarity)}` : "";
  const verdict = [...$("verdict").children].map((line) => asSentence(line.textContent)).join(" ");
  announce(`${summary}${nearest}. ${verdict}`.trim());
}

