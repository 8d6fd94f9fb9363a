// Tables that sort by any column, and the lists below the timeline.

const FIRST_ROWS = 12;

/** A table of `rows`. A column is { name, value(row), text(row)?, cell(row)?, number?, fill?, code? }; sorted by the
 * column of this name, largest first. */
function showTable(section, columns, rows, sortBy = null) {
  const state = { column: columns.find((column) => column.name === sortBy) || null, down: true, all: false };
  const head = element("tr"), body = element("tbody");
  const more = element("button", { class: "more", onclick: () => { state.all = !state.all; fill(); } });
  for (const column of columns) {
    const sort = () => {
      state.down = state.column === column ? !state.down : Boolean(column.number);
      state.column = column;
      fill();
    };
    column.head = element("th", { class: column.number ? "number" : null, scope: "col" },
      element("button", { onclick: sort }, column.name));
    head.append(column.head);
  }
  function fill() {
    for (const column of columns) {
      if (column === state.column) column.head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else column.head.removeAttribute("aria-sort");
    }
    const ordered = state.column ? sorted(rows, state.column.value, state.down) : rows;
    body.replaceChildren(...(state.all ? ordered : ordered.slice(0, FIRST_ROWS)).map((row) => rowOf(columns, row, rows)));
    more.textContent = state.all ? `First ${FIRST_ROWS}` : `All ${rows.length}`;
    more.hidden = rows.length <= FIRST_ROWS;
  }
  fill();
  section.append(element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), body)), more);
}

function sorted(rows, value, down) {
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
  return [...rows].sort((a, b) => (down ? compare(value(b), value(a)) : compare(value(a), value(b))));
}

function rowOf(columns, row, rows) {
  return element("tr", {}, ...columns.map((column) => {
    const cell = element("td", { class: [column.number && "number", column.fill && "fill", column.code && "code"].filter(Boolean).join(" ") || null });
    cell.append(column.cell ? column.cell(row) : column.text ? column.text(row) : String(column.value(row)));
    if (column.fill) {
      const most = Math.max(...rows.map(column.value), 1e-12);
      cell.style.setProperty("--share", `${100 * column.value(row) / most}%`);
    }
    return cell;
  }));
}

/** A source line that finds itself in the timeline. */
function sourceCell(view, source) {
  if (!source) return element("span", { class: "soft" }, "no line known");
  if (!view) return source;
  return element("button", { class: "linkish code", title: "Find in the timeline", onclick: () => searchFor(view, source) }, source);
}

function timeColumn(name, key, fill = false) {
  return { name, number: true, fill, value: (row) => row[key], text: (row) => (row[key] ? secondsText(row[key]) : "–") };
}

function bytesColumn(name, key) {
  return { name, number: true, value: (row) => row[key], text: (row) => (row[key] ? bytesText(row[key]) : "–") };
}

function showLines(view) {
  const columns = [
    { name: "line", value: (row) => row.source, cell: (row) => sourceCell(view, row.source), code: true },
    { name: "scope", value: (row) => row.scope, code: true },
    { name: "phase", value: (row) => row.phase },
    timeColumn("exposed", "exposed", true),
    timeColumn("communication", "communication"),
    timeColumn("compute", "compute"),
    { name: "FLOPs", number: true, value: (row) => row.flops, text: (row) => (row.flops ? flopsText(row.flops) : "–") },
    bytesColumn("HBM traffic", "bytes"),
    { name: "tasks", number: true, value: (row) => row.count, text: (row) => row.count.toLocaleString("en-US") },
  ];
  const exposed = sum(report.lines.map((row) => row.exposed));
  byId("lines").append(element("p", { class: "soft" },
    `${secondsText(exposed)} of a step, in which compute waits for links.${view ? " Choose a line to find it in the timeline." : ""}`));
  showTable(byId("lines"), columns, report.lines, "exposed");
}

function showCollectives(view) {
  const rows = report.collectives;
  const known = rows.some((row) => row.planned !== undefined), unplanned = rows.filter((row) => row.planned === false);
  const sent = sum(rows.map((row) => row.sent_bytes));
  byId("collectives").append(element("p", { class: "soft" },
    `${plural(sum(rows.map((row) => row.count)), "collective")} a step; each device sends ${bytesText(sent)}. `
    + (!known ? "" : unplanned.length ? `The plan did not ask for ${plural(unplanned.length, "row")} of these.` : "All of them are in the plan.")));
  const columns = [
    { name: "kind", value: (row) => row.kind, cell: (row) => element("span", { class: "name" }, swatch(row.kind), ` ${row.kind}`) },
    { name: "over", value: (row) => row.axes.join(", ") },
    ...(known ? [{ name: "plan", value: (row) => (row.planned ? 1 : 0),
      cell: (row) => element("span", { class: `badge ${row.planned ? "good" : "bad"}` }, row.planned ? "planned" : "unplanned") }] : []),
    timeColumn("exposed", "exposed", true),
    timeColumn("time", "seconds"),
    bytesColumn("sent", "sent_bytes"),
    bytesColumn("one is", "bytes"),
    { name: "times", number: true, value: (row) => row.count, text: (row) => row.count.toLocaleString("en-US") },
    { name: "async", value: (row) => (row.asynchronous ? "yes" : "no") },
    { name: "links", value: (row) => row.links },
    { name: "phase", value: (row) => row.phase },
    { name: "line", value: (row) => row.source, cell: (row) => sourceCell(view, row.source), code: true },
    ...(known ? [{ name: "why", value: (row) => row.reason }] : []),
  ];
  showTable(byId("collectives"), columns, sorted(sorted(rows, (row) => row.exposed, true), (row) => (row.planned === false ? 0 : 1), false));
}

function showFindings(view) {
  const order = ["error", "warning", "note"];
  const section = byId("findings");
  if (!report.findings.length) section.append(element("p", { class: "soft" }, "The linter found nothing to report."));
  for (const row of sorted(report.findings, (finding) => order.indexOf(finding.severity), false)) {
    const costs = [row.seconds ? secondsText(row.seconds) : "", row.bytes ? bytesText(row.bytes) : "",
      row.axis ? `logical axis ${row.axis}` : "", row.scope].filter(Boolean).join("  ·  ");
    section.append(element("div", { class: "finding" },
      element("span", { class: `badge ${row.severity}` }, row.severity), " ", element("b", {}, words(row.rule).replaceAll("-", " ")), " ",
      element("span", { class: "soft" }, costs), "  ", row.source ? sourceCell(view, row.source) : "",
      element("p", {}, row.message)));
  }
}

function showCriticalPath(view) {
  const rows = report.critical_path;
  const total = sum(rows.map((row) => row.seconds));
  const byKind = new Map();
  for (const row of rows) byKind.set(row.kind, (byKind.get(row.kind) || 0) + row.seconds);
  const parts = [...byKind].sort((a, b) => b[1] - a[1]).map(([kind, value]) => ({ name: words(kind), color: kind, value }));
  byId("critical").append(element("p", { class: "soft" },
    "The chain of tasks that ends last, each of them waiting for the one before: to shorten the step, shorten these."),
  ...breakdown(parts, total, secondsText));
  showTable(byId("critical"), [
    { name: "task", value: (row) => row.name, code: true },
    { name: "kind", value: (row) => words(row.kind) },
    timeColumn("time", "seconds", true),
    { name: "times", number: true, value: (row) => row.count, text: (row) => row.count.toLocaleString("en-US") },
    { name: "scope", value: (row) => row.scope, code: true },
    { name: "line", value: (row) => row.source, cell: (row) => sourceCell(view, row.source), code: true },
  ], rows, "time");
}

function showShardings() {
  showTable(byId("shardings"), [
    { name: "parameter", value: (row) => row.name, code: true },
    { name: "shape", value: (row) => row.shape.join(" × ") },
    { name: "logical axes", value: (row) => row.axes.map((axis) => axis || "–").join(", ") },
    { name: "spec", value: (row) => row.spec, code: true },
    { ...bytesColumn("bytes a device", "bytes_per_device"), fill: true },
  ], report.shardings, "bytes a device");
}

function showNotes() {
  const unknown = Object.entries(report.unknown);
  const section = byId("notes");
  if (unknown.length) {
    section.append(element("p", {}, "Instructions that were not understood; they are in the timeline, with what could be told of them:"),
      element("ul", {}, ...unknown.map(([name, count]) => element("li", {}, element("code", {}, name), ` × ${count}`))));
  } else {
    section.append(element("p", { class: "soft" }, "Every instruction of the program was understood."));
  }
  if (report.notes.length) section.append(element("ul", {}, ...report.notes.map((line) => element("li", {}, line))));
}
