"use strict";
// Values under the pointer, a logarithmic axis and smoothing for the curves; zoom for timelines.
const tip = document.getElementById("tip");
const short = v => {
  for (const [letter, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]])
    if (Math.abs(v) >= size) return +(v / size).toPrecision(4) + letter;
  return String(+v.toPrecision(4));
};
function rounds(low, high, count) {
  const apart = (high - low) / count;
  if (!(apart > 0)) return [low];
  const size = 10 ** Math.floor(Math.log10(apart));
  const step = [1, 2, 5, 10].map(f => f * size).find(s => s >= apart * 0.999);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
  return found.length ? found : [low];
}
function smoothed(points, weight) {
  let mean = null;
  return points.map(([x, y]) => [x, (mean = mean === null ? y : weight * mean + (1 - weight) * y)]);
}
for (const box of document.querySelectorAll(".chart")) {
  const { frame, lines, stacked } = JSON.parse(box.dataset.chart);
  const svg = box.querySelector("svg"), curves = svg.querySelector(".curves");
  const marks = svg.querySelector(".marks"), cursor = svg.querySelector(".cursor");
  const xs = [...new Set(lines.flatMap(l => l.points.map(p => p[0])))].sort((a, b) => a - b);
  const [first, last] = [xs[0], xs[xs.length - 1]];
  const wide = frame.right - frame.left, high = frame.floor - frame.top;
  const across = x => frame.left + wide * (last > first ? (x - first) / (last - first) : 0);
  function draw() {
    const weight = +document.getElementById("smooth").value;
    const isLog = document.getElementById("log").checked;
    if (stacked) return;
    const drawn = lines.map(l => smoothed(l.points, weight).filter(p => !isLog || p[1] > 0));
    const scale = v => isLog ? Math.log10(v) : v;
    const ys = drawn.flat().map(p => scale(p[1]));
    if (!ys.length) return;
    let low = ys.reduce((a, b) => Math.min(a, b)), top = ys.reduce((a, b) => Math.max(a, b));
    if (frame.zero && !isLog) low = Math.min(0, low);
    if (low === top) [low, top] = [low - (Math.abs(low) || 1), top + (Math.abs(top) || 1)];
    const up = v => frame.floor - high * (v - low) / (top - low);
    curves.innerHTML = drawn.map((points, i) => {
      const at = points.map(p => across(p[0]).toFixed(1) + "," + up(scale(p[1])).toFixed(1));
      const style = `stroke="${lines[i].color}" stroke-dasharray="${lines[i].dash}"`;
      return at.length === 1
        ? `<circle cx="${at[0].split(",")[0]}" cy="${at[0].split(",")[1]}" r="2.5" fill="${lines[i].color}"/>`
        : `<polyline points="${at.join(" ")}" fill="none" stroke-width="1.5" ${style}/>`;
    }).join("");
    marks.innerHTML = rounds(low, top, 4).map(v => {
      const y = up(v).toFixed(1), name = short(isLog ? 10 ** v : v);
      return `<line x1="${frame.left}" x2="${frame.right}" y1="${y}" y2="${y}" class="tick"/>` +
        `<text x="${frame.left - 6}" y="${+y + 4}" text-anchor="end" class="time">${name}</text>`;
    }).join("");
  }
  svg.addEventListener("pointermove", event => {
    const area = svg.getBoundingClientRect();
    const at = (event.clientX - area.left) / area.width * svg.viewBox.baseVal.width;
    const step = xs.reduce((a, b) => Math.abs(across(b) - at) < Math.abs(across(a) - at) ? b : a);
    const said = lines.flatMap(l => l.points.filter(p => p[0] === step).map(
      p => `${l.name ? l.name + ": " : ""}${+p[1].toPrecision(6)}`));
    cursor.setAttribute("x1", across(step));
    cursor.setAttribute("x2", across(step));
    cursor.style.display = "inline";
    tip.textContent = [`step ${step}`, ...said].join("\n");
    tip.style.display = "block";
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 4) + "px";
    tip.style.top = event.clientY + 14 + "px";
  });
  svg.addEventListener("pointerleave", () => {
    tip.style.display = cursor.style.display = "none";
  });
  for (const id of ["log", "smooth"]) document.getElementById(id).addEventListener("input", draw);
}
for (const svg of document.querySelectorAll(".timeline")) {
  const left = +svg.dataset.left, width = +svg.dataset.width, size = svg.viewBox.baseVal.width;
  const spots = [...svg.querySelectorAll("rect, .label, .mark")]
    .map(e => ({ e, x: +(e.getAttribute("x") ?? e.getAttribute("x1")), w: +e.getAttribute("width") }));
  let zoom = 1, from = 0;  // the share of the whole at which the view begins
  function place() {
    from = Math.min(Math.max(from, 0), 1 - 1 / zoom);
    for (const { e, x, w } of spots) {
      const begin = ((x - left) / width - from) * zoom, end = begin + w / width * zoom;
      const a = Math.max(0, begin), b = Math.min(1, w ? end : begin);
      e.style.display = b < 0 || a > 1 || begin > 1 || (!w && begin < 0) ? "none" : "";
      if (w) e.setAttribute("width", Math.max(0, (b - a) * width));
      for (const name of e.tagName === "line" ? ["x1", "x2"] : ["x"])
        e.setAttribute(name, left + a * width);
    }
  }
  svg.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.shiftKey) return;  // the page scrolls
    event.preventDefault();
    const area = svg.getBoundingClientRect();
    const at = ((event.clientX - area.left) / area.width * size - left) / width;
    const there = from + at / zoom;
    zoom = Math.min(1000, Math.max(1, zoom * (event.deltaY < 0 ? 1.25 : 0.8)));
    from = there - at / zoom;
    place();
  }, { passive: false });
  svg.addEventListener("pointermove", event => {
    if (event.buttons !== 1) return;
    from -= event.movementX / svg.getBoundingClientRect().width * size / width / zoom;
    place();
  });
  svg.addEventListener("dblclick", () => { zoom = 1; from = 0; place(); });
}
