// The timeline as typed arrays, one set a lane, and what compute waits for.

const LINK_KINDS = new Set(["collective", "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ppermute"]);
const KIND_ORDER = ["matmul", "kernel", "fusion", "copy", "control", "all-gather", "reduce-scatter", "all-reduce",
  "all-to-all", "ppermute", "collective", "host_copy", "exposed", "host_stall", "copy_stall"];
const STALL_KINDS = new Set(["exposed", "host_stall", "copy_stall"]);

const PHASE_ORDER = ["forward", "recomputed", "backward", "update"];

/** Shorter gaps are rounding: events are kept in whole nanoseconds. */
const SHORTEST_GAP_US = 0.01;

/** Lanes that are neither compute, nor local copies, nor the host are links. */
function isLinkLane(name) { return !["compute", "dma", "side", "host"].includes(name); }

/** Columns by instruction; stalls are added to them as instructions of their own. */
function instructionsOf(timeline) {
  const rows = timeline.names.map((name, i) => ({
    name, kind: timeline.kinds[i], scope: timeline.scopes[i], source: timeline.sources[i],
    phase: timeline.phases[i], bytes: timeline.bytes[i], synchronous: false,
  }));
  const stalls = new Map();
  /** The instruction that stands for waiting on another. */
  function waiting(kind, index) {
    const key = `${kind} ${index}`;
    if (!stalls.has(key)) {
      stalls.set(key, rows.length);
      rows.push({ ...rows[index], kind, name: `waits for ${rows[index].name}`, synchronous: false, waitsFor: index });
    }
    return stalls.get(key);
  }
  return { rows, waiting };
}

/** A lane from rows of [start, end, instruction, repeats], sorted by start. `latest[i]` is the end of the last to end
 * of the events up to i: what a search for the first visible one needs where events overlap. */
function laneOf(name, rows) {
  const lane = {
    name, count: rows.length, start: Float64Array.from(rows, (row) => row[0]), end: Float64Array.from(rows, (row) => row[1]),
    index: Int32Array.from(rows, (row) => row[2]), repeats: Int32Array.from(rows, (row) => row[3]),
    latest: new Float64Array(rows.length), exposed: new Float64Array(rows.length),
  };
  let latest = 0;
  for (let i = 0; i < rows.length; i += 1) { latest = Math.max(latest, lane.end[i]); lane.latest[i] = latest; }
  return lane;
}

/** The page's form of events, undone: a lane is a flat list of gap to the last end (ns), duration (ns), instruction. */
function unpack(flat, repeats) {
  const rows = [];
  let now = 0;
  for (let i = 0; i < flat.length; i += 3) {
    const start = now + flat[i];
    now = start + flat[i + 1];
    rows.push([start / 1e3, now / 1e3, flat[i + 2], 0]);
  }
  for (const [i, count] of repeats) rows[i][3] = count;
  return rows;
}

/** The first position in a sorted array whose value is greater than `value`. */
function firstAfter(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}

function gapsBetween(rows) {
  const gaps = [];
  let until = 0;
  for (const [start, end] of rows) {
    if (start - until > SHORTEST_GAP_US) gaps.push([until, start]);
    until = Math.max(until, end);
  }
  return gaps;
}

/** Which parts of the gaps lie under events of these lanes: stalls as [start, end, lane, event], and what is left.
 * Read from the end of each gap, since compute goes on when what it waited for has finished. */
function underEvents(gaps, lanes) {
  const stalls = [], left = [];
  for (const [from, to] of gaps) {
    const found = [];
    for (const lane of lanes) {
      for (let i = firstAfter(lane.latest, from); i < lane.count && lane.start[i] < to; i += 1) {
        if (lane.end[i] - from > SHORTEST_GAP_US) found.push({ start: lane.start[i], end: lane.end[i], lane, i });
      }
    }
    let now = to;
    while (now - from > SHORTEST_GAP_US) {
      const cause = lastToEnd(found, now);
      if (!cause) break;
      const begin = Math.max(cause.start, from), stop = Math.min(cause.end, now);
      if (now - stop > SHORTEST_GAP_US) left.push([stop, now]);
      stalls.push([begin, stop, cause.lane, cause.i]);
      now = begin;
    }
    if (now - from > SHORTEST_GAP_US) left.push([from, now]);
  }
  return { stalls, left };
}

/** Of the events that began before `now` the one that ends last up to then; of several the one that ends soonest after
 * all, then the longest. */
function lastToEnd(events, now) {
  let best = null;
  for (const event of events) {
    if (now - event.start <= SHORTEST_GAP_US) continue;
    const later = best === null ? 1 : Math.min(event.end, now) - Math.min(best.end, now);
    const sooner = best === null ? 1 : best.end - event.end;
    if (later > SHORTEST_GAP_US || (later > -SHORTEST_GAP_US
      && (sooner > SHORTEST_GAP_US || (sooner > -SHORTEST_GAP_US && event.start < best.start)))) best = event;
  }
  return best;
}

/** Synchronous collectives and host copies hold the compute lane: there they are waiting, not work. */
function markSynchronous(rows, instructions) {
  for (const row of rows) {
    const instruction = instructions.rows[row[2]];
    const kind = LINK_KINDS.has(instruction.kind) ? "exposed" : instruction.kind === "host_copy" ? "host_stall" : null;
    if (kind === null || row[3]) continue;
    instruction.synchronous = true;
    row[2] = instructions.waiting(kind, row[2]);
  }
}

/** The events of one execution, on as many lanes as it holds, by instruction and start. */
function twinsOf(lanes) {
  const twins = new Map();
  for (const lane of lanes) {
    for (let i = 0; i < lane.count; i += 1) {
      const key = `${lane.index[i]} ${lane.start[i]}`;
      if (twins.has(key)) twins.get(key).push([lane, i]); else twins.set(key, [[lane, i]]);
    }
  }
  return twins;
}

/** Adds waiting to the rows of the compute lane wherever it has nothing to do while links or the host are busy. */
function addStalls(rows, lanes, instructions) {
  const last = Math.max(0, ...lanes.filter((lane) => lane.count).map((lane) => lane.latest[lane.count - 1]));
  const gaps = gapsBetween([...rows, [last, last]]);
  const onLinks = underEvents(gaps, lanes.filter((lane) => isLinkLane(lane.name)));
  const onHost = underEvents(onLinks.left, lanes.filter((lane) => lane.name === "host"));
  const onSelf = underEvents(onHost.left, lanes.filter((lane) => ["dma", "side"].includes(lane.name)));
  const twins = twinsOf(lanes);
  for (const [kind, stalls] of [["exposed", onLinks.stalls], ["host_stall", onHost.stalls], ["copy_stall", onSelf.stalls]]) {
    for (const [start, end, lane, i] of stalls) {
      for (const [other, k] of twins.get(`${lane.index[i]} ${lane.start[i]}`)) other.exposed[k] += end - start;
      rows.push([start, end, instructions.waiting(kind, lane.index[i]), 0]);
    }
  }
  for (const lane of lanes) {
    for (let i = 0; i < lane.count; i += 1) {
      if (instructions.rows[lane.index[i]].synchronous) lane.exposed[i] = lane.end[i] - lane.start[i];
    }
  }
  rows.sort((a, b) => a[0] - b[0]);
}

/** A ribbon of phases: neighbours of one phase on the compute lane run together. */
function phaseRows(compute, instructions, phases) {
  const rows = [];
  for (let i = 0; i < compute.count; i += 1) {
    const phase = phases.indexOf(instructions.rows[compute.index[i]].phase);
    const last = rows[rows.length - 1];
    if (last && last[2] === phase) last[1] = compute.end[i];
    else rows.push([compute.start[i], compute.end[i], phase, 0]);
  }
  return rows;
}

/** Everything the drawing needs: lanes, instructions, ribbons, the end of the step. */
function loadTimeline(timeline) {
  const instructions = instructionsOf(timeline);
  const rows = timeline.lanes.map((name, i) => unpack(timeline.packed[i], timeline.repeats[i]));
  const computeAt = timeline.lanes.indexOf("compute");
  if (computeAt >= 0) markSynchronous(rows[computeAt], instructions);
  const others = timeline.lanes.map((name, i) => laneOf(name, i === computeAt ? [] : rows[i]));
  if (computeAt >= 0) addStalls(rows[computeAt], others, instructions);
  const lanes = others.map((lane, i) => (i === computeAt ? laneOf("compute", rows[i]) : lane)).filter((lane) => lane.count);
  const compute = lanes.find((lane) => lane.name === "compute") || null;
  const phases = [...new Set([...PHASE_ORDER.filter((phase) => timeline.phases.includes(phase)), ...timeline.phases])];
  return {
    lanes, compute, instructions: instructions.rows, phases,
    phaseLane: laneOf("phase", compute ? phaseRows(compute, instructions, phases) : []),
    loops: timeline.loops || [],
    end: Math.max(...lanes.map((lane) => lane.latest[lane.count - 1]), 1e-3),
    count: sum(timeline.packed.map((flat) => flat.length / 3)),
  };
}
