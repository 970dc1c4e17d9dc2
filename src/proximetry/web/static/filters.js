// Filters: the class, and conditions of any column, such as year>=1999.

import { $, button, make } from "./dom.js";

const OPERATORS = { "=": "is", "!=": "is not", "^=": "starts with", ">=": "at least", "<=": "at most", ">": "more than", "<": "less than" };
const NUMERIC = ["=", "!=", ">=", "<=", ">", "<"];
const CONDITION = /^([^!<>=^].*?)(!=|<=|>=|\^=|=|<|>)(.*)$/s;

let columns = [];
let classes = new Map(); // names by their lowercase form
let changed = () => {};

/** Set the columns of the gallery; call `onChange` when the visitor changes a filter. */
export function setColumns(gallery, onChange) {
  changed = onChange;
  columns = gallery.columns;
  classes = new Map(gallery.classes.map(({ name }) => [name.toLowerCase(), name]));
  $("classes").replaceChildren(...gallery.classes.map(({ name }) => make("option", { value: name })));
  $("class-field").hidden = !gallery.class_count;
  $("add-filter").hidden = !columns.length;
  $("lists").replaceChildren(...columns.map((column, number) => make("datalist", { id: `values-${number}` }, ...column.values.map((value) => make("option", { value })))));
}

/** Match the name of a class whatever its case. */
export const findClass = (text) => classes.get(text.trim().toLowerCase()) ?? text.trim();

/** Show the conditions of the URL. */
export function showConditions(conditions) {
  const ofClass = conditions.filter((text) => text.startsWith("label="));
  const single = ofClass.length === 1 && classes.size;
  $("class").value = single ? ofClass[0].slice("label=".length) : "";
  const rest = conditions.filter((text) => !single || text !== ofClass[0]);
  $("filters").replaceChildren(...rest.map((text) => row(...(CONDITION.exec(text)?.slice(1) ?? [text, "=", ""]))));
  $("filters-toggle").textContent = conditions.length ? `Filters (${conditions.length})` : "Filters";
}

/** Return the conditions as text, as the server reads them. */
export function readConditions() {
  const label = $("class").value.trim();
  const conditions = label ? [`label=${findClass(label)}`] : [];
  for (const entry of $("filters").children) {
    const [column, operator, value] = [...entry.querySelectorAll("select, input")].map((field) => field.value.trim());
    if (value) conditions.push(column + operator + (column === "label" && operator !== "^=" ? findClass(value) : value));
  }
  return conditions;
}

function row(name, operator = "=", value = "") {
  const column = columns.findIndex((one) => one.name === name);
  const { kind, minimum, maximum } = columns[column] ?? { kind: "text" };
  const select = make("select", { "aria-label": "Column" }, ...columns.map((one) => make("option", { value: one.name }, one.name === "label" ? "class" : one.name)));
  if (column < 0) select.append(make("option", { value: name }, name)); // the server reports it
  select.value = name;
  const signs = kind === "number" ? NUMERIC : Object.keys(OPERATORS);
  const sign = make("select", { "aria-label": "Condition" }, ...signs.map((one) => make("option", { value: one }, OPERATORS[one])));
  sign.value = operator;
  const input = make("input", { value, autocomplete: "off", spellcheck: false, "aria-label": "Value", list: name === "label" ? "classes" : `values-${column}` });
  if (kind === "number") Object.assign(input, { inputMode: "decimal", placeholder: `${minimum} to ${maximum}` });
  const entry = make("div", { className: "filter", role: "group", "aria-label": `Filter by ${name}` }, select, sign, input,
    button("\u00d7", () => { entry.remove(); changed(); }, { className: "remove", "aria-label": `Remove the filter by ${name}` }));
  select.addEventListener("change", () => {
    const other = row(select.value);
    entry.replaceWith(other);
    other.querySelector("input").focus();
    if (input.value.trim()) changed();
  });
  sign.addEventListener("change", () => { if (input.value.trim()) changed(); });
  input.addEventListener("change", () => changed());
  return entry;
}

export function addFilter() {
  const used = new Set([...$("filters").querySelectorAll("select:first-child")].map((field) => field.value));
  const unused = columns.find((one) => one.name !== "label" && !used.has(one.name)) ?? columns[0];
  $("filters").append(row(unused.name));
  $("filters").lastElementChild.querySelector("input").focus();
}
