"use strict";
// Shows the values at the pointer, and the same place in every other chart; arrow keys move the place. Nothing
// else on the page depends on it.
const MOST_ROWS = 16;
const charts = [...document.querySelectorAll(".chart")].map((figure) => {
  const numbers = (text) => (text ? text.split(",") : []);
  const area = figure.querySelector(".area");
  const cross = document.createElement("div");
  const tip = document.createElement("div");
  cross.className = "cross";
  tip.className = "tip";
  cross.hidden = tip.hidden = true;
  tip.setAttribute("role", "status");
  area.append(cross, tip);
  area.tabIndex = 0;
  const curves = [...figure.querySelectorAll("path[data-x]")].map((path) => ({
    name: path.dataset.name,
    classes: path.getAttribute("class"),
    x: numbers(path.dataset.x).map(Number),
    y: numbers(path.dataset.y),
  }));
  // Its points are the places that the pointer can take.
  const finest = curves.reduce((a, b) => (b.x.length > a.x.length ? b : a), { x: [] });
  const { x0, x1, xname, suffix, tokens } = figure.dataset;
  return { area, cross, tip, curves, finest, low: +x0, high: +x1, unit: xname, suffix, tokens: +tokens, at: null };
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

const count = (value) => Math.round(value).toLocaleString("en");

function element(name, className, text) {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

function show(chart, x) {
  for (const other of charts) {
    other.cross.hidden = false;
    other.cross.style.left = (100 * (x - other.low)) / (other.high - other.low) + "%";
    other.tip.hidden = other !== chart;
  }
  const row = (curve) => {
    const at = nearest(curve.x, x);
    const line = element("div", "row", "");
    const name = element("span", "", curve.name);
    if (curve.x[at] !== x) name.append(element("small", "", " at " + count(curve.x[at])));
    line.append(element("i", "key " + curve.classes, ""), name, element("b", "", curve.y[at] + chart.suffix));
    return line;
  };
  const tokens = chart.tokens ? ", " + count(x * chart.tokens) + " tokens" : "";
  const rows = chart.curves.filter((curve) => curve.x.length).map(row);
  const more = rows.splice(MOST_ROWS).length;
  if (more) rows.push(element("small", "", "and " + more + " more"));
  chart.tip.replaceChildren(element("div", "place", chart.unit + " " + count(x) + tokens), ...rows);
  const right = x - chart.low > (chart.high - chart.low) / 2;
  chart.tip.style.left = right ? "auto" : "calc(" + chart.cross.style.left + " + .7rem)";
  chart.tip.style.right = right ? "calc(100% - " + chart.cross.style.left + " + .7rem)" : "auto";
}

function hide() {
  for (const other of charts) other.cross.hidden = other.tip.hidden = true;
}

for (const chart of charts) {
  const places = chart.finest.x;
  const point = (event) => {
    if (!places.length) return;
    const box = chart.area.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    chart.at = nearest(places, chart.low + share * (chart.high - chart.low));
    show(chart, places[chart.at]);
  };
  chart.area.addEventListener("pointermove", point);
  chart.area.addEventListener("pointerdown", point);
  // A finger that is lifted leaves the values there to read.
  chart.area.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide());
  chart.area.addEventListener("blur", hide);
  chart.area.addEventListener("keydown", (event) => {
    const far = Math.max(1, Math.round(places.length / 20));
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -far, PageDown: far, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") hide();
    if (by === undefined || !places.length) return;
    event.preventDefault();
    chart.at = Math.min(places.length - 1, Math.max(0, (chart.at ?? -1) + by));
    show(chart, places[chart.at]);
  });
}
