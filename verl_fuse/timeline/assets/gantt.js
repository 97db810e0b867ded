"use strict";
// One canvas as large as the visible part of the chart, redrawn on scroll, so that hundreds of tracks cost no more than the visible ones.
const { seconds, colours, tracks } = JSON.parse(document.getElementById("data").textContent);
const [chart, space, canvas, tip] = ["chart", "space", "canvas", "tip"].map((id) => document.getElementById(id));
const context = canvas.getContext("2d");
const LABELS = 96, AXIS = 26, GAP = 6, RIGHT = 14, FONT = "12px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif";
const NAME = 0, CATEGORY = 1, COLOUR = 2, START = 3, END = 4, ROW = 5, ARGUMENTS = 6;

const ofRole = {};
for (const track of tracks) ofRole[track.role] = (ofRole[track.role] || 0) + 1;
let bottom = AXIS + GAP;
for (const track of tracks) {
  const most = ofRole[track.role] <= 4 ? 132 : ofRole[track.role] <= 16 ? 64 : 30;
  const single = track.role === "step" ? 24 : 18;
  track.height = track.rows === 1 ? single : Math.min(most, Math.max(single, track.rows * 9));
  track.top = bottom;
  bottom += track.height + (track.rows > 1 && track.height > 30 ? GAP + 2 : GAP);
}
let first = 0, last = seconds;
for (const track of tracks) for (const span of track.spans) { first = Math.min(first, span[START]); last = Math.max(last, span[END]); }
if (last === first) last = first + 1;
const whole = [first, last];
let view = whole, width = 0, height = 0, drag = null, hover = null;

const x = (time) => LABELS + ((time - view[0]) / (view[1] - view[0])) * (width - LABELS - RIGHT);
const timeAt = (pixel) => view[0] + ((Math.min(Math.max(pixel, LABELS), width - RIGHT) - LABELS) / (width - LABELS - RIGHT)) * (view[1] - view[0]);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function ticks() {
  const about = (view[1] - view[0]) / Math.max(2, (width - LABELS) / 110);
  const power = 10 ** Math.floor(Math.log10(about));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= about);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const found = [];
  for (let index = Math.ceil(view[0] / step - 1e-9); index * step <= view[1] + 1e-9; index++) found.push([index * step, (index * step).toFixed(digits) + " s"]);
  return found;
}

function clipped(text, room) {
  if (context.measureText(text).width <= room) return text;
  let length = text.length;
  while (length > 1 && context.measureText(text.slice(0, length) + "…").width > room) length--;
  return length > 2 ? text.slice(0, length) + "…" : "";
}

function drawTrack(track, index, offset, ink) {
  const top = track.top - offset, rowHeight = track.height / track.rows, gap = rowHeight >= 4 ? 1 : 0;
  context.fillStyle = css(index % 2 ? "--window" : "--stripe");
  context.fillRect(LABELS, top - 2, width - LABELS - RIGHT, track.height + 4);
  context.fillStyle = ink;
  context.fillText(clipped(track.name, LABELS - 12), 2, top + Math.min(track.height / 2, 16));
  for (const span of track.spans) {
    if (span[END] < view[0] || span[START] > view[1]) continue;
    const left = Math.max(x(span[START]), LABELS), right = Math.min(x(span[END]), width - RIGHT);
    const wide = Math.max(right - left - (right - left > 3 ? 0.75 : 0), 0.75);
    context.fillStyle = colours[span[COLOUR]];
    context.fillRect(left, top + span[ROW] * rowHeight, wide, rowHeight - gap);
    if (rowHeight >= 16 && wide > 24) {
      const label = clipped(span[NAME], wide - 8);
      context.fillStyle = span[COLOUR] === "wait" ? "#1c2430" : "#fff";
      if (label) context.fillText(label, left + 4, top + span[ROW] * rowHeight + rowHeight / 2);
    }
  }
}

function draw() {
  const ratio = window.devicePixelRatio || 1, offset = chart.scrollTop, ink = css("--ink"), soft = css("--soft"), line = css("--line");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = FONT;
  context.textBaseline = "middle";
  const marks = ticks();
  tracks.forEach((track, index) => {
    if (track.top + track.height >= offset && track.top <= offset + height) drawTrack(track, index, offset, ink);
  });
  context.fillStyle = css("--card");
  context.fillRect(0, 0, width, AXIS);
  context.strokeStyle = line;
  context.textAlign = "center";
  for (const [time, label] of marks) {
    context.globalAlpha = 0.8;
    context.beginPath(); context.moveTo(x(time), AXIS - 5); context.lineTo(x(time), height); context.stroke();
    context.globalAlpha = 1;
    context.fillStyle = soft;
    context.fillText(label, Math.min(x(time), width - 20), AXIS / 2);
  }
  context.textAlign = "left";
  context.strokeStyle = soft;
  for (const edge of [0, seconds]) if (edge >= view[0] && edge <= view[1]) {
    context.beginPath(); context.moveTo(x(edge), AXIS - 4); context.lineTo(x(edge), height); context.stroke();
  }
  if (drag) {
    context.fillStyle = "#4a90d955";
    context.fillRect(Math.min(drag.from, drag.to), AXIS, Math.abs(drag.to - drag.from), height);
  } else if (hover && hover.x > LABELS && hover.x < width - RIGHT) {
    context.beginPath(); context.moveTo(hover.x, AXIS); context.lineTo(hover.x, height); context.stroke();
  }
}

function resize() {
  width = chart.clientWidth;
  height = Math.min(bottom, Math.round(window.innerHeight * 0.8));
  space.style.height = bottom + "px";
  chart.style.height = height + 1 + "px";
  width = chart.clientWidth;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  draw();
}

function spanAt(px, py) {
  if (py < AXIS || px < LABELS) return null;
  const y = py + chart.scrollTop, track = tracks.find((candidate) => y >= candidate.top - 2 && y <= candidate.top + candidate.height + 2);
  if (!track) return null;
  const rowHeight = track.height / track.rows, row = (y - track.top) / rowHeight - 0.5, slack = ((view[1] - view[0]) / width) * 2, time = timeAt(px);
  let best = null, distance = Math.max(0.75, 3 / rowHeight);
  for (const span of track.spans) {
    if (time < span[START] - slack || time > span[END] + slack) continue;
    const off = Math.abs(span[ROW] - row);
    if (off < distance) { best = span; distance = off; }
  }
  return best && { track, span: best };
}

function showTip(event, found) {
  if (!found) { tip.style.display = "none"; return; }
  const span = found.span, title = document.createElement("b");
  title.textContent = span[NAME];
  const lines = [`\n${found.track.name} · ${span[CATEGORY]}`, `${span[START].toFixed(3)} s – ${span[END].toFixed(3)} s (${(span[END] - span[START]).toFixed(3)} s)`];
  for (const [key, value] of Object.entries(span[ARGUMENTS])) lines.push(`${key.replaceAll("_", " ")}: ${value}`);
  tip.replaceChildren(title, lines.join("\n"));
  tip.style.display = "block";
  tip.style.left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8) + "px";
}

canvas.addEventListener("mousemove", (event) => {
  hover = { x: event.offsetX };
  if (drag) drag.to = Math.min(Math.max(event.offsetX, LABELS), width - RIGHT);
  showTip(event, drag ? null : spanAt(event.offsetX, event.offsetY));
  requestAnimationFrame(draw);
});
canvas.addEventListener("mouseleave", (event) => { hover = null; showTip(event, null); requestAnimationFrame(draw); });
canvas.addEventListener("mousedown", (event) => { if (event.offsetX >= LABELS) drag = { from: event.offsetX, to: event.offsetX }; });
window.addEventListener("mouseup", () => {
  if (drag && Math.abs(drag.to - drag.from) > 4) view = [timeAt(Math.min(drag.from, drag.to)), timeAt(Math.max(drag.from, drag.to))];
  if (drag) { drag = null; draw(); }
});
canvas.addEventListener("dblclick", () => { view = whole; draw(); });
chart.addEventListener("scroll", () => requestAnimationFrame(draw));
window.addEventListener("resize", resize);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
resize();
