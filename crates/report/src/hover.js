"use strict";
// Shows the values under the pointer, and the same place in every other chart. Nothing on the page depends on it.
const charts = [...document.querySelectorAll(".chart")].map((figure) => {
  const numbers = (text) => (text ? text.split(",") : []);
  const area = figure.querySelector(".area");
  const cross = document.createElement("div");
  const tip = document.createElement("div");
  cross.className = "cross";
  tip.className = "tip";
  cross.hidden = tip.hidden = true;
  area.append(cross, tip);
  const curves = [...figure.querySelectorAll("path[data-x]")].map((path) => ({
    name: path.dataset.name,
    classes: path.getAttribute("class"),
    x: numbers(path.dataset.x).map(Number),
    y: numbers(path.dataset.y),
  }));
  return { area, cross, tip, curves, low: +figure.dataset.x0, high: +figure.dataset.x1, unit: figure.dataset.xname, tokens: +figure.dataset.tokens };
});

function nearest(values, x) {
  let low = 0;
  let high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < x) low = middle;
    else high = middle;
  }
  return Math.abs(values[low] - x) <= Math.abs(values[high] - x) ? low : high;
}

function show(chart, x) {
  for (const other of charts) {
    other.cross.hidden = false;
    other.cross.style.left = (100 * (x - other.low)) / (other.high - other.low) + "%";
    other.tip.hidden = other !== chart;
  }
  const row = (curve) => {
    const line = document.createElement("div");
    const key = document.createElement("i");
    const value = document.createElement("b");
    key.className = "key " + curve.classes;
    const at = nearest(curve.x, x);
    value.textContent = curve.y[at];
    line.append(value, key, curve.name);
    if (curve.x[at] !== x) {
      const where = document.createElement("small");
      where.textContent = " at " + Math.round(curve.x[at]).toLocaleString("en");
      line.append(where);
    }
    return line;
  };
  const place = document.createElement("div");
  const count = (value) => Math.round(value).toLocaleString("en");
  place.textContent = chart.unit + " " + count(x) + (chart.tokens ? ", " + count(x * chart.tokens) + " tokens" : "");
  chart.tip.replaceChildren(place, ...chart.curves.filter((curve) => curve.x.length).map(row));
  const right = x - chart.low > (chart.high - chart.low) / 2;
  chart.tip.style.left = right ? "auto" : "calc(" + chart.cross.style.left + " + .7rem)";
  chart.tip.style.right = right ? "calc(100% - " + chart.cross.style.left + " + .7rem)" : "auto";
}

for (const chart of charts) {
  chart.area.addEventListener("pointermove", (event) => {
    const box = chart.area.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const x = chart.low + share * (chart.high - chart.low);
    // The pointer takes the place of the nearest report of the finest curve.
    const finest = chart.curves.reduce((a, b) => (b.x.length > a.x.length ? b : a), { x: [] });
    show(chart, finest.x.length ? finest.x[nearest(finest.x, x)] : x);
  });
  chart.area.addEventListener("pointerleave", () => {
    for (const other of charts) other.cross.hidden = other.tip.hidden = true;
  });
}
