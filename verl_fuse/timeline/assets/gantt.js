"use strict";
// One canvas as large as the visible part of the chart, redrawn on scroll, so that hundreds of tracks cost no more than the visible ones.
const { seconds, colours, tracks } = JSON.parse(document.getElementById("data").textContent);
const [chart, space, canvas, tip] = ["chart", "space", "canvas", "tip"].map((id) => document.getElementById(id));
const context = canvas.getContext("2d");
const LABELS = 96, AXIS = 26, GAP = 6, RIGHT = 14, FONT = "12px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif";
const NAME = 0, CATEGORY = 1, COLOUR = 2, START = 3, END = 4, ROW = 5, ARGUMENTS = 6;

// How many requests run at each moment, over all replicas: [[time, count], ...]. It shows the long tail of any number of replicas at once.
function runningRequests() {
  const changes = [];
  for (const track of tracks) if (track.role === "replica") for (const span of track.spans) {
    if (span[CATEGORY] === "generate") changes.push([span[START], 1], [span[END], -1]);
  }
  changes.sort((left, right) => left[0] - right[0]);
  const curve = [];
  let count = 0;
  for (const [time, change] of changes) {
    count += change;
    if (curve.length && curve[curve.length - 1][0] === time) curve[curve.length - 1][1] = count;
    else curve.push([time, count]);
  }
  return curve;
}

const curve = runningRequests(), peak = Math.max(1, ...curve.map((point) => point[1]));
if (curve.length) tracks.splice(tracks.findIndex((track) => track.role === "replica"), 0, { name: "requests", role: "curve", rows: 1, spans: [] });
const ofRole = {};
for (const track of tracks) ofRole[track.role] = (ofRole[track.role] || 0) + 1;
let bottom = AXIS + GAP;
for (const track of tracks) {
  const many = ofRole[track.role], most = many <= 4 ? 132 : many <= 16 ? 64 : many <= 64 ? 30 : 16;
  const single = { step: 24, curve: 46 }[track.role] || (many <= 64 ? 18 : 14);
  track.height = track.rows === 1 ? single : Math.min(most, Math.max(single, track.rows * 9));
  track.top = bottom;
  bottom += track.height + (track.height > 30 ? GAP + 2 : many > 64 ? 3 : GAP);
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

function drawCurve(top, size, soft) {
  const level = (count) => top + size - (count / peak) * size, clamp = (time) => x(Math.min(Math.max(time, view[0]), view[1]));
  context.beginPath();
  context.moveTo(clamp(curve[0][0]), level(0));
  let before = 0;
  for (const [time, count] of curve) {
    context.lineTo(clamp(time), level(before));
    context.lineTo(clamp(time), level(count));
    before = count;
  }
  context.closePath();
  context.globalAlpha = 0.75;
  context.fillStyle = colours.generate;
  context.fill();
  context.globalAlpha = 1;
  context.fillStyle = soft;
  context.fillText(`at most ${peak}`, 2, top + 32);
}

function drawTrack(track, offset, ink, soft) {
  const top = track.top - offset, rowHeight = track.height / track.rows, gap = rowHeight >= 4 ? 1 : 0;
  context.fillStyle = ink;
  context.fillText(clipped(track.name, LABELS - 12), 2, top + Math.min(track.height / 2, 16));
  if (track.role === "curve") drawCurve(top, track.height, soft);
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

function upright(at) {
  context.beginPath();
  context.moveTo(Math.round(at) + 0.5, AXIS - 4);
  context.lineTo(Math.round(at) + 0.5, height);
  context.stroke();
}

function draw() {
  const ratio = window.devicePixelRatio || 1, offset = chart.scrollTop, ink = css("--ink"), soft = css("--soft"), line = css("--line");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = FONT;
  context.textBaseline = "middle";
  const marks = ticks(), visible = tracks.filter((track) => track.top + track.height >= offset && track.top <= offset + height);
  for (const track of visible) {
    context.fillStyle = css(tracks.indexOf(track) % 2 ? "--window" : "--stripe");
    context.fillRect(LABELS, track.top - offset - 1, width - LABELS - RIGHT, track.height + 2);
  }
  context.strokeStyle = line;
  for (const [time] of marks) upright(x(time));
  for (const track of visible) drawTrack(track, offset, ink, soft);
  context.strokeStyle = soft;
  for (const edge of [0, seconds]) if (edge >= view[0] && edge <= view[1]) upright(x(edge));
  context.fillStyle = css("--card");
  context.fillRect(0, 0, width, AXIS - 4);
  context.fillStyle = soft;
  context.textAlign = "center";
  for (const [time, label] of marks) context.fillText(label, Math.min(x(time), width - 20), AXIS / 2);
  context.textAlign = "left";
  if (drag) {
    context.fillStyle = "#4a90d955";
    context.fillRect(Math.min(drag.from, drag.to), AXIS, Math.abs(drag.to - drag.from), height);
  } else if (hover && hover.x > LABELS && hover.x < width - RIGHT) {
    upright(hover.x);
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
  if (track.role === "curve") return { track, time: timeAt(px) };
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
  const span = found.span, title = document.createElement("b"), lines = [];
  if (span) {
    title.textContent = span[NAME];
    lines.push(`\n${found.track.name} · ${span[CATEGORY]}`);
    lines.push(`${span[START].toFixed(3)} s – ${span[END].toFixed(3)} s (${(span[END] - span[START]).toFixed(3)} s)`);
    for (const [key, value] of Object.entries(span[ARGUMENTS])) lines.push(`${key.replaceAll("_", " ")}: ${value}`);
  } else {
    const running = curve.findLast((point) => point[0] <= found.time);
    title.textContent = `${running ? running[1] : 0} requests running`;
    lines.push(`\nat ${found.time.toFixed(3)} s, over all replicas`);
  }
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
