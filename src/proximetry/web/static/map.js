// The map: points on a canvas with pan, zoom and selection.

import { findItems, request } from "./api.js";
import { $, announce, formatCount, make } from "./dom.js";
import { findClass } from "./filters.js";
import { select, selected } from "./marks.js";
import { card } from "./results.js";
import { go } from "./state.js";

const MAX_LISTED = 240;
const MAX_LEGEND = 14;
const HOVER_RADIUS = 14; // pixels from the pointer to a point

export class MapView {
  constructor({ isDark }) {
    this.isDark = isDark;
    this.data = null;
    this.hasImages = true;
    this.loading = false;
    this.marked = new Set();
    this.highlighted = -1;
    this.canvas = $("canvas");
    this.selects = false;
    this.pointers = new Map();
    this.listen();
  }

  /** Show the map; load it on the first call and after changes. */
  async show() {
    this.resize();
    if (this.loading) return;
    this.loading = true;
    try {
      for (;;) {
        const data = await request("map");
        if (data.state === "ready") {
          const first = this.data === null;
          this.setData(data);
          if (first) this.fit();
          if (!data.outdated || $("view-map").hidden) break;
        } else {
          this.showState(`Computing the map (${Math.round(data.seconds)} s). ${data.images > 5000 ? "This may take minutes. " : ""}You can already search.`);
          if ($("view-map").hidden) break;
        }
        await new Promise((resolve) => setTimeout(resolve, data.outdated ? 5000 : 1000));
      }
    } catch (error) {
      if (!this.data) this.showState(error.message, false);
    } finally {
      this.loading = false;
    }
  }

  showState(text, busy = true) {
    $("map-waiting").hidden = false;
    $("map-waiting").querySelector(".spinner").hidden = !busy;
    $("map-state").textContent = text;
  }

  setData(data) {
    $("map-waiting").hidden = true;
    this.data = data;
    const { ids, images, labels } = data;
    const sample = ids.length < images ? `a sample of ${formatCount(ids.length)} of ${formatCount(images)} images` : `${formatCount(images)} images`;
    this.sample = sample + (data.outdated ? ", updating \u2026" : "");
    this.canvas.setAttribute("aria-label", `Map of the gallery: ${sample}${labels.length ? ` in ${labels.length} classes` : ""}`);
    if (!ids.length) this.showState("No images yet.", false);
    this.colors = labels.map((_, number) => this.color(number));
    this.showLegend();
    this.announce();
    this.redraw();
  }

  announce() {
    $("map-about").textContent = (this.sample ?? "") + (this.marked.size ? " \u00b7 circled: latest results" : "");
  }

  color(number) {
    const dark = this.isDark();
    if (number < 0) return dark ? "#8a93a6" : "#7b8496";
    // The golden angle separates adjacent colors; lightness distinguishes more of them.
    const light = (dark ? 66 : 46) + [0, 9, -7][number % 3];
    return `hsl(${(number * 137.508 + 225) % 360} ${dark ? 62 : 58}% ${light}%)`;
  }

  showLegend() {
    const { labels } = this.data;
    const entries = labels.slice(0, MAX_LEGEND).map((name, number) => {
      const dot = make("i");
      dot.style.background = this.colors[number];
      const button = make("button", { type: "button", title: name, "aria-pressed": String(number === this.highlighted) }, dot, make("span", {}, name));
      button.addEventListener("click", () => this.highlight(number === this.highlighted ? -1 : number));
      return make("li", {}, button);
    });
    if (labels.length > MAX_LEGEND) entries.push(make("li", { className: "more" }, `and ${labels.length - MAX_LEGEND} more classes`));
    $("legend").replaceChildren(...entries);
  }

  highlight(number) {
    this.highlighted = number;
    const name = number < 0 ? "" : this.data.labels[number];
    if (document.activeElement !== $("highlight")) $("highlight").value = name;
    for (const [index, button] of [...$("legend").querySelectorAll("button")].entries()) button.setAttribute("aria-pressed", String(index === number));
    this.redraw();
  }

  /** Circle the latest results. */
  mark(ids) {
    this.marked = new Set(ids);
    this.announce();
    this.redraw();
  }

  // Drawing

  resize() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width || (width === this.width && height === this.height)) return;
    const ratio = devicePixelRatio || 1;
    const before = this.width;
    [this.width, this.height] = [width, height];
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    if (!before) this.fit();
    this.redraw();
  }

  fit() {
    if (!this.width) return;
    this.scale = 0.92 * Math.min(this.width, this.height);
    this.left = (this.width - this.scale) / 2;
    this.top = (this.height - this.scale) / 2;
    this.redraw();
  }

  position(number) {
    return [this.left + this.data.x[number] * this.scale, this.top + (1 - this.data.y[number]) * this.scale];
  }

  redraw() {
    if (this.drawing) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = 0;
      this.draw();
    });
  }

  draw() {
    if (!this.data || !this.width) return;
    if (this.dark !== this.isDark()) {
      this.dark = this.isDark();
      this.colors = this.data.labels.map((_, number) => this.color(number));
      this.showLegend();
    }
    const context = this.canvas.getContext("2d");
    const ratio = devicePixelRatio || 1;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    const { ids, label } = this.data;
    const zoom = this.scale / Math.min(this.width, this.height);
    const radius = Math.max(1.6, Math.min(7, (ids.length > 5000 ? 1.7 : ids.length > 800 ? 2.6 : 4) * Math.sqrt(zoom)));
    const rings = [];
    const chosen = [];
    const highlighted = [];
    const point = (number, x, y) => {
      context.fillStyle = label[number] < 0 ? this.color(-1) : this.colors[label[number]];
      context.beginPath();
      context.arc(x, y, radius, 0, 7);
      context.fill();
    };
    context.globalAlpha = this.highlighted < 0 ? 0.85 : 0.12;
    for (let number = 0; number < ids.length; number += 1) {
      const [x, y] = this.position(number);
      if (x < -9 || y < -9 || x > this.width + 9 || y > this.height + 9) continue;
      if (this.marked.has(ids[number])) rings.push([x, y]);
      if (selected.has(ids[number])) chosen.push([x, y]);
      if (label[number] === this.highlighted && this.highlighted >= 0) highlighted.push([number, x, y]);
      else point(number, x, y);
    }
    context.globalAlpha = 1;
    for (const [number, x, y] of highlighted) point(number, x, y);
    const circle = (points, color, width) => {
      context.strokeStyle = color;
      context.lineWidth = width;
      for (const [x, y] of points) {
        context.beginPath();
        context.arc(x, y, radius + 2.5, 0, 7);
        context.stroke();
      }
    };
    circle(rings, this.isDark() ? "#ffffffa0" : "#111111a0", 1.2);
    circle(chosen, this.isDark() ? "#8ea5ff" : "#3b5bdb", 2.4);
  }

  // Moving

  zoom(factor, x = this.width / 2, y = this.height / 2) {
    $("box").hidden = true;
    const maxScale = 400 * Math.min(this.width, this.height);
    const minScale = 0.3 * Math.min(this.width, this.height);
    const scale = Math.max(minScale, Math.min(maxScale, this.scale * factor));
    this.left = x - ((x - this.left) * scale) / this.scale;
    this.top = y - ((y - this.top) * scale) / this.scale;
    this.scale = scale;
    this.hover(-1);
    this.redraw();
  }

  move(x, y) {
    $("box").hidden = true;
    this.left += x;
    this.top += y;
    this.redraw();
  }

  at(event) {
    const frame = this.canvas.getBoundingClientRect();
    return [event.clientX - frame.left, event.clientY - frame.top];
  }

  nearest(x, y) {
    let best = -1;
    let nearest = HOVER_RADIUS * HOVER_RADIUS;
    for (let number = 0; number < (this.data?.ids.length ?? 0); number += 1) {
      if (this.highlighted >= 0 && this.data.label[number] !== this.highlighted) continue;
      const [px, py] = this.position(number);
      const distance = (px - x) ** 2 + (py - y) ** 2;
      if (distance < nearest) [best, nearest] = [number, distance];
    }
    return best;
  }

  hover(number) {
    $("plane").classList.toggle("over", number >= 0);
    if (number === this.hovered) return;
    this.hovered = number;
    const tip = $("tip");
    tip.hidden = number < 0;
    if (number < 0) return;
    const { ids, label, labels } = this.data;
    $("tip-image").hidden = !this.hasImages;
    if (this.hasImages) $("tip-image").src = `items/${ids[number]}/image?size=320`;
    $("tip-text").textContent = label[number] < 0 ? `Image ${ids[number]}` : labels[label[number]];
    const [x, y] = this.position(number);
    tip.style.left = `${x + 18 + 148 > this.width ? x - 18 - 148 : x + 18}px`;
    tip.style.top = `${Math.max(8, Math.min(this.height - 196, y - 90))}px`;
  }

  // Selecting

  within(left, top, right, bottom) {
    const inside = [];
    for (let number = 0; number < (this.data?.ids.length ?? 0); number += 1) {
      const [x, y] = this.position(number);
      if (x >= left && x <= right && y >= top && y <= bottom) inside.push(number);
    }
    return inside;
  }

  /** List images below the map. */
  async list(numbers, jump) {
    const ids = numbers.map((number) => this.data.ids[number]);
    const summary = `${ids.length} ${ids.length === 1 ? "image" : "images"}`;
    this.listed = ids;
    $("selection-heading").hidden = false;
    $("selection-title").textContent = ids.length > MAX_LISTED ? `${summary}, the first ${MAX_LISTED} are shown` : summary;
    const items = await findItems(ids.slice(0, MAX_LISTED));
    if (this.listed !== ids) return;
    $("selection").replaceChildren(...items.map((item) => card(item, { size: 160 })));
    announce(`${summary}.`);
    if (jump) {
      $("selection-heading").focus({ preventScroll: true });
      $("selection-heading").scrollIntoView({ block: "center" });
    }
  }

  clear() {
    this.listed = [];
    $("selection-heading").hidden = true;
    $("selection").replaceChildren();
    this.canvas.focus();
  }

  setMode(selects) {
    this.selects = selects;
    $("mode-move").setAttribute("aria-pressed", String(!selects));
    $("mode-select").setAttribute("aria-pressed", String(selects));
    $("plane").classList.toggle("selecting", selects);
  }

  listInView() {
    if (this.data) this.list(this.within(0, 0, this.width, this.height), true);
  }

  listen() {
    const { canvas } = this;
    $("mode-move").addEventListener("click", () => this.setMode(false));
    $("mode-select").addEventListener("click", () => this.setMode(true));
    $("zoom-in").addEventListener("click", () => this.zoom(1.5));
    $("zoom-out").addEventListener("click", () => this.zoom(1 / 1.5));
    $("zoom-all").addEventListener("click", () => this.fit());
    $("list-view").addEventListener("click", () => this.listInView());
    $("list-clear").addEventListener("click", () => this.clear());
    $("select-listed").addEventListener("click", () => select(this.listed));
    $("tip-image").addEventListener("error", () => { $("tip-image").hidden = true; });
    $("highlight").addEventListener("input", () => {
      if (this.data) this.highlight(this.data.labels.indexOf(findClass($("highlight").value)));
    });
    new ResizeObserver(() => this.resize()).observe(canvas);
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0016)), ...this.at(event));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.drag(event));
    canvas.addEventListener("pointerup", (event) => this.up(event));
    canvas.addEventListener("pointercancel", (event) => this.cancel(event));
    canvas.addEventListener("pointerleave", () => { if (!this.pointers.size) this.hover(-1); });
  }

  key(event) {
    const moves = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (moves[event.key]) this.move(...moves[event.key]);
    else if (event.key === "+" || event.key === "=") this.zoom(1.4);
    else if (event.key === "-") this.zoom(1 / 1.4);
    else if (event.key === "0") this.fit();
    else if (event.key === "Enter") this.listInView();
    else return;
    event.preventDefault();
  }

  down(event) {
    if (event.button) return;
    this.canvas.setPointerCapture(event.pointerId);
    const [x, y] = this.at(event);
    this.pointers.set(event.pointerId, [x, y]);
    this.moved = this.pointers.size > 1;
    this.from = this.pointers.size === 1 && (this.selects || event.shiftKey) ? [x, y] : null;
    $("box").hidden = true;
  }

  drag(event) {
    const [x, y] = this.at(event);
    const before = this.pointers.get(event.pointerId);
    if (!before) {
      this.hover(this.nearest(x, y));
      return;
    }
    if (Math.hypot(x - before[0], y - before[1]) < (this.moved ? 0 : 4)) return;
    this.moved = true;
    this.hover(-1);
    if (this.pointers.size === 2) {
      const [other] = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, spot]) => spot);
      const factor = Math.hypot(x - other[0], y - other[1]) / Math.max(1, Math.hypot(before[0] - other[0], before[1] - other[1]));
      this.zoom(factor, (x + other[0]) / 2, (y + other[1]) / 2);
      this.move((x - before[0]) / 2, (y - before[1]) / 2);
    } else if (this.from) {
      const box = $("box");
      box.hidden = false;
      box.style.left = `${Math.min(x, this.from[0])}px`;
      box.style.top = `${Math.min(y, this.from[1])}px`;
      box.style.width = `${Math.abs(x - this.from[0])}px`;
      box.style.height = `${Math.abs(y - this.from[1])}px`;
      return; // the first corner stays
    } else {
      $("plane").classList.add("dragging");
      this.move(x - before[0], y - before[1]);
    }
    this.pointers.set(event.pointerId, [x, y]);
  }

  up(event) {
    if (!this.pointers.has(event.pointerId)) return;
    const [x, y] = this.at(event);
    const number = this.nearest(x, y);
    if (this.from && this.moved) {
      const [left, right] = [Math.min(x, this.from[0]), Math.max(x, this.from[0])];
      const [top, bottom] = [Math.min(y, this.from[1]), Math.max(y, this.from[1])];
      const inside = this.within(left, top, right, bottom);
      select(inside.map((index) => this.data.ids[index]));
      this.list(inside, false);
    } else if (!this.moved && number >= 0) {
      // Touch screens cannot hover: the first touch shows the image, the second one opens it.
      if (event.pointerType === "touch" && this.hovered !== number) this.hover(number);
      else go({ image: this.data.ids[number] });
    } else if (!this.moved) this.hover(-1);
    this.cancel(event);
  }

  cancel(event) {
    this.pointers.delete(event.pointerId);
    $("plane").classList.remove("dragging");
    if (!this.pointers.size) this.from = null;
  }
}
