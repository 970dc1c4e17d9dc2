// The state of the page is its URL, so that it can be shared and the back button works:
// #item/12,15@0.1-0.2-0.5-0.6?where=label=jay&results=24&minimum=0.5&image=34
// Queries are ids of images, or u0, u1 … for uploads, which only this visit has; @ is a box.

export const VIEWS = ["search", "map", "marked", "about"];
export const DEFAULT_RESULTS = "48";

/** Parse an id: ids on Milvus are too large for numbers. */
export const asId = (text) => (Number.isSafeInteger(Number(text)) ? Number(text) : text);

function parseQuery(text) {
  const [name, box] = text.split("@");
  const query = name.startsWith("u") ? { upload: Number(name.slice(1)) } : { id: asId(name) };
  const sides = box?.split("-").map(Number) ?? [];
  if (sides.length === 4 && sides.every(Number.isFinite)) query.box = sides;
  return query;
}

function formatQuery({ id, upload, box }) {
  const name = upload === undefined ? id : `u${upload}`;
  return box ? `${name}@${box.map((side) => Number(side.toFixed(3))).join("-")}` : name;
}

/** Read the state from the URL. */
export function readState() {
  const [path, parameters = ""] = location.hash.slice(1).split("?");
  const [name, value = ""] = path.split("/");
  const options = new URLSearchParams(parameters);
  return {
    view: VIEWS.includes(name) ? name : "search",
    queries: name === "item" ? value.split(",").filter((text) => /^u?\d+(@|$)/.test(text)).map(parseQuery) : [],
    where: options.getAll("where"),
    results: options.get("results") ?? DEFAULT_RESULTS,
    combine: options.get("combine") ?? "mean",
    minimum: options.get("minimum"),
    image: options.has("image") ? asId(options.get("image")) : null,
  };
}

function format(state) {
  const options = new URLSearchParams();
  for (const condition of state.where) options.append("where", condition);
  if (state.results !== DEFAULT_RESULTS) options.set("results", state.results);
  if (state.combine !== "mean") options.set("combine", state.combine);
  if (state.minimum !== null) options.set("minimum", state.minimum);
  if (state.image !== null) options.set("image", state.image);
  const path = state.view === "search" && state.queries.length ? `item/${state.queries.map(formatQuery).join(",")}` : state.view;
  return `#${path}${options.size ? `?${options}` : ""}`;
}

/** Change the state: a step of the back button, followed by a hashchange event. */
export function go(changes) {
  location.hash = format({ ...readState(), image: null, ...changes });
}

/** Change the URL only. */
export function replace(changes) {
  history.replaceState(null, "", format({ ...readState(), ...changes }));
}

/** Search with other queries and the same filters. */
export const searchFor = (queries) => go({ view: "search", queries, minimum: null });
