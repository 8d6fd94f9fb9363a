// The head of the page, and where a step's time and a device's memory go.

function showHeader() {
  const { target, mesh, batch, model } = report;
  byId("title").textContent = `${report.config} on ${target.name}`;
  const axes = Object.entries(mesh).map(([name, size]) => `${name}=${size}`).join(" × ") || "one device";
  const facts = [
    `${target.chips} × ${target.chip}, ${target.topology}${target.slices > 1 ? `, ${target.slices} slices` : ""}`,
    axes,
    model && `${model.family}, ${countText(model.parameters)} parameters`,
    batch && `${batch.sequences.toLocaleString("en-US")} × ${batch.seq_len.toLocaleString("en-US")} tokens a step`
      + (batch.accumulation > 1 ? ` in ${batch.accumulation} microbatches` : ""),
    target.dtype,
  ].filter(Boolean);
  byId("subtitle").textContent = facts.join("  ·  ");
  const overrides = Object.entries(report.overrides).map(([key, value]) => `--${key} ${value}`).join(" ");
  if (overrides) byId("subtitle").after(element("p", { class: "soft code" }, overrides));
  byId("verdict").append(...verdictTiles());
}

function verdictTiles() {
  const { memory, time } = report;
  const spare = memory.hbm_bytes - memory.total;
  const tiles = [
    !memory.hbm_bytes ? tile(bytesText(memory.total), "a device", "what it has is not known") : memory.fits
      ? tile("Fits", `${bytesText(memory.total)} of ${bytesText(memory.hbm_bytes)} HBM`, `${bytesText(spare)} to spare`, "good")
      : tile("Does not fit", `${bytesText(memory.total)} in ${bytesText(memory.hbm_bytes)} HBM`,
        `${bytesText(-spare)} too much`, "bad"),
    tile(secondsText(time.step), "a step", `${secondsText(time.lower_bound)} at the very least`),
    tile(time.mfu === null ? "?" : percentText(time.mfu, 1), "MFU",
      time.hfu === null ? "no peak is known" : `HFU ${percentText(time.hfu, 1)}`),
    ...(time.tokens_per_second ? [tile(countText(time.tokens_per_second), "tokens a second",
      `${countText(time.tokens_per_second / report.target.chips)} a chip`)] : []),
    tile(secondsText(time.exposed_communication), "of communication exposed",
      `${percentText(time.exposed_communication / time.step)} of the step`),
  ];
  const days = Object.entries(time.days || {});
  if (days.length) {
    const texts = days.map(([tokens, count]) => [countText(Number(tokens)), significant(count)]);
    tiles.push(tile(`${texts[0][1]} days`, `for ${texts[0][0]} tokens`,
      texts.slice(1).map(([tokens, count]) => `${count} for ${tokens}`).join(", ")));
  }
  return tiles;
}

function tile(value, label, more = "", mood = "") {
  return element("div", { class: `tile ${mood}` }, element("b", {}, value), element("span", {}, label),
    element("i", {}, more));
}

/** A bar of parts, and under it a row for each: `parts` are { name, color, value, hatched }. */
function breakdown(parts, whole, text, free = null) {
  const scale = Math.max(whole, sum(parts.map((part) => part.value)));
  const bar = element("div", { class: "stack", role: "img",
    "aria-label": parts.map((part) => `${part.name} ${text(part.value)}`).join(", ") });
  for (const part of parts) {
    bar.append(element("div", { class: part.hatched ? "hatched" : null, title: `${part.name}: ${text(part.value)}`,
      style: `width: ${100 * part.value / scale}%; background-color: var(--${part.color}, var(--other))` }));
  }
  if (free !== null) bar.append(element("div", { class: "free" }, free));
  if (scale > whole * 1.0001) {
    bar.append(element("div", { class: "over", style: `left: ${100 * whole / scale}%`, title: `${text(scale - whole)} too much` }));
  }
  return [bar, partRows(parts, whole, text)];
}

function partRows(parts, whole, text) {
  const rows = element("div", { class: "rows" });
  const most = Math.max(...parts.map((part) => part.value), 1e-12);
  for (const part of parts) {
    rows.append(
      element("span", { class: "name" }, swatch(part.color, part.hatched ? "hatched" : ""), part.name),
      element("span", { class: "bar" }, element("div", {
        style: `width: ${100 * part.value / most}%; background-color: var(--${part.color}, var(--other))` })),
      element("span", { class: "value" }, text(part.value)),
      element("span", { class: "share" }, percentText(part.value / whole)));
  }
  return rows;
}

function showTime() {
  const time = report.time;
  const waits = ["collective", "host_copy"];
  const work = Object.entries(time.by_category).filter(([kind, value]) => !waits.includes(kind) && value > 0);
  const parts = work.sort((a, b) => b[1] - a[1]).map(([kind, value]) => ({ name: words(kind), color: kind, value }));
  const rest = time.compute - sum(parts.map((part) => part.value));
  if (rest > 1e-3 * time.step) parts.push({ name: "other compute", color: "other", value: rest });
  parts.push({ name: "exposed communication", color: "exposed", value: time.exposed_communication, hatched: true });
  if (time.host_stall > 0) parts.push({ name: "waits for the host", color: "host_stall", value: time.host_stall, hatched: true });
  if (time.copy_stall > 0) parts.push({ name: "waits for copies", color: "copy_stall", value: time.copy_stall, hatched: true });
  if (time.idle > 1e-6 * time.step) parts.push({ name: "idle", color: "idle", value: time.idle });
  byId("time").append(...breakdown(parts, time.step, secondsText));

  const busy = time.by_category.collective || 0;
  const facts = [];
  if (busy > 0) {
    const hidden = Math.max(0, 1 - time.exposed_communication / busy);
    facts.push(`Collectives run for ${secondsText(busy)}; ${percentText(hidden)} of that is behind compute.`);
  }
  const gain = 1 - time.list_schedule / time.step;
  facts.push(`A greedy schedule of the same tasks takes ${secondsText(time.list_schedule)}`
    + (gain > 0.0005 ? ` (${percentText(gain)} less), and none can take` : ", and none can take")
    + ` less than ${secondsText(time.lower_bound)}.`);
  if (time.mfu) facts.push(`The model's own FLOPs at peak: ${secondsText(time.mfu * time.step)}.`);
  facts.push(time.estimated_without_cycles > 0
    ? `${percentText(time.estimated_without_cycles)} of the compute time is a roofline estimate, the rest the compiler's own.`
    : "All of the compute time is the compiler's own estimate.");
  byId("time").append(element("p", { class: "aside" }, facts.join(" ")));
}

function showMemory() {
  const memory = report.memory;
  const parts = Object.entries(memory.categories).filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1])
    .map(([name, value]) => ({ name: words(name), color: name, value }));
  const rest = memory.total - sum(parts.map((part) => part.value));
  if (rest > 1e-3 * memory.total) parts.push({ name: "other", color: "other", value: rest });
  const has = memory.hbm_bytes || memory.total;  // no figure: shares are of what is taken
  const free = memory.fits && memory.hbm_bytes ? `${percentText(1 - memory.total / has)} free` : null;
  byId("memory").append(...breakdown(parts, has, bytesText, free));
  const host = Object.entries(memory.host).filter(([, value]) => value > 0);
  if (host.length) {
    const rows = host.map(([name, value]) => ({ name: words(name), color: name, value }));
    byId("memory").append(element("h3", {}, "In the host's memory, for each device"),
      partRows(rows, sum(rows.map((row) => row.value)), bytesText));
  }
  if (memory.advice.length) {
    byId("memory").append(element("ul", { class: "advice" }, ...memory.advice.map((line) => element("li", {}, line))));
  }
}

function showFooter() {
  const versions = Object.entries(report.versions).map(([name, version]) => `${name} ${version}`).join(", ");
  byId("footer").append(
    element("p", { class: "code" }, report.command),
    element("p", {}, `${report.date}  ·  compiled in ${secondsText(report.compile_seconds)}  ·  ${versions}`
      + (report.target.note ? `  ·  ${report.target.note}` : "")));
  for (const section of document.querySelectorAll("main section")) {
    if (!section.hidden) byId("sections").append(element("a", { href: `#${section.id}` }, section.dataset.nav));
  }
}
