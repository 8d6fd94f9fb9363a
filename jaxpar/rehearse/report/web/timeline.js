// Drawing the timeline. Only what is in view is touched, and events thinner than a pixel are summed into columns, so
// that a hundred thousand of them stay smooth.

const HEIGHTS = { overview: 40, axis: 24, phase: 12, loop: 19, compute: 58, lane: 30, gap: 5 };
const OWN_COLOR = { exposed: "exposed-ink", host_stall: "host_copy", copy_stall: "copy", loop: "idle" };
const FONT = "12px system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif";

const CHARACTER = 6.4; // mean width, pixels

/** What is on show. Times in microseconds; `width` of the canvas and `left`, where its lanes begin; `drawn` lists the rows on the canvas for finding what is under the pointer. */
function newView(model) {
  const canvas = byId("lanes"), overview = byId("overview");
  return {
    model, canvas, overview, context: canvas.getContext("2d"), small: overview.getContext("2d"),
    from: 0, to: model.end, hidden: new Set(), match: null, selected: null, lane: 0, drawn: [], asked: false,
    width: 0, left: 0, colors: {}, inks: {}, pattern: null, profile: null, picture: null,
  };
}

function xOf(view, time) { return view.left + (time - view.from) / (view.to - view.from) * (view.width - view.left); }
function timeAt(view, x) { return view.from + (x - view.left) / (view.width - view.left) * (view.to - view.from); }

/** Colours from the style sheet, which knows light from dark; and for each whether text on it is light. */
function readColors(view) {
  const style = getComputedStyle(document.documentElement);
  const names = [...new Set([...view.model.instructions.map((row) => row.kind), ...view.model.phases, "exposed",
    "exposed-ink", "host_copy", "ink", "soft", "line", "card", "track", "accent", "other", "idle"])];
  for (const name of names) {
    const color = style.getPropertyValue(`--${OWN_COLOR[name] || name}`).trim() || style.getPropertyValue("--other").trim();
    view.colors[name] = color;
    const [red, green, blue] = [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
    view.inks[name] = 0.3 * red + 0.59 * green + 0.11 * blue > 140 ? "#14181f" : "#ffffff";
  }
  const tile = element("canvas", { width: 7, height: 7 });
  const brush = tile.getContext("2d");
  brush.strokeStyle = style.getPropertyValue("--exposed-ink").trim();
  brush.lineWidth = 1.6;
  for (const shift of [-7, 0, 7]) { brush.moveTo(shift, 7); brush.lineTo(shift + 7, 0); }
  brush.stroke();
  view.pattern = view.context.createPattern(tile, "repeat");
  view.picture = null;
}

function fitCanvas(canvas, context, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  const width = Math.round(canvas.clientWidth * ratio);
  if (canvas.width !== width || canvas.height !== Math.round(height * ratio)) {
    canvas.width = width;
    canvas.height = Math.round(height * ratio);
  }
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, canvas.clientWidth, height);
  context.font = FONT;
  context.textBaseline = "middle";
}

/** Asks for one drawing at the next frame, however often it is called before that. */
function redraw(view) {
  if (view.asked) return;
  view.asked = true;
  requestAnimationFrame(() => { view.asked = false; draw(view); });
}

function draw(view) {
  const { model, context } = view;
  view.width = view.canvas.clientWidth; // read once a frame: asking makes the browser lay the page out
  view.left = view.width < 600 ? 56 : 84;
  const depths = Math.max(0, ...model.loops.map((loop) => loop.depth + 1));
  const ribbon = model.phaseLane.count ? HEIGHTS.phase + HEIGHTS.gap : 0;
  const heights = model.lanes.map((lane) => (lane === model.compute ? HEIGHTS.compute : HEIGHTS.lane));
  const total = HEIGHTS.axis + depths * HEIGHTS.loop + (depths ? HEIGHTS.gap : 0) + ribbon + sum(heights) + model.lanes.length * HEIGHTS.gap;
  fitCanvas(view.canvas, context, total);
  drawAxis(view, total);
  let y = HEIGHTS.axis;
  context.save();
  context.beginPath();
  context.rect(view.left, 0, view.width, total);
  context.clip();
  for (const loop of model.loops) drawLoop(view, loop, y + loop.depth * HEIGHTS.loop);
  y += depths * HEIGHTS.loop + (depths ? HEIGHTS.gap : 0);
  if (ribbon) drawLane(view, model.phaseLane, y, HEIGHTS.phase, (i) => model.phases[model.phaseLane.index[i]], true);
  const labels = ribbon ? [["phase", y, HEIGHTS.phase, false]] : [];
  if (depths) labels.push(["loops", HEIGHTS.axis, HEIGHTS.loop, false]);
  y += ribbon;
  view.drawn = [];
  model.lanes.forEach((lane, i) => {
    context.fillStyle = view.colors.track;
    context.fillRect(view.left, y, view.width, heights[i]);
    drawLane(view, lane, y, heights[i], (k) => model.instructions[lane.index[k]].kind, false);
    view.drawn.push({ lane, y, height: heights[i] });
    labels.push([lane.name, y, heights[i], i === view.lane && document.activeElement === view.canvas]);
    y += heights[i] + HEIGHTS.gap;
  });
  drawSelected(view);
  context.restore();
  for (const [text, top, height, current] of labels) drawLabel(view, text, top, height, current);
  drawOverview(view);
}

function drawText(context, text, x, y, color) {
  context.fillStyle = color;
  context.fillText(text, x, y);
}

function drawLabel(view, text, top, height, current) {
  const { context } = view;
  drawText(context, text, 4, top + height / 2, current ? view.colors.accent : view.colors.soft);
}

function drawAxis(view, height) {
  const { context } = view;
  const left = view.left, width = view.width - left;
  const span = view.to - view.from;
  const rough = span / Math.max(2, width / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const [unit, size] = view.to >= 1e6 && step >= 1e4 ? ["s", 1e6] : step >= 10 ? ["ms", 1e3] : ["µs", 1];
  const digits = Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9));
  for (let time = Math.ceil(view.from / step) * step; time <= view.to; time += step) {
    const x = Math.round(xOf(view, time)) + 0.5;
    context.fillStyle = view.colors.line;
    context.fillRect(x - 0.5, 18, 1, height - 18);
    context.fillStyle = view.colors.soft;
    const text = `${fixed(time / size, digits)} ${unit}`;
    if (x + 70 < view.width) context.fillText(text, x + 3, 9);
  }
}

function drawLoop(view, loop, y) {
  const { context } = view;
  const x0 = Math.max(xOf(view, loop.start_us), view.left - 2);
  const x1 = Math.min(xOf(view, loop.start_us + loop.duration_us), view.width + 2);
  if (x1 - x0 < 3) return;
  context.strokeStyle = view.colors.soft;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(x0 + 0.5, y + HEIGHTS.loop - 2);
  context.lineTo(x0 + 0.5, y + HEIGHTS.loop - 7);
  context.lineTo(x1 - 0.5, y + HEIGHTS.loop - 7);
  context.lineTo(x1 - 0.5, y + HEIGHTS.loop - 2);
  context.stroke();
  const room = (x1 - x0 - 16) / CHARACTER;
  const text = [`${loop.name} × ${loop.trips}`, `× ${loop.trips}`].find((choice) => choice.length <= room);
  if (!text) return;
  const width = context.measureText(text).width + 10;
  context.fillStyle = view.colors.card;
  context.fillRect((x0 + x1 - width) / 2, y, width, HEIGHTS.loop - 1);
  context.fillStyle = view.colors.soft;
  context.fillText(text, (x0 + x1 - width) / 2 + 5, y + HEIGHTS.loop / 2 - 0.5);
}

/** As much of a text as fits in a width, by the mean width of a character; nothing where that says nothing. */
function clipped(text, width) {
  const room = Math.floor(width / CHARACTER);
  if (text.length <= room) return text;
  return room < 4 ? "" : `${text.slice(0, room - 1)}…`;
}

/** How strongly an instruction is drawn: hidden, faint where a search is on and it does not match, or full. */
function strength(view, index) {
  if (view.hidden.has(view.model.instructions[index].kind)) return 0;
  return view.match === null || view.match[index] ? 1 : 0.13;
}

function drawLane(view, lane, y, height, kindOf, plain) {
  const { context } = view;
  const columns = newColumns(view, y, height);
  for (let i = firstAfter(lane.latest, view.from); i < lane.count && lane.start[i] < view.to; i += 1) {
    if (lane.end[i] < view.from) continue;
    const kind = kindOf(i);
    const alpha = plain ? 1 : strength(view, lane.index[i]);
    if (alpha === 0) continue;
    const x0 = xOf(view, lane.start[i]), x1 = xOf(view, lane.end[i]);
    if (x1 - x0 < 1.5) { addToColumns(columns, x0, x1, kind, alpha); continue; }
    context.globalAlpha = alpha;
    drawBar(view, lane, i, kind, Math.max(x0, -10), Math.min(x1, view.width + 10), y, height, plain);
  }
  context.globalAlpha = 1;
  flushColumn(columns);
}

function drawBar(view, lane, i, kind, x0, x1, y, height, plain) {
  const { context } = view;
  const waits = STALL_KINDS.has(kind);
  const width = Math.max(x1 - x0 - (x1 - x0 > 4 ? 0.8 : 0), 1);
  context.fillStyle = waits && width > 6 ? view.colors.card : view.colors[kind] || view.colors.other;
  context.fillRect(x0, y, width, height);
  if (waits && width <= 6) return;
  if (waits || (!plain && lane.repeats[i])) {
    context.fillStyle = view.pattern;
    context.fillRect(x0, y, width, height);
    if (waits) {
      context.strokeStyle = view.colors[kind];
      context.lineWidth = 1.2;
      context.strokeRect(x0 + 0.6, y + 0.6, Math.max(width - 1.2, 0.5), height - 1.2);
    }
  } else if (!plain && lane.exposed[i] > 0.05 && width > 3) {
    context.strokeStyle = view.colors["exposed-ink"];
    context.lineWidth = 2;
    context.strokeRect(x0 + 1, y + 1, width - 2, height - 2);
  }
  if (plain || width < 34) return;
  const from = Math.max(x0, view.left), room = Math.min(x1, view.width) - from - 10;
  const lines = barText(view.model.instructions[lane.index[i]], lane.repeats[i]);
  const shown = (height > 44 && lines[1] ? lines : lines.slice(0, 1)).map((line) => clipped(line, room)).filter(Boolean);
  shown.forEach((text, k) => {
    const middle = y + height / 2 + (k - (shown.length - 1) / 2) * 16;
    if (waits || lane.repeats[i]) {
      context.fillStyle = view.colors.card;
      context.fillRect(from + 3, middle - 8, context.measureText(text).width + 5, 16);
    }
    context.fillStyle = waits || lane.repeats[i] ? view.colors.ink : view.inks[kind] || view.colors.ink;
    context.fillText(text, from + 5, middle + 0.5);
  });
}

/** What a bar says, the more telling first. */
function barText(instruction, repeats) {
  if (repeats) return [`${instruction.name}: ${repeats} more trips`];
  const place = instruction.scope.split("/").slice(-2).join("/");
  if (STALL_KINDS.has(instruction.kind)) return [instruction.name, place];
  if (LINK_KINDS.has(instruction.kind)) return [place ? `${instruction.kind}  ${place}` : instruction.name];
  return [place || instruction.name, place ? instruction.name : ""];
}

/** Sums of the events that fall into one pixel: drawn as a column in which each kind takes its share of the height. */
function newColumns(view, y, height) {
  return { view, y, height, x: null, sums: new Map() };
}

function addToColumns(columns, x0, x1, kind, alpha) {
  for (let pixel = Math.floor(x0); pixel < x1; pixel += 1) {
    if (pixel !== columns.x) { flushColumn(columns); columns.x = pixel; }
    const width = Math.min(x1, pixel + 1) - Math.max(x0, pixel);
    columns.sums.set(kind, (columns.sums.get(kind) || 0) + alpha * width);
  }
}

/** Entries of a map by kind, work first. */
function inOrder(sums) {
  const place = (kind) => (KIND_ORDER.includes(kind) ? KIND_ORDER.indexOf(kind) : KIND_ORDER.length);
  return sums.size < 2 ? [...sums] : [...sums].sort((a, b) => place(a[0]) - place(b[0]));
}

function flushColumn(columns) {
  const { view, y, height, sums } = columns;
  if (columns.x === null) return;
  let bottom = y + height;
  const scale = Math.max(1, sum([...sums.values()]));
  for (const [kind, width] of inOrder(sums)) {
    const part = height * width / scale;
    view.context.fillStyle = view.colors[kind] || view.colors.other;
    view.context.fillRect(columns.x, bottom - part, 1, part);
    bottom -= part;
  }
  sums.clear();
}

function drawSelected(view) {
  if (!view.selected) return;
  const row = view.drawn.find((entry) => entry.lane === view.selected.lane);
  const x0 = xOf(view, row.lane.start[view.selected.i]), x1 = xOf(view, row.lane.end[view.selected.i]);
  view.context.strokeStyle = view.colors.ink;
  view.context.lineWidth = 2.5;
  view.context.strokeRect(x0 - 1, row.y - 1, Math.max(x1 - x0, 3) + 2, row.height + 2);
}

/** The whole step in small: the compute lane's time by kind, with the part in view framed. */
function drawOverview(view) {
  const { small, model, overview } = view;
  const height = HEIGHTS.overview, width = Math.floor(view.width - view.left);
  fitCanvas(overview, small, height);
  if (view.profile === null || view.profile.width !== width) [view.profile, view.picture] = [profileOf(model, width), null];
  if (view.picture === null) view.picture = pictureOf(view, height);
  small.drawImage(view.picture, view.left, 0);
  const x0 = view.left + view.from / model.end * width, x1 = view.left + view.to / model.end * width;
  small.fillStyle = view.colors.card;
  small.globalAlpha = 0.65;
  small.fillRect(view.left, 0, x0 - view.left, height);
  small.fillRect(x1, 0, view.left + width - x1, height);
  small.globalAlpha = 1;
  small.strokeStyle = view.colors.accent;
  small.lineWidth = 2;
  small.strokeRect(x0 + 1, 1, Math.max(x1 - x0 - 2, 3), height - 2);
  drawText(small, "step", 4, height / 2, view.colors.soft);
}

/** The overview's picture, drawn once for a width and a colour scheme. */
function pictureOf(view, height) {
  const picture = element("canvas", { width: view.profile.width, height });
  const brush = picture.getContext("2d");
  brush.fillStyle = view.colors.track;
  brush.fillRect(0, 0, picture.width, height);
  view.profile.columns.forEach((column, x) => {
    let bottom = height;
    for (const [kind, share] of inOrder(column)) {
      brush.fillStyle = view.colors[kind];
      brush.fillRect(x, bottom - height * share, 1, height * share);
      bottom -= height * share;
    }
  });
  return picture;
}

/** Share of each pixel's time by kind on the compute lane. */
function profileOf(model, width) {
  const columns = Array.from({ length: width }, () => new Map());
  const lane = model.compute || model.lanes[0];
  const pixel = model.end / width;
  for (let i = 0; i < lane.count; i += 1) {
    const kind = model.instructions[lane.index[i]].kind;
    let time = lane.start[i];
    while (time < lane.end[i] - 1e-9) {
      const x = Math.min(width - 1, Math.floor(time / pixel + 1e-9));
      const stop = x === width - 1 ? lane.end[i] : Math.min(lane.end[i], (x + 1) * pixel);
      columns[x].set(kind, (columns[x].get(kind) || 0) + (stop - time) / pixel);
      if (stop <= time) break;
      time = stop;
    }
  }
  return { width, columns };
}
