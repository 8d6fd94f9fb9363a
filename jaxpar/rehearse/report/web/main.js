// Fills the page; sections that have nothing to show are left out.

function startTimeline() {
  if (!report.timeline || !report.timeline.packed.some((flat) => flat.length)) {
    byId("timeline").hidden = true;
    return null;
  }
  const view = newView(loadTimeline(report.timeline));
  readColors(view);
  showLegend(view);
  connect(view);
  recallView(view);
  redraw(view);
  return view;
}

showHeader();
showTime();
showMemory();
const view = startTimeline();
for (const [id, rows, show] of [["lines", report.lines, showLines], ["collectives", report.collectives, showCollectives],
  ["critical", report.critical_path, showCriticalPath], ["shardings", report.shardings || [], showShardings]]) {
  if (rows.length) show(view);
  else byId(id).hidden = true;
}
showFindings(view);
showNotes();
showFooter();
