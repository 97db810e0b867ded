"use strict";
// One canvas as large as the visible part of the chart, redrawn on scroll, so that hundreds of tracks cost no more than
// the visible ones.
let seconds, start, colours, tracks, devices, moves, curve, peak, whole, view, migrations;
const [chart, space, canvas, tip] = ["chart", "space", "canvas", "tip"].map((id) => document.getElementById(id));
const context = canvas.getContext("2d");
const LABELS = 112, GAP = 6, RIGHT = 14;
let axis = 26, groups = [];
const FONT = "12px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif";
const NAME = 0, CATEGORY = 1, COLOUR = 2, START = 3, END = 4, ROW = 5, ARGUMENTS = 6;

// Return how many requests run at each moment, over all replicas, as [[time, count], ...]: the long tail of any number
// of replicas at once.
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

// More tracks of one role than this start as one row; a click on its name, or the key f, shows them all.
const FOLDED_FROM = 16;
function groupTracks() {
  for (const track of tracks) {
    const last = groups[groups.length - 1];
    if (last && last.role === track.role) last.tracks.push(track);
    else groups.push({ role: track.role, tracks: [track], open: false });
  }
  const deviceTracks = devices.map((row) => ({ name: row.name, role: "device", rows: 1, spans: row.stretches }));
  if (devices.length) {
    const after = groups.findIndex((group) => group.role !== "step") >>> 0;
    groups.splice(after, 0, { role: "device", tracks: deviceTracks, open: true });
  }
  if (curve.length) {
    const requests = { name: "requests", role: "curve", rows: 1, spans: [] };
    const before = groups.findIndex((group) => group.role === "replica");
    groups.splice(before, 0, { role: "curve", tracks: [requests], open: true });
  }
}
const folds = (group) => group.tracks.length > FOLDED_FROM && group.role !== "device";
let shown = [], bottom = 0;
// The row in which a track is drawn: its own, or that of its folded role.
const homes = new Map();

function layout() {
  shown = [];
  bottom = axis + GAP;
  for (const group of groups) {
    const many = group.tracks.length;
    if (folds(group)) {
      const name = `${group.open ? "▾" : "▸"} ${many} ${group.role}s`;
      place({ name, role: "fold", group, rows: 1, spans: [] }, 18, GAP);
      for (const track of group.tracks) homes.set(track, shown[shown.length - 1]);
      if (!group.open) continue;
    }
    const most = many <= 4 ? 132 : many <= 16 ? 64 : many <= 64 ? 30 : 16;
    const single = { step: 24, curve: 46 }[group.role] || (many <= 32 ? 18 : Math.max(2, Math.floor(540 / many)));
    for (const track of group.tracks) {
      const height = track.rows === 1 ? single : Math.min(most, Math.max(single, track.rows * 9));
      place(track, height, height > 30 ? GAP + 2 : height < 8 ? 0 : many > 64 ? 3 : GAP);
    }
  }
}

function place(track, size, gap) {
  track.height = size;
  track.top = bottom;
  bottom += size + gap;
  shown.push(track);
  homes.set(track, track);
}

// Return the ends of the step, and of spans that begin before it or end after it.
function extent() {
  let first = 0, last = seconds;
  for (const track of tracks) for (const span of track.spans) {
    first = Math.min(first, span[START]);
    last = Math.max(last, span[END]);
  }
  return [first, last === first ? first + 1 : last];
}

// Return when requests moved; a record without the driver's call still has the parts that went on elsewhere.
function migrationTimes() {
  const spans = tracks.flatMap((track) => track.spans);
  const starts = (fits) => spans.filter(fits).map((span) => span[START]);
  const calls = starts((span) => span[NAME] === "migrate"), moved = starts((span) => span[COLOUR] === "moved");
  return calls.length || !moved.length ? calls : [moved.reduce((one, other) => Math.min(one, other))];
}
let width = 0, height = 0, drag = null, hover = null;

const x = (time) => LABELS + ((time - view[0]) / (view[1] - view[0])) * (width - LABELS - RIGHT);
const timeAt = (pixel) => {
  const inside = Math.min(Math.max(pixel, LABELS), width - RIGHT);
  return view[0] + ((inside - LABELS) / (width - LABELS - RIGHT)) * (view[1] - view[0]);
};
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function ticks() {
  const about = (view[1] - view[0]) / Math.max(2, (width - LABELS) / 110);
  const power = 10 ** Math.floor(Math.log10(about));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= about);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const found = [];
  for (let index = Math.ceil(view[0] / step - 1e-9); index * step <= view[1] + 1e-9; index++) {
    found.push([index * step, (index * step).toFixed(digits) + " s"]);
  }
  return found;
}

function clipped(text, room) {
  if (context.measureText(text).width <= room) return text;
  let length = text.length;
  while (length > 1 && context.measureText(text.slice(0, length) + "…").width > room) length--;
  return length > 2 ? text.slice(0, length) + "…" : "";
}

function drawCurve(top, size, soft) {
  const level = (count) => top + size - (count / peak) * size;
  const clamp = (time) => x(Math.min(Math.max(time, view[0]), view[1]));
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
  if (track.height >= 8 || (track.top - axis) % 24 < track.height) {
    context.fillText(clipped(track.name, LABELS - 12), 2, top + Math.min(Math.max(track.height / 2, 6), 16));
  }
  if (track.role === "curve") drawCurve(top, track.height, soft);
  const closed = track.role === "fold" && !track.group.open;
  const spans = closed ? track.group.tracks.flatMap((each) => each.spans) : track.spans;
  if (track.role === "fold") context.globalAlpha = Math.max(0.05, 1 / Math.sqrt(track.group.tracks.length));
  for (const span of spans) {
    if (span[END] < view[0] || span[START] > view[1]) continue;
    const left = Math.max(x(span[START]), LABELS), right = Math.min(x(span[END]), width - RIGHT);
    const wide = Math.max(right - left - (right - left > 3 ? 0.75 : 0), 0.75);
    const row = track.role === "fold" ? 0 : span[ROW];
    context.fillStyle = span[COLOUR] === "idle" ? idleFill() : colours[span[COLOUR]];
    context.fillRect(left, top + row * rowHeight, wide, rowHeight - gap);
    if (rowHeight >= 16 && wide > 24 && track.role !== "fold") {
      const label = clipped(span[NAME], wide - 8);
      context.fillStyle = span[COLOUR] === "idle" ? ink : span[COLOUR] === "wait" ? "#1c2430" : "#fff";
      if (label) context.fillText(label, left + 4, top + span[ROW] * rowHeight + rowHeight / 2);
    }
  }
  context.globalAlpha = 1;
}

let hatch = null;
function idleFill() {
  if (hatch) return hatch;
  const tile = document.createElement("canvas"), pen = tile.getContext("2d");
  tile.width = tile.height = 6;
  pen.fillStyle = "#d9a3a333";
  pen.fillRect(0, 0, 6, 6);
  pen.strokeStyle = "#c94f4f99";
  pen.lineWidth = 1.4;
  for (const shift of [-6, 0, 6]) { pen.beginPath(); pen.moveTo(shift, 6); pen.lineTo(shift + 6, 0); pen.stroke(); }
  hatch = context.createPattern(tile, "repeat");
  return hatch;
}

function upright(at) {
  context.beginPath();
  context.moveTo(Math.round(at) + 0.5, axis - 4);
  context.lineTo(Math.round(at) + 0.5, height);
  context.stroke();
}

function drawMigration(time) {
  if (time < view[0] || time > view[1]) return;
  context.save();
  context.strokeStyle = context.fillStyle = colours.moved;
  context.setLineDash([5, 3]);
  context.lineWidth = 1.5;
  upright(x(time));
  const room = context.measureText("migration").width + 8;
  context.fillText("migration", x(time) + (x(time) + room > width ? -room : 4), axis + 4);
  context.restore();
}

// An arrow from the end of a request's part to the start of its rest, on another replica.
function drawMove([from, row, end, to, other, begin], offset) {
  if (begin < view[0] || end > view[1]) return;
  const share = (track, at) => (track.role === "fold" ? 0.5 : (at + 0.5) / track.rows);
  const middle = (track, at) => track.top - offset + share(track, at) * track.height;
  const [source, target] = [homes.get(tracks[from]), homes.get(tracks[to])];
  if (source === target) return;
  const [left, top] = [x(end), middle(source, row)], [right, foot] = [x(begin), middle(target, other)];
  const angle = Math.atan2(foot - top, right - left);
  context.beginPath();
  context.moveTo(left, top);
  context.lineTo(right, foot);
  for (const turn of [2.7, -2.7]) {
    context.moveTo(right, foot);
    context.lineTo(right + 7 * Math.cos(angle + turn), foot + 7 * Math.sin(angle + turn));
  }
  context.stroke();
}

function drawMoves(offset) {
  context.save();
  context.beginPath();
  context.rect(LABELS, axis, width - LABELS - RIGHT, height);
  context.clip();
  context.strokeStyle = colours.moved;
  context.lineWidth = 1.5;
  context.globalAlpha = Math.max(0.35, 1 / Math.sqrt(Math.max(1, moves.length)));
  for (const move of moves) drawMove(move, offset);
  context.restore();
}

// The wall clock of a moment of the step, as HH:MM:SS in UTC, with a tenth where the marks are closer than a second.
function clock(time, close) {
  return new Date((start + time) * 1000).toISOString().slice(11, close ? 21 : 19);
}

function draw() {
  if (!view) return;
  const ratio = window.devicePixelRatio || 1, offset = chart.scrollTop;
  const ink = css("--ink"), soft = css("--soft"), line = css("--line");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = FONT;
  context.textBaseline = "middle";
  const marks = ticks();
  const visible = shown.filter((track) => track.top + track.height >= offset && track.top <= offset + height);
  for (const track of visible) {
    context.fillStyle = css(shown.indexOf(track) % 2 ? "--window" : "--stripe");
    context.fillRect(LABELS, track.top - offset - 1, width - LABELS - RIGHT, track.height + 2);
  }
  context.strokeStyle = line;
  for (const [time] of marks) upright(x(time));
  for (const track of visible) drawTrack(track, offset, ink, soft);
  context.strokeStyle = soft;
  for (const edge of [0, seconds]) if (edge >= view[0] && edge <= view[1]) upright(x(edge));
  drawMoves(offset);
  for (const moment of new Set(migrations)) drawMigration(moment);
  context.fillStyle = css("--card");
  context.fillRect(0, 0, width, axis - 4);
  context.fillStyle = soft;
  context.textAlign = "center";
  for (const [time, label] of marks) context.fillText(label, Math.min(x(time), width - 20), 13);
  if (start !== null) {
    const close = marks.length > 1 && marks[1][0] - marks[0][0] < 1;
    for (const [time] of marks) context.fillText(clock(time, close), Math.min(x(time), width - 32), 29);
  }
  context.textAlign = "left";
  if (start !== null) {
    context.fillText(new Date(start * 1000).toISOString().slice(0, 10), 2, 13);
    context.fillText("UTC", 2, 29);
  }
  if (drag) {
    context.fillStyle = "#4a90d955";
    context.fillRect(Math.min(drag.from, drag.to), axis, Math.abs(drag.to - drag.from), height);
  } else if (hover && hover.x > LABELS && hover.x < width - RIGHT) {
    upright(hover.x);
  }
}

function resize() {
  layout();
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
  if (py < axis || px < LABELS) return null;
  const y = py + chart.scrollTop;
  const track = shown.find((candidate) => y >= candidate.top - 2 && y <= candidate.top + candidate.height + 2);
  if (!track) return null;
  if (track.role === "fold") return null;
  if (track.role === "curve") return { track, time: timeAt(px) };
  const rowHeight = track.height / track.rows, row = (y - track.top) / rowHeight - 0.5;
  const slack = ((view[1] - view[0]) / width) * 2, time = timeAt(px);
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
    for (const [key, value] of Object.entries(span[ARGUMENTS] || {})) {
      lines.push(`${key.replaceAll("_", " ")}: ${value}`);
    }
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

// Show [from, to], as far as the step goes; a view is at least a microsecond and at most the whole.
function look(from, to) {
  const size = Math.min(Math.max(to - from, 1e-6), whole[1] - whole[0]);
  const start = Math.min(Math.max(from, whole[0]), whole[1] - size);
  view = [start, start + size];
  requestAnimationFrame(draw);
}
const pan = (share) => { const by = (view[1] - view[0]) * share; look(view[0] + by, view[1] + by); };
const zoom = (factor, at = (view[0] + view[1]) / 2) => look(at - (at - view[0]) * factor, at + (view[1] - at) * factor);

function unfold(foldable, open) {
  for (const group of foldable) group.open = open;
  resize();
}
function unfoldAll() {
  const foldable = groups.filter(folds);
  unfold(foldable, foldable.some((group) => !group.open));
}

const KEYS = {
  ArrowLeft: () => pan(-0.2),
  ArrowRight: () => pan(0.2),
  "+": () => zoom(0.7),
  "=": () => zoom(0.7),
  "-": () => zoom(1 / 0.7),
  0: () => look(...whole),
  Home: () => look(...whole),
  f: unfoldAll,
};
canvas.addEventListener("keydown", (event) => {
  if (!KEYS[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  KEYS[event.key]();
  event.preventDefault();
});
canvas.addEventListener("wheel", (event) => {
  if (event.ctrlKey || event.metaKey) zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, timeAt(event.offsetX));
  else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    pan((event.deltaX || event.deltaY) / width);
  } else return;
  event.preventDefault();
}, { passive: false });

// A mouse selects what to zoom to; one finger pans, two zoom.
const fingers = new Map();
function positions() { return [...fingers.values()].sort((left, right) => left - right); }
canvas.addEventListener("pointerdown", (event) => {
  if (event.offsetX < LABELS) {
    const y = event.offsetY + chart.scrollTop;
    const fold = shown.find((track) => track.role === "fold" && y >= track.top && y <= track.top + track.height);
    if (fold) unfold([fold.group], !fold.group.open);
    return;
  }
  if (event.pointerType === "mouse") drag = { from: event.offsetX, to: event.offsetX };
  else { fingers.set(event.pointerId, event.offsetX); showTip(event, spanAt(event.offsetX, event.offsetY)); }
});
canvas.addEventListener("pointermove", (event) => {
  if (fingers.has(event.pointerId)) {
    const before = positions();
    fingers.set(event.pointerId, event.offsetX);
    const after = positions();
    if (before.length === 1) pan((before[0] - after[0]) / (width - LABELS - RIGHT));
    else zoom(Math.max(before[1] - before[0], 1) / Math.max(after[1] - after[0], 1), timeAt((after[0] + after[1]) / 2));
    showTip(event, null);
    return;
  }
  hover = { x: event.offsetX };
  if (drag) drag.to = Math.min(Math.max(event.offsetX, LABELS), width - RIGHT);
  showTip(event, drag ? null : spanAt(event.offsetX, event.offsetY));
  requestAnimationFrame(draw);
});
canvas.addEventListener("pointerleave", (event) => {
  hover = null;
  showTip(event, null);
  requestAnimationFrame(draw);
});
for (const name of ["pointerup", "pointercancel"]) window.addEventListener(name, (event) => {
  fingers.delete(event.pointerId);
  if (drag && Math.abs(drag.to - drag.from) > 4) {
    look(timeAt(Math.min(drag.from, drag.to)), timeAt(Math.max(drag.from, drag.to)));
  }
  drag = null;
  requestAnimationFrame(draw);
});
canvas.addEventListener("dblclick", () => look(...whole));
chart.addEventListener("scroll", () => requestAnimationFrame(draw));
window.addEventListener("resize", resize);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

// Read the data, which the page holds deflated, and draw.
async function begin() {
  const bytes = Uint8Array.from(atob(document.getElementById("data").textContent), (letter) => letter.charCodeAt(0));
  const json = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  ({ seconds, start, colours, tracks, devices, moves } = await new Response(json).json());
  // A recorded step has a second row of labels, the wall clock.
  axis = start === null ? 26 : 40;
  curve = runningRequests();
  peak = Math.max(1, ...curve.map((point) => point[1]));
  whole = view = extent();
  migrations = migrationTimes();
  groupTracks();
  resize();
}
begin();
