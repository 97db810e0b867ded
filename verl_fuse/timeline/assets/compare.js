"use strict";
// One cursor over all curves: the step under the pointer is marked in each, with the values of both runs. By time, a
// point stands where the steps up to it had taken so many seconds, in each run by its own.
const byTime = document.getElementById("by-time");
const drawings = [...document.querySelectorAll("svg.curve")].map((svg) => ({
  svg,
  left: Number(svg.dataset.left),
  right: Number(svg.dataset.right),
  readout: svg.parentElement.querySelector("output"),
  ends: [...svg.querySelectorAll(".end")],
  points: [...svg.querySelectorAll("circle")].map((circle) => ({
    circle,
    run: circle.getAttribute("class"),
    step: Number(circle.dataset.step),
    seconds: Number(circle.dataset.seconds),
    said: circle.textContent.split(": ").pop(),
  })),
}));

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
    const corners = own.map(({ x, circle }) => `${x.toFixed(1)},${circle.getAttribute("cy")}`);
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
      const line = document.createElementNS(svg.namespaceURI, "line");
      line.setAttribute("class", "cursor");
      for (const [name, value] of [["x1", point.x], ["x2", point.x], ["y1", 0], ["y2", "100%"]]) {
        line.setAttribute(name, value);
      }
      svg.append(line);
      words.push(`${point.run} ${point.said} after ${duration(point.seconds)}`);
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
