// Starts the charts of a page and makes its tables sortable; rayfl/report/page.py says what it is given.
"use strict";
(() => {
const page = JSON.parse(document.getElementById("page-data").textContent);
const UNKNOWN = "–";
const PALETTES = {
  light: { 0: "#0072B2", 1: "#D55E00", 2: "#009E73", 3: "#CC79A7", 4: "#E69F00", 5: "#56B4E9", 6: "#000000",
    ink: "#1f2328", quiet: "#5f6773", line: "#e5e7eb", page: "#ffffff", soft: "#f6f7f8" },
  dark: { 0: "#56B4E9", 1: "#F0793A", 2: "#2FBF97", 3: "#E29BC4", 4: "#F2B134", 5: "#9AD3F5", 6: "#FFFFFF",
    ink: "#e6e6e6", quiet: "#9aa0a6", line: "#34383d", page: "#17191c", soft: "#202327" },
};
// For many methods or clusters; not all are told apart by colour-blind readers.
["#882255", "#44AA99", "#999933", "#AA4499", "#6699CC", "#661100", "#888888"].forEach((colour, i) => { PALETTES.light[7 + i] = colour; });
["#C75B8C", "#7ADCCB", "#C8C850", "#C97BC4", "#86A8DE", "#B5694A", "#B0B0B0"].forEach((colour, i) => { PALETTES.dark[7 + i] = colour; });
const COLOURS = 14;
const LONGEST_NAME = 17;  // letters beside a narrow chart
const FONT = getComputedStyle(document.body).fontFamily;

function element(tag, attributes = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) found.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) found.setAttribute(name, value);
  }
  found.append(...children);
  return found;
}

// --- numbers -------------------------------------------------------------------------------------------

// As Python: of two numbers equally near the one that ends in an even digit.
function digits(value, count) {
  const longer = value.toFixed(count + 1), cut = longer.slice(0, count ? -1 : -2);
  const between = longer.endsWith("5") && Number(longer) === value && Number.isInteger(value * 2 ** (count + 1));
  const [whole, part] = (between && "02468".includes(cut.at(-1)) ? cut : value.toFixed(count)).replace(/^-(?=[0.]+$)/, "").split(".");
  return whole.replace(/\B(?=(\d{3})+$)/g, ",") + (part === undefined ? "" : `.${part}`);
}

function unitOf(value) {
  for (const [unit, scale] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (Math.abs(value) >= 0.9995 * scale) return [unit, scale];
  return ["B", 1];
}

function size(value) {
  const [unit, scale] = unitOf(value), scaled = value / scale, amount = Math.abs(scaled);
  return `${digits(scaled, scale === 1 || amount >= 99.95 ? 0 : amount >= 9.995 ? 1 : 2)} ${unit}`;
}

function duration(value) {
  if (value < 0) return `-${duration(-value)}`;
  if (value < 59.95) return `${digits(value, value < 0.995 ? 2 : 1)} s`;
  const two = (n) => String(n).padStart(2, "0"), seconds = Math.round(value), minutes = Math.round(value / 60);
  if (Math.floor(seconds / 60) < 60) return `${Math.floor(seconds / 60)} min ${two(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
}

function general(value) {
  const shown = Number(value.toPrecision(4)), size = Math.abs(shown);
  if (shown === 0 || (size >= 1e-4 && size < 1e15)) return shown.toLocaleString("en-US", { maximumFractionDigits: 7 });
  const [digits, power] = value.toExponential(3).split("e");
  return `${Number(digits)}e${Number(power)}`;
}

function written(value, format = "text") {
  if (value === null || value === undefined || Number.isNaN(value)) return UNKNOWN;
  const [kind, count] = format.split(":");
  if (kind === "number") return digits(value, Number(count));
  if (kind === "percent") return `${digits(value, Number(count))} %`;
  if (kind === "general") return general(value);
  if (kind === "size") return size(value);
  if (kind === "duration") return duration(value);
  return String(value);
}

// On an axis the ticks are round numbers: no decimals that say nothing.
function tick(value, format) {
  const kind = format.split(":")[0];
  if (kind === "size") { const [unit, scale] = unitOf(value); return `${Number((value / scale).toPrecision(3))} ${unit}`; }
  if (kind === "duration") return value < 120 ? `${Number(value.toPrecision(3))} s` : `${Number((value / 60).toPrecision(3))} min`;
  if (kind === "text") return String(value);
  return Number(value.toPrecision(6)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}

const isKnown = (value) => value !== null && value !== undefined;

const escaped = (text) => echarts.format.encodeHTML(String(text));

// --- options -------------------------------------------------------------------------------------------

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

function merged(base, change) {
  if (Array.isArray(base) && Array.isArray(change) && change.some(isObject))
    return Array.from({ length: Math.max(base.length, change.length) }, (_, i) =>
      i < change.length ? (i < base.length ? merged(base[i], change[i]) : change[i]) : base[i]);
  if (!isObject(base) || !isObject(change)) return change;
  const found = { ...base };
  for (const [key, value] of Object.entries(change)) found[key] = key in base ? merged(base[key], value) : value;
  return found;
}

const NAMING = new Set(["encode", "by", "tip", "band", "interval", "hollow"]);  // what is there names columns; other texts may be the user's

function filledIn(value, slider, naming = false) {
  if (typeof value === "string") return naming ? value.replaceAll("{slider}", () => slider) : value;
  if (Array.isArray(value)) return value.map((each) => filledIn(each, slider, naming));
  if (!isObject(value)) return value;
  return Object.fromEntries(Object.entries(value).map(([key, each]) =>
    [key, key === "source" ? each : filledIn(each, slider, naming || NAMING.has(key))]));
}

const COLOURED = new Set(["color", "borderColor", "backgroundColor"]);

// The start and the end of a name: methods that differ in a setting have it at the end.
function shortened(name, most) {
  const letters = [...String(name)], kept = most - 1, first = kept >> 1;
  return letters.length <= most ? String(name) : `${letters.slice(0, first).join("")}…${letters.slice(first - kept).join("")}`;
}

function painted(value, palette, key = "") {
  if (typeof value === "string") return COLOURED.has(key) && value[0] === "$" ? palette[value.slice(1)] : value;
  if (Array.isArray(value)) return key === "data" || key === "matrix" ? value.map((each) => isObject(each) ? painted(each, palette) : each) : value.map((each) => painted(each, palette, key));
  if (!isObject(value)) return value;
  return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, name === "source" ? each : painted(each, palette, name)]));
}

let printing = false;
const PAPER = 680;  // CSS pixels: A4 with margins of 15 mm

const dark = () => {
  if (printing) return false;
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

// The distance between the ticks of ECharts.
function stepOf(span, count) {
  const exact = span / count, power = 10 ** Math.floor(Math.log10(exact)), share = exact / power;
  return power * (share < 1.5 ? 1 : share < 2.5 ? 2 : share < 4 ? 3 : share < 7 ? 5 : 10);
}

// No accuracy is below 0 or above 100 %, though an interval or a round tick may be.
const withinPercent = (scale, count) => ({
  min: (found) => (found.min < 0 ? 0 : null),
  max: (found) => {
    const least = Math.max(0, scale ? found.min : 0), step = stepOf(found.max - least, count);
    return found.max <= least || Math.ceil(found.max / step) * step > 100 ? 100 : null;
  },
});

const DASHES = { dashed: [6, 4], dotted: [2, 3] };
const SHAPES = { diamond: "M11 0L16 5L11 10L6 5Z", triangle: "M11 0L17 10H5Z", rect: "M6 0H16V10H6Z", circle: "M6 5A5 5 0 1 1 16 5A5 5 0 1 1 6 5Z" };

// What stands for a series in a legend, as an outline of 22 by 10: its symbol, or its dashes.
function keyOf(series) {
  if (series.type !== "line") return SHAPES[series.symbol] ?? SHAPES.circle;
  const kind = series.lineStyle?.type, dashes = Array.isArray(kind) ? kind : DASHES[kind] ?? [22], parts = [];
  for (let x = 0, k = 0; x < 22; x += dashes[k++ % dashes.length])
    if (k % 2 === 0) parts.push(`M${x} 3.75H${Math.min(22, x + dashes[k % dashes.length])}V6.25H${x}Z`);
  return parts.join("");
}

const sourceOf = (source) => typeof source === "string" ? page.data[source.slice(1)] : source;

function mixed(from, to, share) {
  const parts = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  const [a, b] = [parts(from), parts(to)];
  return `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * share)).join(",")})`;
}

// --- charts --------------------------------------------------------------------------------------------

class Chart {
  constructor(figure, spec) {
    this.figure = figure;
    this.spec = spec;
    this.canvas = figure.querySelector(".canvas");
    this.chosen = spec.selectors.map((selector) => selector.chosen);
    this.hidden = new Set();
    this.controls = element("div", { class: "controls" });
    spec.selectors.forEach((selector, i) => { if (selector.choices.length > 1) this.controls.append(this.control(selector, i)); });
    this.controls.append(element("span", { class: "tools" },
      element("button", { type: "button", title: "show all again (drag over the chart, or Ctrl and the wheel, to zoom)", onclick: () => this.draw() }, "reset zoom"),
      element("button", { type: "button", title: "save the chart as a picture", onclick: () => this.save() }, "PNG"),
      element("button", { type: "button", title: "save the numbers of the chart", onclick: () => this.download() }, "CSV")));
    this.legend = element("div", { class: "legend" });
    this.caption = element("p");
    figure.prepend(this.controls);
    figure.append(this.legend, this.caption);
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => this.chart.dispatchAction({ type: "hideTip" }));
    this.start();
  }

  start() {
    this.chart?.dispose();
    this.chart = echarts.init(this.canvas);
    this.chart.on("datazoom", () => {});
    this.draw();
  }

  control(selector, i) {
    if (selector.slider) {
      const said = element("output", {}, selector.choices[this.chosen[i]].label);
      const slider = element("input", {
        type: "range", min: 0, max: selector.choices.length - 1, value: this.chosen[i], step: 1, "data-selector": selector.label,
        "aria-valuetext": said.textContent,
        oninput: (event) => {
          this.chosen[i] = Number(event.target.value);
          said.textContent = selector.choices[this.chosen[i]].label;
          event.target.setAttribute("aria-valuetext", said.textContent);
          this.draw(true);
        },
      });
      slider.value = this.chosen[i];
      return element("label", {}, selector.label, slider, said);
    }
    const list = element("select", { "data-selector": selector.label, onchange: (event) => { this.chosen[i] = Number(event.target.value); this.draw(); } },
      ...selector.choices.map((choice, k) => element("option", { value: k }, choice.label)));
    list.value = this.chosen[i];
    return element("label", {}, selector.label, list);
  }

  option() {
    let found = this.spec.option;
    const at = this.spec.selectors.findIndex((selector) => selector.slider || selector.choices.some((choice) => choice.value));
    const slider = at < 0 ? "" : this.spec.selectors[at].choices[this.chosen[at]].value;
    this.spec.selectors.forEach((selector, i) => { found = merged(found, filledIn(selector.choices[this.chosen[i]].set, slider)); });
    return filledIn(found, slider);
  }

  draw(moving = false) {
    const palette = this.palette = PALETTES[dark() ? "dark" : "light"];
    const option = painted(this.option(), palette);
    const { height } = option;
    delete option.height;  // which means something else to ECharts
    if (height && height !== this.chart.getHeight()) {
      this.canvas.style.height = `${height}px`;
      this.chart.resize({ height });
    }
    this.sources = (option.dataset ?? []).map((each) => sourceOf(each.source));
    const narrow = this.narrow = this.chart.getWidth() < 520;
    option.dataset = this.sources.map((source) => ({ source }));
    option.series = option.series.map((series) => this.series(series, option));
    for (const axis of [option.xAxis, option.yAxis]) if (axis) this.axis(axis, axis === option.xAxis, narrow);
    if (option.equal) this.equal(option);
    const cartesian = Boolean(option.xAxis), text = { fontFamily: FONT, fontSize: 12 };
    this.current = {
      animation: !printing, animationDuration: 250, ...option, backgroundColor: "transparent",
      textStyle: text,
      aria: { enabled: true, label: { description: option.alt ?? this.spec.alt } },
      grid: { left: 4, right: 18, top: 6, bottom: option.visualMap ? 56 : 8, outerBoundsMode: "same", outerBoundsContain: "all" },
      legend: { show: false, data: this.spec.legend, selected: Object.fromEntries([...this.hidden].map((name) => [name, false])) },
      tooltip: {
        ...option.tooltip, confine: true, backgroundColor: palette.page, borderColor: palette.line, appendTo: undefined,
        textStyle: { ...text, color: palette.ink }, axisPointer: { lineStyle: { color: palette.quiet }, animation: false },
        formatter: (found) => this.tip(found, option),
      },
      // A box drawn with a mouse zooms; the component's own buttons are out of sight.
      ...(cartesian ? {
        toolbox: { top: -100, feature: { dataZoom: { filterMode: "none", brushStyle: { color: palette.quiet, opacity: 0.15 } } } },
        dataZoom: [["xAxisIndex", option.xAxis], ["yAxisIndex", option.yAxis]].filter(([, axis]) => axis.type !== "category").map(([name]) =>
          ({ type: "inside", [name]: 0, filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseMove: "shift", moveOnMouseWheel: false, preventDefaultMouseMove: false })),
      } : {}),
    };
    if (option.visualMap) Object.assign(option.visualMap, { textStyle: { ...text, color: palette.quiet } });
    this.chart.setOption(this.current, moving ? { replaceMerge: [] } : { notMerge: true });
    if (cartesian && !option.matrix && matchMedia("(pointer: fine)").matches)
      this.chart.dispatchAction({ type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true });
    this.canvas.setAttribute("aria-label", option.alt ?? this.spec.alt);
    this.caption.textContent = option.caption ?? "";
    this.caption.hidden = !option.caption;
    this.at = -1;
    this.explain();
  }

  // The same scale on both axes, so that distances are what they seem.
  equal(option) {
    const room = [this.chart.getWidth() - 40, this.chart.getHeight() - 40], axes = [option.xAxis, option.yAxis];
    const extents = ["x", "y"].map((axis) => {
      const known = this.sources[0][option.series[0].encode[axis]].filter((v) => v !== null);
      return [known.reduce((a, b) => Math.min(a, b), Infinity), known.reduce((a, b) => Math.max(a, b), -Infinity)];  // Math.min(...known) has a limit
    });
    const unit = Math.max(...extents.map(([least, most], i) => (most - least) / room[i])) || 1;
    extents.forEach(([least, most], i) => {
      const half = unit * room[i] * 0.55, middle = (least + most) / 2;
      Object.assign(axes[i], { min: middle - half, max: middle + half });
    });
  }

  axis(axis, across, narrow) {
    const palette = this.palette, format = axis.format, named = axis.type === "category" && !across;
    Object.assign(axis, {
      nameTextStyle: { color: palette.quiet, ...(across ? {} : { align: "left", padding: [0, 0, 4, 0] }) },
      ...(across ? { nameLocation: "middle", nameGap: 30 } : { nameLocation: axis.inverse ? "start" : "end" }),
      axisLine: { show: false, onZero: false },
      axisTick: { show: false },
      splitLine: { show: !across || axis.type === "value", lineStyle: { color: palette.line }, ...axis.splitLine },
      axisLabel: {
        color: palette.quiet, hideOverlap: true, ...(named ? { width: narrow ? 140 : 180, overflow: "truncate" } : {}),
        ...(format ? { formatter: (value) => tick(value, format) } : {}), ...axis.axisLabel, ...this.spacing(axis, across),
        ...(narrow && named ? { overflow: "truncate", formatter: (name) => shortened(name, LONGEST_NAME) } : {}),
      },
      ...(across && axis.type === "value" ? { splitNumber: narrow ? 3 : 6 } : {}),
      ...(format?.startsWith("percent") && axis.type === "value" ? withinPercent(axis.scale, across ? (narrow ? 3 : 6) : 5) : {}),
      ...(format === "number:0" ? { minInterval: 1 } : {}),  // nothing counts half a round
    });
    delete axis.format;
  }

  // Of the names of rows or columns as many as fit, evenly spaced; if they merely must not overlap, gaps differ.
  spacing(axis, across) {
    const { interval, rotate } = axis.axisLabel ?? {};
    if (typeof interval !== "number" || !axis.data) return {};
    const longest = Math.min(80, 8 * Math.max(...axis.data.map((name) => String(name).length)));
    const taken = across && !rotate ? longest + 8 : 16, room = (across ? this.chart.getWidth() : this.chart.getHeight()) - 100;
    return { interval: Math.max(interval + 1, Math.ceil(axis.data.length * taken / room)) - 1 };
  }

  series(series, option) {
    const source = this.sources[series.datasetIndex ?? 0];
    if (series.type === "heatmap") {
      const cells = [];
      option.matrix.forEach((row, y) => row.forEach((value, x) => { if (value !== null) cells.push([x, y, value]); }));
      return { ...series, data: cells };
    }
    if (series.renderItem === "band") {
      if (!series.band) return { ...series, renderItem: () => null, data: [] , encode: undefined, datasetIndex: undefined };
      const [low, high] = series.band.map((name) => source[name]), places = source[series.encode.x];
      const known = places.map((_, i) => i).filter((i) => [low[i], high[i], places[i]].every((v) => v !== null && v !== undefined));
      const colour = series.itemStyle;
      return { ...series, renderItem: (params, api) => {
        if (params.dataIndex) return null;
        const points = [...known.map((i) => [places[i], high[i]]), ...known.reverse().map((i) => [places[i], low[i]])].map((p) => api.coord(p));
        known.reverse();
        return { type: "polygon", shape: { points }, style: { fill: colour.color, opacity: colour.opacity }, silent: true };
      } };
    }
    if (series.renderItem === "interval") {
      const [axis, low, high] = series.interval, other = series.encode[axis === "x" ? "y" : "x"];
      return { ...series, renderItem: (params, api) => {
        const i = params.dataIndex, ends = [source[low][i], source[high][i]];
        if (ends.some((v) => v === null || v === undefined)) return null;
        const [a, b] = ends.map((v) => api.coord(axis === "x" ? [v, source[other][i]] : [source[other][i], v]));
        const [dx, dy] = axis === "x" ? [0, 5] : [5, 0], line = (x1, y1, x2, y2) => ({ type: "line", shape: { x1, y1, x2, y2 }, style: { stroke: series.itemStyle.color, lineWidth: 1.5 } });
        return { type: "group", children: [line(...a, ...b), line(a[0] - dx, a[1] - dy, a[0] + dx, a[1] + dy), line(b[0] - dx, b[1] - dy, b[0] + dx, b[1] + dy)] };
      } };
    }
    if (series.mostDots) {
      const few = series.hollow ? source[series.hollow] : null, count = (source[series.encode.y] ?? []).filter(isKnown).length;
      const symbol = few ? (value, params) => few[params.dataIndex] ? "emptyCircle" : "circle" : series.symbol;
      return { ...series, symbol, showSymbol: Boolean(few) || count <= series.mostDots };
    }
    if (series.label && series.type === "scatter")  // on a narrow page the legend has the names
      return { ...series, label: this.narrow ? { show: false } : { ...series.label, formatter: () => series.name } };
    if (series.colour) {
      const rule = series.colour, values = source[rule.by], colour = this.colourOf(rule, values);
      return { ...series, itemStyle: { ...series.itemStyle, color: (params) => colour(values[params.dataIndex]) } };
    }
    return series;
  }

  colourOf(rule, values) {
    if (rule.kind === "scale") {
      const [pale, full] = this.ramp = dark() ? ["#33475a", "#8fd0ff"] : ["#c6dbef", "#08306b"];
      return (value) => value === null || value === undefined ? this.palette.line : mixed(pale, full, Math.min(1, Math.max(0, (value - rule.least) / (rule.most - rule.least))));
    }
    const known = [...new Set(values)].filter((v) => v !== null && v !== -1).sort((a, b) => a > b ? 1 : -1);
    this.kinds = known.map((value, i) => [value, this.palette[(Number.isInteger(value) && value >= 0 ? value : i) % COLOURS]]);
    const of = new Map(this.kinds);
    return (value) => of.get(value) ?? this.palette.line;
  }

  // The legend: series to switch on and off, or what the colours of points mean.
  explain() {
    this.legend.replaceChildren();
    const rule = this.option().series.find((series) => series.colour)?.colour;
    if (rule?.kind === "scale") {
      this.legend.append(element("span", { class: "entry" }, `${rule.label}: ${written(rule.least, rule.format)}`,
        element("span", { class: "ramp", style: `background: linear-gradient(to right, ${this.ramp.join(",")})` }), written(rule.most, rule.format)));
    } else if (rule) {
      this.legend.append(element("span", { class: "entry" }, rule.label));
      for (const [value, colour] of this.kinds.slice(0, 16))
        this.legend.append(element("span", { class: "entry" }, element("i", { style: `background: ${colour}` }), written(value)));
      if (this.kinds.length > 16) this.legend.append(element("span", { class: "entry" }, `and ${this.kinds.length - 16} more`));
    }
    for (const name of this.spec.legend) {
      const series = this.current.series.find((each) => each.name === name && each.type !== "custom");
      const key = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      key.setAttribute("width", 22); key.setAttribute("height", 10); key.setAttribute("aria-hidden", "true");
      key.innerHTML = `<path d="${keyOf(series)}" fill="${series.lineStyle?.color ?? series.itemStyle.color}"/>`;
      this.legend.append(element("button", { type: "button", "aria-pressed": String(!this.hidden.has(name)), onclick: (event) => {
        if (!this.hidden.delete(name)) this.hidden.add(name);
        this.chart.dispatchAction({ type: this.hidden.has(name) ? "legendUnSelect" : "legendSelect", name });
        event.currentTarget.setAttribute("aria-pressed", String(!this.hidden.has(name)));
      } }, key, name));
    }
  }

  tip(found, option) {
    const points = Array.isArray(found) ? found : [found], lines = [];
    const bold = (text) => `<b>${escaped(text)}</b>`, row = (label, text) => `${escaped(label)} <b>${escaped(text)}</b>`;
    if (points.length && Array.isArray(found)) {
      const axis = this.option().xAxis;
      lines.push(escaped(`${axis.name} ${written(points[0].axisValue, axis.format)}`));
    }
    for (const point of points) {
      const series = option.series[point.seriesIndex], rule = series.tip, i = point.dataIndex;
      if (series.type === "sankey") { lines.push(point.dataType === "edge" ? `${escaped(point.data.source)} → ${escaped(point.data.target)}` : bold(point.name), bold(written(point.value, series.format))); continue; }
      if (series.type === "heatmap") { const [x, y, value] = point.value; lines.push(`${escaped(option.yAxis.data[y])} · ${escaped(option.xAxis.data[x])}`, row(series.name, written(value, "general"))); continue; }
      if (!rule) continue;
      const source = this.sources[series.datasetIndex ?? 0];
      if (rule.rows) {
        if (rule.title ?? point.seriesName) lines.push(bold(rule.title ? source[rule.title][i] : point.seriesName));
        for (const [label, column, format] of rule.rows) lines.push(row(label, written(source[column][i], format)));
      } else {
        const value = source[series.encode.y][i];
        if (value === null || value === undefined) continue;
        const few = series.hollow && source[series.hollow]?.[i] ? "≈ " : "";
        const around = rule.low && source[rule.low][i] !== null ? ` (${written(source[rule.low][i], rule.y)} to ${written(source[rule.high][i], rule.y)})` : "";
        lines.push(`${point.marker}${row(point.seriesName, few + written(value, rule.y))}${escaped(around)}`);
      }
    }
    return lines.join("<br>");
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") this.chart.dispatchAction({ type: "hideTip" });
    if (!step) return;
    event.preventDefault();
    const [seriesIndex, places] = this.stops();
    if (!places.length) return;
    this.at = Math.min(places.length - 1, Math.max(0, this.at + step));
    this.chart.dispatchAction({ type: "showTip", seriesIndex, dataIndex: places[this.at] });
    const said = this.canvas.querySelector("div:last-child");
    document.getElementById("spoken").textContent = said?.innerText ?? "";
  }

  // The points that the arrow keys go through: those of the first series that is shown and has any.
  stops() {
    for (const [at, series] of this.current.series.entries()) {
      if (this.hidden.has(series.name) || !(series.tip || series.type === "heatmap" || series.type === "sankey")) continue;
      const source = this.sources[series.datasetIndex ?? 0], values = series.tip?.y ? source[series.encode.y] ?? [] : null;
      const count = (values ?? series.data ?? Object.values(source)[0]).length;
      const places = Array.from({ length: count }, (_, i) => i).filter((i) => !values || isKnown(values[i]));
      if (places.length) return [at, places];
    }
    return [-1, []];
  }

  // For paper: a picture of its width, in light colours. Afterwards the chart is as it was.
  print() {
    this.chart.resize({ width: printing ? Math.min(PAPER, this.spec.width || PAPER) : "auto" });
    this.draw();
    this.printed?.remove();
    if (!printing) return;
    this.printed = this.chart.renderToCanvas({ pixelRatio: 2 });
    this.printed.className = "printed";
    this.printed.style.cssText = `width: ${this.chart.getWidth()}px`;  // without those of a layer of the chart
    this.canvas.after(this.printed);
  }

  // With the legend below the chart, in as many lines as it takes.
  save() {
    const legend = this.spec.legend.filter((name) => !this.hidden.has(name)), room = this.chart.getWidth(), height = this.chart.getHeight();
    const keys = this.spec.legend.map((name) => {
      const series = this.current.series.find((each) => each.name === name && each.type !== "custom");
      return { name, icon: `path://${keyOf(series)}`, itemStyle: { color: series.itemStyle.color, opacity: 1 } };
    });
    let lines = this.spec.legend.length > 1 ? 1 : 0, x = 0;
    for (const name of lines ? legend : []) {
      const wide = 50 + echarts.format.getTextRect(name, `12px ${FONT}`).width;
      if (x && x + wide > room) { lines += 1; x = 0; }
      x += wide;
    }
    this.chart.resize({ height: height + 24 * lines });
    this.chart.setOption({
      animation: false, grid: { ...this.current.grid, bottom: this.current.grid.bottom + 24 * lines },
      legend: { show: lines > 0, data: keys, left: 0, bottom: 0, itemWidth: 22, itemHeight: 10, itemGap: 12, textStyle: { color: this.palette.ink, fontSize: 12, fontFamily: FONT } },
    });
    offer(`${this.spec.name}.png`, this.chart.getDataURL({ pixelRatio: 3, backgroundColor: this.palette.page }));
    this.chart.resize({ height });
    this.draw();
  }

  download() {
    const option = this.option(), blocks = [];
    if (option.matrix) blocks.push([["", ...option.xAxis.data], ...option.matrix.map((row, i) => [option.yAxis.data[i], ...row])]);
    for (const series of option.series) for (const link of series.links ?? []) blocks.push([[link.source, link.target, link.value]]);
    this.sources.forEach((source, k) => {
      const names = Object.keys(source), several = this.sources.length > 1;
      const rows = source[names[0]].map((_, i) => [...(several ? [this.spec.legend[k]] : []), ...names.map((name) => source[name][i])]);
      blocks.push([...(k ? [] : [[...(several ? ["series"] : []), ...names]]), ...rows]);
    });
    offer(`${this.spec.name}.csv`, csv(blocks.flat()));
  }
}

const csv = (rows) => "data:text/csv;charset=utf-8," + encodeURIComponent(rows.map((row) => row.map((cell) => {
  const text = cell === null || cell === undefined ? "" : String(cell);
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}).join(",")).join("\n") + "\n");

function offer(name, url) {
  const link = element("a", { href: url, download: name });
  link.click();
}

// --- tables --------------------------------------------------------------------------------------------

const SHOWN = 20;
const LONG = 40;  // letters of a cell that may take several lines

class Table {
  constructor(holder, spec) {
    this.holder = holder;
    this.spec = spec;
    this.body = holder.querySelector("tbody");
    this.still = [...this.body.rows];  // rows that are part of the page
    this.columns = spec.columns.map((column) => {
      const values = column.values && !Array.isArray(column.values) ? page.data[column.values.table][column.values.column] : column.values;
      return { ...column, values };
    });
    this.count = this.still.length || (this.columns[0]?.values?.length ?? 0);
    this.kept = this.order = Array.from({ length: this.count }, (_, i) => i);
    this.first = 0;
    this.sorted = null;
    if (spec.sortable && this.count > 1) this.headings();
    if (spec.filter || !this.still.length || this.count > SHOWN + 5) this.above();
  }

  text(i, c) { return this.still.length ? this.still[i].cells[c].textContent : written(this.columns[c].values[i], this.columns[c].format); }

  value(i, c) {
    if (this.still.length) {
      const given = this.still[i].cells[c].dataset.v;
      return given === undefined ? (this.columns[c].numeric ? null : this.text(i, c)) : given === "None" ? null : Number(given);
    }
    return (this.columns[c].order ?? this.columns[c].values)[i] ?? null;
  }

  headings() {
    [...this.holder.querySelectorAll("th")].forEach((heading, c) => {
      if (!heading.textContent.trim()) return;  // a button would have no name
      const button = element("button", { type: "button", onclick: () => this.sort(c) });
      button.append(...heading.childNodes);
      heading.append(button);
      heading.setAttribute("aria-sort", "none");
    });
  }

  sort(c) {
    this.down = this.sorted === c && !this.down;
    this.sorted = c;
    [...this.holder.querySelectorAll("th")].forEach((heading, k) => heading.setAttribute("aria-sort", k !== c ? "none" : this.down ? "descending" : "ascending"));
    this.arrange();
  }

  // The rows that pass the filter, in the order of the column; unknown values come last.
  arrange() {
    this.order = [...this.kept];
    if (this.sorted !== null) {
      const keys = Array.from({ length: this.count }, (_, i) => this.value(i, this.sorted)), sign = this.down ? -1 : 1;
      const compare = (x, y) => typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
      this.order.sort((a, b) => keys[a] === null || keys[b] === null ? (keys[a] === null) - (keys[b] === null) || a - b : sign * compare(keys[a], keys[b]) || a - b);
    }
    this.first = 0;
    this.show();
  }

  above() {
    this.said = element("span", { "aria-live": "polite" });
    const example = this.columns.find((column, c) => c && column.numeric)?.title;
    const hint = `filter: words${example ? `, or ${example} < 50` : ""}`;
    this.field = element("input", { type: "search", placeholder: hint, "aria-label": `${this.spec.caption}: ${hint}`, oninput: () => this.filter() });
    this.before = element("button", { type: "button", onclick: () => { this.first -= SHOWN; this.show(); } }, "← before");
    this.after = element("button", { type: "button", onclick: () => { this.first += SHOWN; this.show(); } }, "next →");
    this.holder.prepend(element("div", { class: "controls" }, this.field, this.said, this.before, this.after,
      element("span", { class: "tools" }, element("button", { type: "button", title: "save the rows that are shown", onclick: () => this.download() }, "CSV"))));
    this.filter();
  }

  // Words that a row has to contain, and conditions such as "accuracy < 60"; a quoted or bare heading.
  filter() {
    const tests = [];
    const names = this.columns.map((column) => column.title.toLowerCase());
    const rest = this.field.value.toLowerCase().replace(/([^<>=!]*?)\s*(<=|>=|<|>|!=|=)\s*(\S+)/g, (all, left, sign, right) => {
      const c = names.map((name, k) => [name, k]).filter(([name]) => name && left.trim().endsWith(name)).sort((a, b) => b[0].length - a[0].length)[0]?.[1];
      if (c === undefined) return all;
      const wanted = Number(right.replaceAll(",", ""));
      tests.push((i) => {
        const value = this.value(i, c), text = this.text(i, c).toLowerCase();
        const cmp = typeof value === "number" && !Number.isNaN(wanted) ? value - wanted : value === null ? NaN : text.localeCompare(right, "en", { numeric: true });
        return { "<": cmp < 0, ">": cmp > 0, "<=": cmp <= 0, ">=": cmp >= 0, "=": cmp === 0, "!=": cmp !== 0 }[sign];
      });
      return left.trim().slice(0, -names[c].length);
    });
    const words = rest.split(/\s+/).filter(Boolean);
    if (words.length) tests.push((i) => { const all = this.columns.map((_, c) => this.text(i, c)).join(" ").toLowerCase(); return words.every((word) => all.includes(word)); });
    this.kept = Array.from({ length: this.count }, (_, i) => i).filter((i) => tests.every((test) => test(i)));
    this.arrange();
  }

  show() {
    const rows = this.said ? this.order.slice(this.first, this.first + SHOWN) : this.order;
    this.body.replaceChildren(...rows.map((i) => this.still[i] ?? this.row(i)));
    if (!this.said) return;
    const total = this.order.length.toLocaleString("en-US"), of = this.count.toLocaleString("en-US");
    const several = this.order.length > SHOWN;
    this.said.textContent = several
      ? `${(this.first + 1).toLocaleString("en-US")} to ${Math.min(this.first + SHOWN, this.order.length).toLocaleString("en-US")} of ${total}`
      : this.order.length === this.count ? `${of} row${this.count === 1 ? "" : "s"}` : `${total} of ${of} rows`;
    this.before.hidden = this.after.hidden = !several;
    this.before.disabled = this.first <= 0;
    this.after.disabled = this.first + SHOWN >= this.order.length;
  }

  row(i) {
    return element("tr", {}, ...this.columns.map((column, c) => {
      const share = column.shares?.[i];
      return element("td", { class: column.numeric ? "n" : this.text(i, c).length > LONG ? "long" : null, style: share === null || share === undefined ? null : `--share: ${(share * 40).toFixed(1)}%` }, this.text(i, c));
    }));
  }

  download() {
    const cells = this.order.map((i) => this.columns.map((column, c) => this.still.length ? this.text(i, c) : column.values[i]));
    offer(`${this.spec.caption}.csv`, csv([this.columns.map((column) => column.title), ...cells]));
  }
}

// --- the page ------------------------------------------------------------------------------------------

let kept = null;
try { kept = localStorage.getItem("rayfl-theme"); } catch { /* a file may have no storage */ }
if (kept) document.documentElement.dataset.theme = kept;

const tables = [...document.querySelectorAll("[data-table]")].map((holder) => new Table(holder, page.tables[holder.dataset.table]));
const charts = [];
const wanted = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) { wanted.unobserve(entry.target); open(entry.target); }
}, { rootMargin: "600px" });

function open(figure) {
  if (!figure.chart) charts.push(figure.chart = new Chart(figure, page.charts[figure.dataset.chart]));
  return figure.chart;
}

for (const figure of document.querySelectorAll("[data-chart]")) wanted.observe(figure);
// Charts are redrawn for paper, and tables that are wider are made smaller.
function print(begins) {
  printing = begins;
  document.querySelectorAll("[data-chart]").forEach((figure) => open(figure).print());
  const wide = [...document.querySelectorAll(".wide table")];
  document.documentElement.classList.toggle("paper", begins);
  const widths = wide.map((table) => table.offsetWidth);
  wide.forEach((table, i) => { table.style.zoom = begins ? Math.min(1, PAPER / widths[i]) : ""; });
}

addEventListener("beforeprint", () => print(true));
addEventListener("afterprint", () => print(false));

const repaint = () => charts.forEach((chart) => chart.draw());
document.getElementById("theme").addEventListener("click", () => {
  const theme = dark() ? "light" : "dark", own = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = theme;
  if (theme === own) delete document.documentElement.dataset.theme;  // as the system has it, and follows it again
  try {
    if (theme === own) localStorage.removeItem("rayfl-theme");
    else localStorage.setItem("rayfl-theme", theme);
  } catch { /* then for this time only */ }
  repaint();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

let due = 0;
new ResizeObserver(() => {
  if (printing) return;
  cancelAnimationFrame(due);
  due = requestAnimationFrame(() => charts.forEach((chart) => {
    chart.chart.resize();
    if (chart.narrow !== chart.canvas.clientWidth < 520) chart.draw();
  }));
}).observe(document.body);

window.rayfl = { page, charts, tables, open, written };
})();
