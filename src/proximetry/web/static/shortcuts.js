// Keyboard shortcuts. Letters act on the open image, else on the selection, else on the focused one.

import { $, make } from "./dom.js";
import { known } from "./api.js";
import { changeClass, confirmClass, select, selected, tag } from "./marks.js";
import { addToQuery } from "./query.js";
import { explains } from "./results.js";
import { VIEWS, asId, go, searchFor } from "./state.js";
import { explain, openItem, step } from "./viewer.js";

const focusedId = () => {
  const entry = document.activeElement?.closest?.("li[data-id]");
  return entry ? asId(entry.dataset.id) : null;
};
const single = () => openItem()?.id ?? focusedId();
const several = () => (openItem() ? [openItem().id] : selected.size ? [...selected] : focusedId() === null ? [] : [focusedId()]);
const withSingle = (action) => () => { if (single() !== null) action(single()); };
const withSeveral = (action) => () => { if (several().length) action(several()); };

const SHORTCUTS = {
  "o": ["choose an image", () => $("file").click()],
  "/": ["filter by class", () => $("class").focus()],
  "m": ["more like this image", withSingle((id) => searchFor([{ id }]))],
  "+": ["add this image to the query", withSingle((id) => addToQuery([id]))],
  "w": ["why is it similar?", withSingle((id) => { if (explains(id)) explain(known(id)); })],
  "x": ["select", withSingle((id) => select([id], !selected.has(id)))],
  "a": ["select all results", () => select([...document.querySelectorAll("section:not([hidden]) li[data-id]:not([hidden])")].map((entry) => asId(entry.dataset.id)))],
  "t": ["tag", withSeveral(tag)],
  "c": ["confirm the class", withSeveral(confirmClass)],
  "r": ["change the class", withSeveral((ids) => changeClass(ids, ids.length === 1 ? (known(ids[0])?.label ?? "") : ""))],
  "?": ["show these shortcuts", () => $("help").showModal()],
};
const OTHERS = [["Arrows", "move through the grid; previous and next image"], ["Enter", "open the image"], ["Esc", "close"], ["1 \u2026 4", "Search, Map, Marked, Gallery"]];

function isTyping(target) {
  return target.closest?.("input:not([type=checkbox], [type=range], [type=file]), select, textarea, canvas") !== null;
}

function moveInGrid(event) {
  const offset = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 0, ArrowUp: 0 }[event.key];
  const grid = document.activeElement?.closest?.(".grid");
  if (offset === undefined || !grid) return;
  const cards = [...grid.querySelectorAll("li:not([hidden]) .card")];
  const index = cards.indexOf(document.activeElement);
  if (index < 0) return;
  event.preventDefault();
  const top = (element) => element.getBoundingClientRect().top;
  const columns = cards.filter((one) => top(one) === top(cards[0])).length;
  cards[index + (event.key === "ArrowDown" ? columns : event.key === "ArrowUp" ? -columns : offset)]?.focus();
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
  const dialog = document.querySelector("dialog[open]");
  if (openItem() && ["ArrowLeft", "ArrowRight"].includes(event.key) && !$("why").open) {
    event.preventDefault();
    step(event.key === "ArrowLeft" ? -1 : 1);
  } else if (!dialog && event.key.startsWith("Arrow")) moveInGrid(event);
  else if (!dialog && /^[1-4]$/.test(event.key)) go({ view: VIEWS[Number(event.key) - 1] });
  else if (SHORTCUTS[event.key] && (!dialog || (dialog === $("viewer") && dialog === [...document.querySelectorAll("dialog[open]")].at(-1)))) {
    event.preventDefault();
    SHORTCUTS[event.key][1]();
  }
}

export function listenForShortcuts() {
  const keys = [...Object.entries(SHORTCUTS).map(([key, [text]]) => [key, text]), ...OTHERS];
  $("keys").replaceChildren(...keys.map(([key, text]) => make("div", {}, make("dt", {}, make("kbd", {}, key)), make("dd", {}, text))));
  addEventListener("keydown", press);
  $("help-open").addEventListener("click", () => $("help").showModal());
}
