// The query: one or several images, whole or in part.

import { known } from "./api.js";
import { $, baseName, button, make, nameOf, showError, textOf } from "./dom.js";
import { readState, searchFor } from "./state.js";

const MAX_QUERIES = 16;
const uploads = []; // {file, source}, by the number in the URL
let hasImages = true;
let canCrop = true;

export const uploaded = (query) => query.upload === undefined || uploads[query.upload] !== undefined;
const sourceOf = (query) => (query.upload === undefined ? `items/${query.id}/image?size=512` : uploads[query.upload].source);

function captionOf(query) {
  if (query.upload !== undefined) return [uploads[query.upload].file.name || "Pasted image", ""];
  const item = known(query.id);
  return item ? [nameOf(item), item.label === null ? "" : baseName(item.file)] : [`Image ${query.id}`, ""];
}

/** Set the fields of a request: uploads come first. */
export function setQueries(form, queries) {
  const ordered = [...queries.filter((query) => query.upload !== undefined), ...queries.filter((query) => query.upload === undefined)];
  for (const query of ordered) {
    if (query.upload === undefined) form.append("id", query.id);
    else form.append("image", uploads[query.upload].file);
    form.append("box", query.box?.join(",") ?? "");
  }
}

/** Show the query images, with buttons to crop and remove them. */
export function showQueries(queries) {
  $("invite").hidden = queries.length > 0;
  $("queries").hidden = !queries.length;
  $("drop").classList.toggle("filled", queries.length > 0);
  $("combine-field").hidden = queries.length < 2;
  $("queries").classList.toggle("several", queries.length > 1);
  $("queries").replaceChildren(...queries.map((query, number) => {
    const [caption] = captionOf(query);
    const frame = make("span", { className: "frame" });
    const actions = make("div", { className: "actions" });
    if (hasImages) {
      const image = make("img", { src: sourceOf(query), alt: `Query: ${caption}` });
      image.addEventListener("error", () => frame.replaceChildren(make("span", { className: "text" }, "not readable")));
      frame.append(image, ...(query.box ? [boxElement(query.box)] : []));
      if (canCrop) actions.append(button("Crop", () => crop(query, (box) => searchFor(queries.with(number, { ...query, box }))), { "aria-label": `Search for a part of ${caption}` }));
    } else frame.append(make("span", { className: "text" }, known(query.id) ? textOf(known(query.id)) : caption));
    const others = queries.filter((_, other) => other !== number);
    actions.append(button("Remove", () => searchFor(others), { "aria-label": `Remove ${caption} from the query` }));
    return make("li", {}, frame, actions);
  }));
  const [caption, more] = queries.length === 1 ? captionOf(queries[0]) : [queries.length ? `${queries.length} images` : "", ""];
  $("query-caption").replaceChildren(caption, ...(more ? [make("span", {}, more)] : []));
}

/** Add images of the gallery to the query. */
export function addToQuery(ids) {
  const { queries } = readState();
  const fresh = ids.filter((id) => !queries.some((query) => query.id === id));
  if (queries.length + fresh.length > MAX_QUERIES) showError(`A query can have up to ${MAX_QUERIES} images.`);
  else searchFor([...queries, ...fresh.map((id) => ({ id }))]);
}

// Uploads

/** Search for image files; keep the previous query images if asked. */
function searchFiles(files, gallery, keep = false) {
  showError("");
  if (!gallery.searches_images) return showError("This gallery contains vectors, so a query cannot be an image. Choose an item of the gallery.");
  const queries = keep ? readState().queries : [];
  for (const file of files) {
    if (!file.type.startsWith("image/")) return showError(`${file.name || "The dropped file"} is not an image.`);
    if (file.size > gallery.limits.bytes) return showError(`${file.name || "The image"} is too large: the limit is ${Math.round(gallery.limits.bytes / 1e6)} MB.`);
    uploads.push({ file, source: URL.createObjectURL(file) });
    queries.push({ upload: uploads.length - 1 });
  }
  if (queries.length > MAX_QUERIES) return showError(`A query can have up to ${MAX_QUERIES} images.`);
  if (queries.length) searchFor(queries);
}

/** Listen for images that are dropped, pasted or chosen. */
export function listenForImages(gallery) {
  hasImages = gallery.has_images;
  canCrop = gallery.searches_images;
  const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  let depth = 0;
  addEventListener("dragenter", (event) => {
    if (!hasFiles(event)) return;
    depth += 1;
    $("overlay").hidden = false;
  });
  addEventListener("dragleave", (event) => {
    if (!hasFiles(event)) return;
    depth = Math.max(0, depth - 1);
    if (!depth) $("overlay").hidden = true;
  });
  addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
  addEventListener("drop", (event) => {
    depth = 0;
    $("overlay").hidden = true;
    const files = [...(event.dataTransfer?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    searchFiles(files, gallery);
  });
  addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])].filter((one) => one.type.startsWith("image/"));
    if (files.length) {
      event.preventDefault();
      searchFiles(files, gallery);
    } else if (!["INPUT", "TEXTAREA"].includes(document.activeElement?.tagName)) {
      showError("The clipboard contains no image.");
    }
  });
  for (const [id, keep] of [["file", false], ["more-files", true]]) {
    $(id).addEventListener("change", () => {
      searchFiles([...$(id).files], gallery, keep);
      $(id).value = "";
    });
  }
}

// Cropping

function place(element, [left, top, right, bottom]) {
  const sides = { left, top, width: right - left, height: bottom - top };
  for (const [name, value] of Object.entries(sides)) element.style[name] = `${100 * value}%`;
  return element;
}

const boxElement = (box) => place(make("i", { className: "crop" }), box);
const clamp = (value, low = 0, high = 1) => Math.max(low, Math.min(high, value));

/** Choose a rectangle of a query image in a dialog: drag, or use the arrow keys. */
function crop(query, search) {
  let box = query.box ?? [0.25, 0.25, 0.75, 0.75];
  let from = null;
  const frame = $("crop-frame");
  const rectangle = $("crop-box");
  const at = (event) => {
    const { left, top, width, height } = frame.getBoundingClientRect();
    return [clamp((event.clientX - left) / width), clamp((event.clientY - top) / height)];
  };
  const show = () => place(rectangle, box);
  $("crop-image").src = sourceOf(query);
  frame.onpointerdown = (event) => {
    event.preventDefault();
    frame.setPointerCapture(event.pointerId);
    from = at(event);
  };
  frame.onpointermove = (event) => {
    if (!from) return;
    const [x, y] = at(event);
    box = [Math.min(x, from[0]), Math.min(y, from[1]), Math.max(x, from[0]), Math.max(y, from[1])];
    show();
  };
  frame.onpointerup = () => {
    from = null;
    if (box[2] - box[0] < 0.02 || box[3] - box[1] < 0.02) box = [0.25, 0.25, 0.75, 0.75]; // a click
    show();
  };
  frame.onkeydown = (event) => {
    const [x, y] = { ArrowLeft: [-0.02, 0], ArrowRight: [0.02, 0], ArrowUp: [0, -0.02], ArrowDown: [0, 0.02] }[event.key] ?? [0, 0];
    if (!x && !y) return;
    event.preventDefault();
    const [left, top, right, bottom] = box;
    if (event.shiftKey) box = [left, top, clamp(right + x, left + 0.04), clamp(bottom + y, top + 0.04)];
    else {
      const [dx, dy] = [clamp(x, -left, 1 - right), clamp(y, -top, 1 - bottom)];
      box = [left + dx, top + dy, right + dx, bottom + dy];
    }
    show();
  };
  $("crop-search").onclick = () => {
    $("crop").close();
    search(box);
  };
  $("crop-whole").onclick = () => {
    $("crop").close();
    search(undefined);
  };
  show();
  $("crop").showModal();
  frame.focus();
}
