// The timeline on a canvas: a row for each lane, zoomed by the wheel, moved by dragging, explained by hovering.

const ROW = 30, GAP = 6, AXIS = 22, LOOP = 18, LEFT = 70; // pixels
const [LANE, START, LENGTH, INSTRUCTION, REPEATS] = [0, 1, 2, 3, 4]; // of an event; times in microseconds

const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("lanes");
if (canvas) drawTimeline();
for (const head of document.querySelectorAll(".scroll th")) head.addEventListener("click", () => sortBy(head));

function drawTimeline() {
  const brush = canvas.getContext("2d"), hover = document.getElementById("hover"), color = colors();
  const lanes = data.lanes.map((_, lane) => data.events.filter((event) => event[LANE] === lane));
  const end = Math.max(...data.events.map((event) => event[START] + event[LENGTH]));
  const loops = data.loops || [], depths = Math.max(0, ...loops.map((loop) => loop.depth + 1));
  const top = AXIS + LOOP * depths;
  let from = 0, to = end, width = 0, dragged = null, asked = false;

  const xOf = (time) => LEFT + (time - from) / (to - from) * (width - LEFT);
  const timeAt = (x) => from + (x - LEFT) / (width - LEFT) * (to - from);

  function draw() {
    asked = false;
    width = canvas.clientWidth;
    const height = top + lanes.length * (ROW + GAP), ratio = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    [canvas.width, canvas.height] = [width * ratio, height * ratio];
    brush.scale(ratio, ratio);
    brush.font = "12px system-ui, 'Liberation Sans', sans-serif";
    brush.textBaseline = "middle";
    drawAxis(height);
    for (const loop of loops) drawLoop(loop);
    lanes.forEach(drawLane);
  }

  function drawAxis(height) {
    const rough = (to - from) * 110 / (width - LEFT), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
    for (let time = Math.ceil(from / step) * step; time < to; time += step) {
      fill("line", xOf(time), AXIS - 4, 1, height);
      write(timeText(time, step), xOf(time) + 3, 9, "soft");
    }
  }

  function drawLoop(loop) {
    const x0 = Math.max(xOf(loop.start_us), LEFT), x1 = Math.min(xOf(loop.start_us + loop.duration_us), width);
    const y = AXIS + LOOP * loop.depth;
    if (x1 - x0 < 3) return;
    fill("soft", x0, y + LOOP - 5, x1 - x0 - 1, 1);
    write(`${loop.name} × ${loop.trips}`, x0 + 2, y + 6, "soft", x1 - x0);
  }

  function drawLane(events, lane) {
    const y = top + lane * (ROW + GAP);
    fill(data.lanes[lane] === "compute" ? "waits" : "track", LEFT, y, width - LEFT, ROW);
    for (const event of events) {
      const x0 = Math.max(xOf(event[START]), LEFT), x1 = Math.min(xOf(event[START] + event[LENGTH]), width);
      if (x1 <= x0) continue;
      const at = event[INSTRUCTION];
      // Part of a pixel is drawn as pale as it is small, so that a thousand bars in one add up to what they are.
      fill(data.kinds[at], x0, y, x1 - x0 - (x1 - x0 > 4 ? 0.6 : 0), ROW);
      if (x1 - x0 > 40) write(data.scopes[at].split("/").pop() || data.names[at], x0 + 4, y + ROW / 2, "card", x1 - x0 - 6);
    }
    write(data.lanes[lane], 0, y + ROW / 2, "soft");
  }

  function fill(name, x, y, w, h) {
    brush.fillStyle = color(name);
    brush.fillRect(x, y, w, h);
  }

  function write(text, x, y, name, room = Infinity) {
    const letters = Math.floor(room / 6.6);
    if (text.length > letters) text = letters > 3 ? `${text.slice(0, letters - 1)}…` : "";
    brush.fillStyle = color(name);
    brush.fillText(text, x, y);
  }

  function show(start, stop) {
    const span = Math.min(Math.max(stop - start, 0.05), end);
    from = Math.min(Math.max(start, 0), end - span);
    to = from + span;
    redraw();
  }

  /** Asks for one drawing at the next frame, however often it is called before that. */
  function redraw() {
    if (!asked) requestAnimationFrame(draw);
    asked = true;
  }

  function explain(event) {
    const found = eventAt(event.offsetX, event.offsetY);
    hover.hidden = !found;
    if (!found) return;
    hover.textContent = describe(found);
    hover.style.left = `${Math.min(event.clientX + 14, window.innerWidth - hover.offsetWidth - 8)}px`;
    hover.style.top = `${Math.min(event.clientY + 18, window.innerHeight - hover.offsetHeight - 8)}px`;
  }

  function eventAt(x, y) {
    const events = x < LEFT ? [] : lanes[Math.floor((y - top) / (ROW + GAP))] || [], near = timeAt(x + 1) - timeAt(x);
    return events.find((event) => event[START] - near <= timeAt(x) && timeAt(x) <= event[START] + event[LENGTH] + near);
  }

  canvas.addEventListener("wheel", (event) => {
    if (from <= 0 && to >= end && event.deltaY > 0) return; // nothing further out: the page scrolls
    event.preventDefault();
    const factor = Math.exp(0.003 * event.deltaY), centre = timeAt(event.offsetX);
    show(centre - (centre - from) * factor, centre + (to - centre) * factor);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => { dragged = event.offsetX; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { dragged = null; });
  canvas.addEventListener("pointermove", (event) => {
    explain(event);
    if (dragged === null) return;
    const by = timeAt(dragged) - timeAt(event.offsetX);
    dragged = event.offsetX;
    show(from + by, to + by);
  });
  canvas.addEventListener("pointerleave", () => { hover.hidden = true; });
  canvas.addEventListener("dblclick", () => show(0, end));
  showLegend();
  draw();
  new ResizeObserver(redraw).observe(canvas);
}

/** The style sheet's colours by name. */
function colors() {
  const style = getComputedStyle(document.documentElement), known = new Map();
  return (name) => {
    if (!known.has(name)) known.set(name, style.getPropertyValue(`--${name}`) || style.getPropertyValue("--other"));
    return known.get(name);
  };
}

function showLegend() {
  for (const kind of [...new Set(data.kinds)].sort()) {
    const swatch = document.createElement("i"), label = document.createElement("span");
    swatch.className = "swatch";
    swatch.style.background = `var(--${kind}, var(--other))`;
    label.append(swatch, kind);
    document.getElementById("legend").append(label);
  }
}

function timeText(time, digit) {
  const [size, unit] = time >= 1e6 ? [1e6, "s"] : time >= 1e3 || digit >= 100 ? [1e3, "ms"] : [1, "µs"];
  return `${(time / size).toFixed(Math.max(0, -Math.floor(Math.log10(digit / size) + 1e-9)))} ${unit}`;
}

function describe(event) {
  const at = event[INSTRUCTION];
  return [data.names[at], `${data.kinds[at]}, ${data.phases[at]}, on ${data.lanes[event[LANE]]}`,
    `${timeText(event[LENGTH], event[LENGTH] / 100)} from ${timeText(event[START], 1)}`,
    event[REPEATS] ? `stands for ${event[REPEATS]} more trips of the loop` : "",
    data.bytes[at] ? `${data.bytes[at].toLocaleString("en-US")} bytes` : "", data.scopes[at], data.sources[at]].filter(Boolean).join("\n");
}

/** Sorts a table by one of its columns: numbers from the largest, words by the alphabet. */
function sortBy(head) {
  const at = head.cellIndex, body = head.closest("table").tBodies[0];
  const number = (row) => Number(row.cells[at].dataset.value), word = (row) => row.cells[at].textContent;
  const order = head.className ? (a, b) => number(b) - number(a) : (a, b) => word(a).localeCompare(word(b));
  body.append(...[...body.rows].sort(order));
}
