"use strict";
// The map: hovering over a point or choosing a class shows it. Without scripts, points have titles.
for (const map of document.querySelectorAll(".map")) {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  const preview = document.createElement("i");
  const name = document.createElement("span");
  tip.append(preview, name);
  map.append(tip);
  const groups = [...map.querySelectorAll("g[data-class]")];
  for (const title of map.querySelectorAll("g > title")) title.remove(); // the tip shows it
  const source = map.querySelector("img.sprite");
  const columns = Number(map.dataset.columns);
  if (source) {
    preview.style.backgroundImage = `url(${source.src})`;
    preview.style.backgroundSize = `${columns * 96}px auto`;
  } else preview.remove();
  const hide = () => { tip.hidden = true; };
  const show = (event) => {
    const point = event.target.closest("circle");
    if (!point) return hide();
    name.textContent = point.parentNode.dataset.class;
    const number = Number(point.dataset.i);
    preview.style.backgroundPosition =
      `-${(number % columns) * 96}px -${Math.floor(number / columns) * 96}px`;
    tip.hidden = false;
    const box = map.getBoundingClientRect(), at = point.getBoundingClientRect();
    const left = at.left - box.left + 14, top = at.top - box.top + 14;
    tip.style.left = `${Math.max(0, Math.min(left, box.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(0, Math.min(top, box.height - tip.offsetHeight - 4))}px`;
  };
  const filterClasses = (text) => {
    const word = text.trim().toLowerCase();
    let count = 0;
    for (const group of groups) {
      const on = word !== "" && group.dataset.class.toLowerCase().includes(word);
      group.classList.toggle("on", on);
      if (on) count += 1;
    }
    map.classList.toggle("filtered", word !== "");
    const status = document.getElementById(map.dataset.count);
    if (status) status.textContent = word === "" ? "" : `${count} classes`;
  };
  const field = document.getElementById(map.dataset.field);
  if (field) {
    field.closest(".filter").hidden = false;
    field.addEventListener("input", () => filterClasses(field.value));
  }
  map.addEventListener("pointerover", show);
  map.addEventListener("pointerleave", hide);
  map.addEventListener("click", (event) => {
    show(event);
    const point = event.target.closest("circle");
    const clicked = point ? point.parentNode.dataset.class : "";
    if (field) field.value = field.value === clicked ? "" : clicked;
    filterClasses(field ? field.value : clicked);
  });
}
// Filter the rows of a table by the text of its field.
for (const field of document.querySelectorAll("input[data-rows]")) {
  field.closest(".filter").hidden = false;
  const rows = [...document.querySelectorAll(`#${field.dataset.rows} tbody tr`)];
  field.addEventListener("input", () => {
    const word = field.value.trim().toLowerCase();
    for (const row of rows) row.hidden = !row.cells[0].textContent.toLowerCase().includes(word);
  });
}
