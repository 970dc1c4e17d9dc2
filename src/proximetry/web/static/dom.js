// Elements and text.

export const $ = (id) => document.getElementById(id);

/** Create an element; set properties, append children. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("aria-") || ["for", "list", "role"].includes(name)) element.setAttribute(name, value);
    else if (name === "data") Object.assign(element.dataset, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** Create a button; stop its clicks from reaching elements around it. */
export function button(text, action, properties = {}) {
  const element = make("button", { type: "button", ...properties }, text);
  element.addEventListener("click", (event) => {
    event.stopPropagation();
    action(event);
  });
  return element;
}

export const formatCount = (number) => String(number).replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");
export const pluralize = (number, one, many) => `${formatCount(number)} ${number === 1 ? one : many}`;
export const percent = (probability) => (probability < 0.01 ? "< 1 %" : `${Math.round(100 * probability)} %`);
export const baseName = (file) => file.split("/").at(-1);

export function asSentence(text) {
  return text[0].toUpperCase() + text.slice(1) + (/[.?!]$/.test(text) ? "" : ".");
}

/** Report to screen readers. */
export function announce(text) {
  $("status").textContent = text;
}

/** Show a short message at the bottom, above dialogs. */
export function notify(text) {
  const toast = $("toast");
  toast.textContent = text;
  toast.hidePopover();
  toast.showPopover();
  clearTimeout(notify.timer);
  notify.timer = setTimeout(() => toast.hidePopover(), 4000);
}

export function showError(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
  if (text) announce(text);
}

/** Return the parts of a text between which a line may break: after _ . - and /. */
export const breakable = (text) => text.split(/(?<=[_./-])/).flatMap((part, number) => (number ? [make("wbr"), part] : [part]));

/** Name an item: its class, else its file. */
export function nameOf(item) {
  if (item.label !== null) return String(item.label);
  return item.file ? baseName(item.file) : `Item ${item.id}`;
}

/** Describe an item without an image: its longest text, else its name. */
export function textOf(item) {
  const texts = Object.values(item.details ?? {}).filter((value) => typeof value === "string");
  return texts.sort((a, b) => b.length - a.length)[0] || nameOf(item);
}

/** Create an image; show a text if there is none, or it is not readable. */
function picture(item, size, properties) {
  if (!item.image) return make("span", { className: "text" }, textOf(item));
  const image = make("img", { ...properties, src: `${item.image}?size=${size}` });
  image.addEventListener("error", () => image.replaceWith(make("span", { className: "text" }, "not readable")));
  image.addEventListener("load", () => image.classList.toggle("tiny", image.naturalWidth <= 64));
  return image;
}

export const thumbnail = (item, size) => make("span", { className: "thumbnail" }, picture(item, size, { alt: "", loading: "lazy", decoding: "async" }));
export const largePicture = (item) => picture(item, 1280, { alt: nameOf(item) });

/** Copy text; plain HTTP has no clipboard API. */
export async function copyText(text, message) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else {
    const area = make("textarea", { value: text, className: "visually-hidden" });
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  notify(message);
}

/** Save text as a file. */
export function download(name, text, type = "text/plain") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Format rows of values as CSV. */
export function toCsv(rows) {
  const quote = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
  return rows.map((row) => row.map((value) => quote(String(value ?? ""))).join(",")).join("\n") + "\n";
}

/** Ask for a text in a dialog; return null if it is closed. */
export function ask(title, { value = "", list = "", submit = "OK" } = {}) {
  const dialog = $("ask");
  $("ask-title").textContent = title;
  $("ask-submit").textContent = submit;
  $("ask-input").value = value;
  if (list) $("ask-input").setAttribute("list", list);
  else $("ask-input").removeAttribute("list");
  dialog.returnValue = "";
  dialog.showModal();
  $("ask-input").select();
  return new Promise((resolve) => {
    const form = $("ask-form");
    form.onsubmit = (event) => {
      event.preventDefault();
      if ($("ask-input").value.trim()) dialog.close("ok");
    };
    dialog.onclose = () => resolve(dialog.returnValue === "ok" ? $("ask-input").value.trim() : null);
  });
}
