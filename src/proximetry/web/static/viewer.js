// An image in large, with its metadata; and why it is similar to the query.

import { findItems, request } from "./api.js";
import { $, copyText, largePicture, make, nameOf, percent, showError } from "./dom.js";
import { changeClass, confirmClass, describeMarks, select, selected, tag } from "./marks.js";
import { addToQuery, setQueries } from "./query.js";
import { explains, match, measure, score } from "./results.js";
import { asId, readState, replace, searchFor } from "./state.js";

let shown = null; // the item
let explained = null;

/** The item that is open, if any. */
export const openItem = () => ($("viewer").open ? shown : null);

/** The ids around the open image: those of its grid. */
function siblings() {
  const grids = document.querySelectorAll("section:not([hidden]) .grid");
  for (const grid of grids) {
    const ids = [...grid.querySelectorAll("li[data-id]:not([hidden])")].map((entry) => asId(entry.dataset.id));
    if (ids.includes(shown.id)) return ids;
  }
  return [shown.id];
}

/** Show the next image of the grid, or the previous one. */
export function step(offset) {
  const ids = siblings();
  const next = ids[ids.indexOf(shown.id) + offset];
  if (next === undefined) return;
  replace({ image: next });
  showImage(next);
}

/** Open an image; null closes the viewer. */
export async function showImage(id) {
  if (id === null) {
    if ($("viewer").open) $("viewer").close();
    return;
  }
  const [item] = await findItems([id]).catch((error) => [showError(error.message)]);
  if (readState().image !== id) return;
  if (!item) {
    replace({ image: null });
    showError(`The gallery has no image ${id}.`);
    return;
  }
  shown = item;
  const result = match(id);
  $("viewer-title").textContent = result ? `${result.rank}. ${nameOf(item)}` : nameOf(item);
  $("viewer-picture").replaceChildren(largePicture(item));
  const probability = result?.probability ?? null;
  const facts = {
    Class: item.label,
    [measure() === "similarity" ? "Similarity" : "Distance"]: result && score(result.similarity),
    "Probability of the same class": probability === null ? null : percent(probability),
    ...item.details,
    Id: item.id,
  };
  $("viewer-facts").replaceChildren(...Object.entries(facts).filter(([, value]) => value !== null && value !== undefined)
    .map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))));
  $("viewer-file").textContent = item.file;
  $("viewer-marks").dataset.marks = item.id;
  $("viewer-marks").replaceChildren(...describeMarks(item));
  $("viewer-why").hidden = !explains(id);
  $("viewer-add").hidden = !readState().queries.length;
  $("viewer-confirm").hidden = item.label === null;
  $("viewer-select").setAttribute("aria-pressed", String(selected.has(id)));
  const ids = siblings();
  $("viewer-previous").disabled = ids[0] === id;
  $("viewer-next").disabled = ids.at(-1) === id;
  if (!$("viewer").open) $("viewer").showModal();
}

/** Show which regions make a result similar to the query. */
export async function explain(item) {
  const form = new FormData();
  form.set("result", item.id);
  setQueries(form, readState().queries);
  const label = item.label === null ? "" : `, ${item.label}`;
  $("why-title").textContent = `Why rank ${match(item.id).rank}${label}?`;
  $("why-about").textContent = "computing \u2026";
  $("why-image").hidden = true;
  $("why").showModal();
  explained = item;
  try {
    const image = await request("explain", { method: "POST", body: form });
    if (explained !== item) return;
    URL.revokeObjectURL($("why-image").src);
    $("why-image").src = URL.createObjectURL(image);
    $("why-image").alt = `The query and the result, similarity ${score(match(item.id).similarity)}, with the regions that contribute most`;
    $("why-image").hidden = false;
    $("why-about").textContent = "Yellow to red regions add to the similarity, blue ones reduce it. Equal numbers match.";
  } catch (error) {
    if (explained === item) $("why-about").textContent = error.message;
  }
}

/** Connect the buttons. */
export function listenForViewer() {
  const act = (id, action) => $(id).addEventListener("click", () => action(shown));
  act("viewer-similar", ({ id }) => searchFor([{ id }]));
  act("viewer-add", ({ id }) => addToQuery([id]));
  act("viewer-why", explain);
  act("viewer-copy", ({ file }) => copyText(file, "Copied the path."));
  act("viewer-tag", ({ id }) => tag([id]));
  act("viewer-confirm", ({ id }) => confirmClass([id]));
  act("viewer-change", ({ id, label }) => changeClass([id], label ?? ""));
  act("viewer-select", ({ id }) => {
    select([id], !selected.has(id));
    $("viewer-select").setAttribute("aria-pressed", String(selected.has(id)));
  });
  $("viewer-previous").addEventListener("click", () => step(-1));
  $("viewer-next").addEventListener("click", () => step(1));
  $("viewer").addEventListener("close", () => {
    if (readState().image === null) return;
    replace({ image: null });
    document.querySelector(`section:not([hidden]) li[data-id="${shown.id}"] .card`)?.focus();
  });
  for (const close of document.querySelectorAll("dialog .close")) close.addEventListener("click", () => close.closest("dialog").close());
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); }); // the backdrop
  }
}
