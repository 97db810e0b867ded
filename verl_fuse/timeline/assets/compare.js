"use strict";
// Draws the curves, and one cursor over them all: the step under the pointer is marked in each, with the values of both
// runs. By time, a point stands where the steps up to it had taken so many seconds, in each run by its own.
const byTime = document.getElementById("by-time");
const pairs = (text) => text.split(",").map((pair) => pair.split(" ").map(Number));
const drawings = [...document.querySelectorAll("svg.curve")].map((svg) => {
  const points = [...svg.querySelectorAll("polyline")].flatMap((line) => {
    const run = line.getAttribute("class"), elapsed = new Map(pairs(document.getElementById("curves").dataset[run]));
    return pairs(line.dataset.values).map(([step, value]) => ({ run, step, value, seconds: elapsed.get(step) }));
  });
  const [left, right, top, bottom] = svg.dataset.sides.split(" ").map(Number);
  const values = points.map((point) => point.value), low = Math.min(...values), high = Math.max(...values);
  for (const point of points) {
    point.y = bottom - (high > low ? (point.value - low) / (high - low) : 0.5) * (bottom - top);
    point.circle = add(svg, "circle", { class: point.run, cy: point.y.toFixed(1), r: 2.4, "data-step": point.step });
  }
  const ends = [...svg.querySelectorAll(".end")], readout = svg.parentElement.querySelector("output");
  return { svg, left, right, points, ends, readout };
});

function add(svg, name, attributes) {
  const part = document.createElementNS(svg.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) part.setAttribute(key, value);
  return svg.appendChild(part);
}

function duration(seconds) {
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  return seconds < 7200 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(2)} h`;
}

function place(drawing) {
  const at = byTime.checked ? "seconds" : "step", values = drawing.points.map((point) => point[at]);
  const low = byTime.checked ? 0 : Math.min(...values), high = Math.max(...values);
  for (const point of drawing.points) {
    const share = high > low ? (point[at] - low) / (high - low) : 0.5;
    point.x = drawing.left + share * (drawing.right - drawing.left);
    point.circle.setAttribute("cx", point.x.toFixed(1));
  }
  for (const line of drawing.svg.querySelectorAll("polyline")) {
    const own = drawing.points.filter((point) => point.run === line.getAttribute("class"));
    const corners = own.map(({ x, y }) => `${x.toFixed(1)},${y.toFixed(1)}`);
    line.setAttribute("points", corners.join(" "));
  }
  const [first, last] = [drawing.ends[0], drawing.ends[drawing.ends.length - 1]];
  last.textContent = byTime.checked ? duration(high) : high;
  if (first !== last) first.textContent = byTime.checked ? "0 s" : low;
  last.setAttribute("text-anchor", byTime.checked ? "end" : "middle");
}

function clear() {
  for (const line of document.querySelectorAll(".cursor")) line.remove();
  for (const { readout } of drawings) readout.textContent = "";
}

function mark(step) {
  clear();
  for (const { svg, points, readout } of drawings) {
    const here = points.filter((point) => point.step === step), words = [];
    for (const point of here) {
      add(svg, "line", { class: "cursor", x1: point.x, x2: point.x, y1: 0, y2: "100%" });
      words.push(`${point.run} ${Number(point.value.toPrecision(4))} after ${duration(point.seconds)}`);
    }
    readout.textContent = here.length ? `step ${step}: ${words.join(", ")}` : "";
  }
}

for (const drawing of drawings) {
  place(drawing);
  for (const name of ["pointermove", "pointerdown"]) drawing.svg.addEventListener(name, (event) => {
    const x = new DOMPoint(event.clientX, 0).matrixTransform(drawing.svg.getScreenCTM().inverse()).x;
    mark(drawing.points.reduce((best, point) => (Math.abs(point.x - x) < Math.abs(best.x - x) ? point : best)).step);
  });
  drawing.svg.addEventListener("pointerleave", clear);
}
if (byTime) byTime.addEventListener("change", () => { clear(); drawings.forEach(place); });
