// Selected images, and marks: tags and decisions on labels. Marks are kept in this browser.

import { findItems, known } from "./api.js";
import { $, announce, ask, button, copyText, download, make, nameOf, notify, pluralize, toCsv } from "./dom.js";
import { findClass } from "./filters.js";
import { addToQuery } from "./query.js";
import { card, match } from "./results.js";
import { asId } from "./state.js";

export const selected = new Set(); // ids
let marks = {}; // by file: {id, label, tags, action: "keep" | "relabel" | "drop", new}
let storage = "";
let changed = () => {}; // called after a change of the selection
let last = null; // the checkbox that was clicked last

const isEmpty = (mark) => !mark.tags.length && !mark.action;

/** Load the marks of a gallery, which are stored by its name and address. */
export function loadMarks(gallery, onChange) {
  changed = onChange;
  storage = `proximetry-marks:${location.pathname}:${gallery.name}`;
  try {
    marks = JSON.parse(localStorage.getItem(storage)) ?? {};
  } catch {
    marks = {};
  }
  showCount();
}

function save() {
  marks = Object.fromEntries(Object.entries(marks).filter(([, mark]) => !isEmpty(mark)));
  try {
    localStorage.setItem(storage, JSON.stringify(marks));
  } catch {
    notify("This browser does not store marks: export them before you close the page.");
  }
  for (const element of document.querySelectorAll("[data-marks]")) {
    const item = known(asId(element.dataset.marks));
    if (item) element.replaceChildren(...describeMarks(item));
  }
  showCount();
  if (!$("view-marked").hidden) showMarked();
}

function showCount() {
  const count = Object.keys(marks).length;
  $("to-marked").hidden = !count && $("view-marked").hidden;
  $("to-marked").textContent = `Marked (${count})`;
}

export function describeMarks(item) {
  const mark = marks[item.file];
  if (!mark) return [];
  const decision = { keep: "class confirmed", relabel: `\u2192 ${mark.new}`, drop: "drop" }[mark.action];
  return [
    ...(decision ? [make("span", { className: `mark ${mark.action}` }, decision)] : []),
    ...mark.tags.map((tag) => make("span", { className: "mark" }, tag)),
  ];
}

// Selection

/** Create a checkbox that selects an item; Shift selects all up to it. */
export function checkbox(item) {
  const input = make("input", { type: "checkbox", checked: selected.has(item.id), "aria-label": `Select ${nameOf(item)}` });
  const entry = make("label", { className: "pick", title: "Select (x)" }, input);
  input.addEventListener("click", (event) => {
    const boxes = [...input.closest("ol").querySelectorAll("li:not([hidden]) .pick input")];
    const [from, to] = [boxes.indexOf(last), boxes.indexOf(input)].sort((a, b) => a - b);
    const range = event.shiftKey && from >= 0 ? boxes.slice(from, to + 1) : [input];
    last = input;
    select(range.map((box) => asId(box.closest("li").dataset.id)), input.checked);
  });
  return entry;
}

/** Add items to the selection, or remove them. */
export function select(ids, add = true) {
  for (const id of ids) {
    if (add) selected.add(id);
    else selected.delete(id);
  }
  for (const box of document.querySelectorAll("li[data-id] .pick input")) box.checked = selected.has(asId(box.closest("li").dataset.id));
  $("selection-bar").hidden = !selected.size;
  document.body.classList.toggle("has-bar", selected.size > 0);
  $("selection-count").textContent = pluralize(selected.size, "image", "images") + " selected";
  announce($("selection-count").textContent);
  changed();
}

// Marks of several items

async function mark(ids, change) {
  const items = await findItems(ids);
  for (const item of items) {
    const old = marks[item.file] ?? { tags: [] };
    marks[item.file] = change({ ...old, id: item.id, label: item.label }, item);
  }
  save();
  return items;
}

export async function tag(ids) {
  const known = [...new Set(Object.values(marks).flatMap(({ tags }) => tags))].sort();
  $("tags").replaceChildren(...known.map((value) => make("option", { value })));
  const name = await ask(`Tag ${pluralize(ids.length, "image", "images")}`, { list: "tags", submit: "Add tag" });
  if (name === null) return;
  await mark(ids, (old) => ({ ...old, tags: [...new Set([...old.tags, name])] }));
  notify(`Tagged ${pluralize(ids.length, "image", "images")} with ${name}.`);
}

export async function confirmClass(ids) {
  await mark(ids, (old, item) => (item.label === null ? old : { ...old, action: "keep", new: "" }));
  notify(`Confirmed the class of ${pluralize(ids.length, "image", "images")}.`);
}

export async function changeClass(ids, suggestion = "") {
  const name = await ask(`Class of ${pluralize(ids.length, "image", "images")}`, { value: suggestion, list: "classes", submit: "Change class" });
  if (name === null) return;
  const label = findClass(name);
  await mark(ids, (old, item) => ({ ...old, action: item.label === label ? "keep" : "relabel", new: item.label === label ? "" : label }));
  notify(`${pluralize(ids.length, "image", "images")} \u2192 ${label}.`);
}

export async function drop(ids) {
  await mark(ids, (old) => ({ ...old, action: "drop", new: "" }));
  notify(`Marked ${pluralize(ids.length, "image", "images")} to be dropped from the dataset.`);
}

export async function unmark(ids) {
  for (const item of await findItems(ids)) delete marks[item.file];
  save();
}

// Export

/** Save the metadata of items as CSV. */
async function exportItems(ids) {
  const items = await findItems(ids);
  const columns = [...new Set(items.flatMap((item) => Object.keys(item.details)))];
  const rows = items.map((item) => [
    item.id, item.file, item.label, match(item.id)?.similarity, match(item.id)?.probability,
    (marks[item.file]?.tags ?? []).join(" "), ...columns.map((name) => item.details[name]),
  ]);
  download("images.csv", toCsv([["id", "path", "label", "similarity", "probability", "tags", ...columns], ...rows]), "text/csv");
}

const files = async (ids) => (await findItems(ids)).map((item) => item.file);

/** Save decisions on labels in the format of `proximetry check --suggestions`. */
function exportLabels() {
  const rows = Object.entries(marks).filter(([, { action }]) => action)
    .map(([file, { action, new: label }]) => [file, "reviewed", action, label, "", "search page"]);
  download("labels.csv", toCsv([["path", "kind", "action", "label", "split", "reason"], ...rows]), "text/csv");
}

function exportTags() {
  const rows = Object.entries(marks).flatMap(([file, { label, tags }]) => tags.map((name) => [file, label, name]));
  download("tags.csv", toCsv([["path", "label", "tag"], ...rows]), "text/csv");
}

/** Show all marked images, or those with a tag. */
export async function showMarked() {
  $("to-marked").hidden = false;
  const entries = Object.entries(marks);
  const tags = [...new Set(entries.flatMap(([, mark]) => mark.tags))].sort();
  const chosen = $("marked-tags").querySelector("[aria-pressed=true]")?.dataset.tag;
  const chips = tags.map((name) => button(name, (event) => {
    const pressed = event.currentTarget.getAttribute("aria-pressed") === "true";
    for (const other of $("marked-tags").querySelectorAll("button")) other.setAttribute("aria-pressed", "false");
    event.currentTarget.setAttribute("aria-pressed", String(!pressed));
    showMarked();
  }, { data: { tag: name }, "aria-pressed": String(name === chosen) }));
  $("marked-tags").replaceChildren(...chips);
  const shown = entries.filter(([, mark]) => !tags.includes(chosen) || mark.tags.includes(chosen));
  const decisions = entries.filter(([, { action }]) => action).length;
  $("marked-about").textContent = `${pluralize(entries.length, "image", "images")}, ${pluralize(decisions, "decision on a label", "decisions on labels")}`;
  $("export-labels").disabled = !decisions;
  $("export-tags").disabled = !tags.length;
  $("marked-empty").hidden = entries.length > 0;
  const current = new Map((await findItems(shown.map(([, mark]) => mark.id))).map((item) => [item.file, item]));
  $("marked").replaceChildren(...shown.map(([file, mark]) => {
    const item = current.get(file); // missing if the gallery was rebuilt, or the image removed
    if (item) return card(item, { size: 160 });
    return make("li", {}, make("span", { className: "words" }, make("span", { className: "label" }, file), make("span", { className: "file" }, `no longer in the gallery${mark.new ? ` \u2192 ${mark.new}` : ""}`)));
  }));
}

/** Connect the buttons. */
export function listenForMarks() {
  const act = (id, action) => $(id).addEventListener("click", () => action([...selected]));
  act("selection-search", (ids) => addToQuery(ids));
  act("selection-tag", tag);
  act("selection-confirm", confirmClass);
  act("selection-change", (ids) => changeClass(ids));
  act("selection-drop", drop);
  act("selection-csv", exportItems);
  act("selection-paths", async (ids) => download("paths.txt", (await files(ids)).join("\n") + "\n"));
  act("selection-copy", async (ids) => copyText((await files(ids)).join("\n"), `Copied ${pluralize(ids.length, "path", "paths")}.`));
  act("selection-clear", (ids) => select(ids, false));
  $("export-labels").addEventListener("click", exportLabels);
  $("export-tags").addEventListener("click", exportTags);
  $("marked-clear").addEventListener("click", () => {
    marks = {};
    save();
  });
}
