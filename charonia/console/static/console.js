// Live updates: regions are replaced by what the server renders, plots get a point for each reading.
"use strict";
(() => {
  const $ = (selector) => document.querySelector(selector);

  // -- theme
  const dark = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  $("#theme").addEventListener("click", () => {
    const next = dark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try { localStorage.setItem("charonia-theme", next); } catch { /* storage is off */ }
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());

  // -- plots
  const KEPT = 450;
  let columns = null;
  let plots = [];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const number = (value, unit) => value == null ? "–" : `${+value.toPrecision(3)}${unit}`;

  // fewer than two readings have no span, and uPlot takes one of many days: another, empty one is ten seconds before
  const shown = (wanted) => {
    const [times] = columns;
    if (times.length > 1) return [times, ...wanted.map((column) => columns[column])];
    const end = times[0] ?? Date.now() / 1000;
    return [[end - 10, end], ...wanted.map((column) => [null, columns[column][0] ?? null])];
  };

  const utc = (seconds) => new Date(seconds * 1000).toISOString().slice(11, 19);

  function draw() {
    for (const plot of plots) plot.plot.destroy();
    plots = [];
    if (!columns) return;
    const grid = { stroke: colour("--plot-grid"), width: 1 };
    const axis = { stroke: colour("--plot-text"), grid, ticks: grid, font: "11px system-ui, sans-serif" };
    for (const figure of document.querySelectorAll("figure.chart")) {
      const unit = figure.dataset.unit;
      const wanted = figure.dataset.columns.split(",").map(Number);
      const names = figure.dataset.names.split(",");
      const series = wanted.map((_, at) => ({
        label: names[at],
        stroke: colour(at ? "--plot-second" : "--plot-first"),
        fill: at ? undefined : colour("--plot-fill"),
        width: 2,
        points: { show: false },
        value: (_plot, value) => number(value, unit),
      }));
      const options = {
        width: figure.clientWidth,
        height: 180,
        cursor: { y: false },
        tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
        legend: { live: true },
        scales: { y: { range: (_plot, _least, most) => [0, most > 0 ? most * 1.1 : 1] } },
        axes: [{ ...axis, size: 32, space: 68, values: (_plot, values) => values.map(utc) }, { ...axis, size: 56, values: (_plot, values) => values.map((value) => number(value, "")) }],
        series: [{ value: (_plot, value) => value == null ? "–" : utc(value) }, ...series],
      };
      const plot = new uPlot(options, shown(wanted), figure);
      plots.push({ plot, figure, wanted });
    }
  }
  addEventListener("resize", () => {
    for (const { plot, figure } of plots) plot.setSize({ width: figure.clientWidth, height: 180 });
  });

  function add(point) {
    columns.forEach((column, at) => {
      column.push(point[at]);
      if (column.length > KEPT) column.shift();
    });
    for (const { plot, wanted } of plots) plot.setData(shown(wanted));
  }

  // -- live updates
  const live = $("#live");
  if (!live || !window.EventSource) return;
  const text = $("#live-text");
  let held = false;
  const say = (state, words) => { live.dataset.state = state; if (text.textContent !== words) text.textContent = words; };

  function replace(id, html, last) {
    const region = document.getElementById(id);
    if (!region) return;
    // what has the keyboard's focus, is open, or was chosen stays as it is, until nothing follows
    const inUse = region.contains(document.activeElement) || region.querySelector("details[open], input:checked");
    if (inUse && !last) return;
    const scrolled = [...region.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
    const open = [...region.querySelectorAll("details")].map((one) => one.open);
    region.innerHTML = html;
    region.querySelectorAll(".scroll").forEach((one, at) => { one.scrollLeft = scrolled[at] || 0; });
    region.querySelectorAll("details").forEach((one, at) => { one.open = open[at] || false; });
  }

  // readings come every two seconds, and one is given up after five: longer silence is no good news
  const SILENCE_MS = 8000;
  let heard = Date.now();
  setInterval(() => {
    if (source && !held && live.dataset.state !== "bad" && Date.now() - heard > SILENCE_MS) say("bad", "nothing heard for 8 s");
  }, 1000);

  let source = null;
  let ending = null; // the last update, of a page that shows something that has ended
  function connect() {
    heard = Date.now();
    if (!held) say("connecting", "connecting");
    source = new EventSource(`${location.pathname.split("/console")[0]}/console/live?${live.dataset.asked}`);
    source.addEventListener("update", update);
    source.addEventListener("ended", (event) => {
      source.close(); // it would connect again by itself
      source = null;
      ending = JSON.parse(event.data);
      if (!held) end();
    });
    source.addEventListener("problem", (event) => {
      heard = Date.now();
      say("bad", JSON.parse(event.data).text);
    });
    source.addEventListener("error", () => say("bad", source.readyState === EventSource.CLOSED ? "disconnected" : "reconnecting"));
  }
  // a hidden page has no connection and causes no reading
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      if (source) source.close();
      source = null;
    } else if (!source && !ending) connect();
  });
  function update(event) {
    heard = Date.now();
    const told = JSON.parse(event.data);
    if (told.history) { columns = told.history; draw(); } else if (columns) add(told.point);
    if (held) return;
    for (const [id, html] of Object.entries(told.regions)) replace(id, html);
    say("live", "live");
  }
  function end() {
    for (const [id, html] of Object.entries(ending.regions)) replace(id, html, true);
    $("#hold").hidden = true;
    say("ended", "ended");
  }
  if (!document.hidden) connect();
  $("#hold").addEventListener("click", (event) => {
    held = !held;
    event.target.setAttribute("aria-pressed", String(held));
    event.target.textContent = held ? "Go on" : "Hold";
    if (held) say("held", "held");
    else if (ending) end();
  });
})();
