// Moving through the timeline: wheel, drag, keys, search, legend, and what is under the pointer.

const SHORTEST_VIEW_US = 0.05;

/** Show a stretch of time, kept inside the step. */
function setRange(view, from, to) {
  const span = Math.min(Math.max(to - from, SHORTEST_VIEW_US), view.model.end);
  view.from = Math.min(Math.max(from, 0), view.model.end - span);
  view.to = view.from + span;
  rememberView(view);
  redraw(view);
}

function zoom(view, factor, around = (view.from + view.to) / 2) {
  setRange(view, around - (around - view.from) * factor, around + (view.to - around) * factor);
}

function pan(view, share) { const by = share * (view.to - view.from); setRange(view, view.from + by, view.to + by); }

/** The stretch and the search in the address, so that a view can be reloaded or sent on: `#t=12.5-13.1&q=mlp` (ms). */
function rememberView(view) {
  clearTimeout(view.timer);
  view.timer = setTimeout(() => {
    const whole = view.from <= 0 && view.to >= view.model.end;
    const query = byId("search").value;
    const parts = [`t=${(view.from / 1e3).toFixed(4)}-${(view.to / 1e3).toFixed(4)}`];
    if (query) parts.push(`q=${encodeURIComponent(query)}`);
    if (whole && !query && !location.hash.startsWith("#t=")) return;
    history.replaceState(null, "", `#${parts.join("&")}`);
  }, 300);
}

function recallView(view) {
  const found = /^#t=([\d.]+)-([\d.]+)(?:&q=(.*))?$/.exec(location.hash);
  if (!found) return;
  if (found[3]) { byId("search").value = decodeURIComponent(found[3]); search(view); }
  setRange(view, Number(found[1]) * 1e3, Number(found[2]) * 1e3);
}

/** The event at a point of the canvas, or nearest to it within two pixels: { lane, i }, or null. */
function eventAt(view, x, y) {
  const row = view.drawn.find((entry) => y >= entry.y && y < entry.y + entry.height);
  if (!row || x < view.left) return null;
  const time = timeAt(view, x), near = timeAt(view, x + 2) - time;
  let best = null, distance = Infinity;
  for (let i = firstAfter(row.lane.latest, time - near); i < row.lane.count && row.lane.start[i] <= time + near; i += 1) {
    if (strength(view, row.lane.index[i]) === 0) continue;
    const away = Math.max(row.lane.start[i] - time, time - row.lane.end[i], 0);
    if (away < distance) { distance = away; best = { lane: row.lane, i }; }
  }
  return distance <= near ? best : null;
}

/** What there is to say about an event, as lines; the first is its name. */
function describe(view, { lane, i }) {
  const row = view.model.instructions[lane.index[i]];
  const time = lane.end[i] - lane.start[i];
  const lines = [row.name, `${words(row.kind)}, ${row.phase}, on ${lane.name}`,
    `${secondsText(time / 1e6)} from ${fixed(lane.start[i] / 1e3, 3)} ms`];
  if (lane.repeats[i]) lines.push(`stands for ${plural(lane.repeats[i], "more trip")} of the loop, not drawn one by one`);
  if (lane.exposed[i] > 0) lines.push(`exposed for ${secondsText(lane.exposed[i] / 1e6)}`);
  if (row.bytes && row.waitsFor === undefined) lines.push(bytesText(row.bytes));
  if (row.scope) lines.push(row.scope);
  if (row.source) lines.push(row.source);
  return lines;
}

function showTooltip(view, event) {
  const box = view.canvas.getBoundingClientRect();
  const found = eventAt(view, event.clientX - box.left, event.clientY - box.top);
  const tip = byId("tooltip");
  tip.hidden = !found;
  if (!found) return;
  const [name, ...rest] = describe(view, found);
  tip.replaceChildren(element("b", {}, name), ...rest.map((line, i) => element("div", { class: i ? null : "soft" }, line)));
  const width = tip.offsetWidth, height = tip.offsetHeight;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, window.innerWidth - width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + height > window.innerHeight ? event.clientY - height - 12 : event.clientY + 18}px`;
}

function select(view, found) {
  view.selected = found;
  byId("selected").textContent = found ? describe(view, found).join("  ·  ") : "";
  if (found) view.lane = view.model.lanes.indexOf(found.lane);
  redraw(view);
}

/** Bring an event into view, zooming in where it would be too thin to see. */
function reveal(view, { lane, i }, closer = false) {
  const start = lane.start[i], length = Math.max(lane.end[i] - start, SHORTEST_VIEW_US);
  const span = closer ? 1.6 * length : Math.min(view.to - view.from, 60 * length);
  const visible = start >= view.from && lane.end[i] <= view.to && !closer && span >= view.to - view.from;
  if (!visible) setRange(view, start + length / 2 - span / 2, start + length / 2 + span / 2);
}

/** The next (or previous) event of the current lane that `wanted` accepts, after the selection or the view's start. */
function step(view, by, laneNumber, wanted) {
  const lane = view.model.lanes[laneNumber];
  const here = view.selected && view.selected.lane === lane;
  let i = here ? view.selected.i + by : firstAfter(lane.latest, view.from);
  while (i >= 0 && i < lane.count && !(strength(view, lane.index[i]) === 1 && wanted(view.model.instructions[lane.index[i]]))) i += by;
  if (i < 0 || i >= lane.count) return;
  select(view, { lane, i });
  reveal(view, { lane, i });
}

function nextStall(view) {
  if (!view.model.compute) return;
  step(view, 1, view.model.lanes.indexOf(view.model.compute), (row) => row.waitsFor !== undefined);
}

function onKey(view, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const lanes = view.model.lanes.length;
  const actions = {
    ArrowLeft: () => pan(view, -0.15), ArrowRight: () => pan(view, 0.15),
    "+": () => zoom(view, 0.6), "=": () => zoom(view, 0.6), "-": () => zoom(view, 1 / 0.6),
    0: () => setRange(view, 0, view.model.end), Home: () => setRange(view, 0, view.to - view.from),
    End: () => setRange(view, view.model.end, view.model.end + view.to - view.from),
    ArrowUp: () => { view.lane = (view.lane + lanes - 1) % lanes; redraw(view); },
    ArrowDown: () => { view.lane = (view.lane + 1) % lanes; redraw(view); },
    "[": () => step(view, -1, view.lane, () => true), "]": () => step(view, 1, view.lane, () => true),
    n: () => nextStall(view), Enter: () => view.selected && reveal(view, view.selected, true),
    Escape: () => select(view, null),
  };
  const action = actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

/** Mark the instructions whose name, kind, phase, scope or line holds the text, and say how many and how long. */
function search(view) {
  const text = byId("search").value.trim().toLowerCase();
  const { instructions, lanes } = view.model;
  view.match = text === "" ? null : Uint8Array.from(instructions, (row) =>
    [row.name, row.kind, row.phase, row.scope, row.source].some((field) => field.toLowerCase().includes(text)) ? 1 : 0);
  let count = 0, time = 0;
  for (const lane of view.match ? lanes : []) {
    for (let i = 0; i < lane.count; i += 1) {
      if (view.match[lane.index[i]]) { count += 1; time += lane.end[i] - lane.start[i]; }
    }
  }
  byId("found").textContent = view.match ? `${plural(count, "event")}, ${secondsText(time / 1e6)} over all lanes` : "";
  rememberView(view);
  redraw(view);
}

/** Search for a text from elsewhere on the page, and show the timeline. */
function searchFor(view, text) {
  byId("search").value = text;
  search(view);
  byId("timeline").scrollIntoView({ block: "start" });
}

function showLegend(view) {
  const present = new Set(view.model.instructions.map((row) => row.kind));
  const ordered = [...KIND_ORDER.filter((kind) => present.has(kind)), ...[...present].filter((kind) => !KIND_ORDER.includes(kind))];
  const names = { exposed: "compute waits for communication", host_stall: "compute waits for the host", copy_stall: "compute waits for a copy" };
  for (const kind of ordered) {
    const button = element("button", { "aria-pressed": "false", title: "Show or hide" },
      swatch(kind, names[kind] ? "hatched" : ""), names[kind] || words(kind));
    button.addEventListener("click", () => {
      if (!view.hidden.delete(kind)) view.hidden.add(kind);
      button.setAttribute("aria-pressed", String(view.hidden.has(kind)));
      redraw(view);
    });
    byId("legend").append(button);
  }
  for (const phase of view.model.phases) {
    byId("legend").append(element("span", { class: "phase" }, swatch(phase, "flat"), phase));
  }
}

/** Calls `move` with the pixels since the last call while the pointer is held, `click` where it did not move. */
function onDrag(canvas, move, click) {
  let last = null, moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    [last, moved] = [event.clientX, 0];
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("dragging");
  });
  canvas.addEventListener("pointermove", (event) => {
    if (last === null) return;
    moved += Math.abs(event.clientX - last);
    if (moved > 3) move(event.clientX - last, event);
    last = event.clientX;
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, (event) => {
      if (last !== null && moved <= 3 && name === "pointerup") click(event);
      last = null;
      canvas.classList.remove("dragging");
    });
  }
}

function connect(view) {
  const { canvas, overview } = view;
  const at = (event) => [event.clientX - canvas.getBoundingClientRect().left, event.clientY - canvas.getBoundingClientRect().top];
  canvas.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const whole = view.from <= 0 && view.to >= view.model.end;
    if (whole && (sideways || event.deltaY > 0)) return; // nothing further out: the page scrolls
    event.preventDefault();
    if (sideways) pan(view, (event.deltaX || event.deltaY) / view.width);
    else zoom(view, Math.exp(Math.min(Math.max(event.deltaY, -120), 120) * 0.003), timeAt(view, Math.max(at(event)[0], view.left)));
  }, { passive: false });
  onDrag(canvas, (dx) => pan(view, -dx / (view.width - view.left)), (event) => select(view, eventAt(view, ...at(event))));
  canvas.addEventListener("dblclick", (event) => {
    const found = eventAt(view, ...at(event));
    if (found) { select(view, found); reveal(view, found, true); }
  });
  canvas.addEventListener("pointermove", (event) => showTooltip(view, event));
  canvas.addEventListener("pointerleave", () => { byId("tooltip").hidden = true; });
  canvas.addEventListener("keydown", (event) => onKey(view, event));
  canvas.addEventListener("focus", () => redraw(view));
  canvas.addEventListener("blur", () => redraw(view));

  const centre = (event) => {
    const { left } = view, box = overview.getBoundingClientRect();
    const time = (event.clientX - box.left - left) / (box.width - left) * view.model.end, half = (view.to - view.from) / 2;
    setRange(view, time - half, time + half);
  };
  onDrag(overview, (dx, event) => centre(event), centre);
  byId("zoom-in").addEventListener("click", () => zoom(view, 0.5));
  byId("zoom-out").addEventListener("click", () => zoom(view, 2));
  byId("fit").addEventListener("click", () => setRange(view, 0, view.model.end));
  byId("next-exposed").addEventListener("click", () => nextStall(view));
  byId("search").addEventListener("input", () => search(view));
  window.addEventListener("hashchange", () => recallView(view));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColors(view); redraw(view); });
  new ResizeObserver(() => redraw(view)).observe(canvas);
}
