/** A chart over time, by uPlot, in the colours of the theme. */
import { useEffect, useRef } from "preact/hooks";
import UPlot from "uplot";

import { html } from "./dom.js";
import { dark } from "./settings.js";

/** @typedef {{label: string, color: string, dash?: number[], fill?: boolean, points?: boolean}} Line color: name of a CSS variable */

const HEIGHT = 150;

/** @param {string} name */
function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/**
 * @param {Line[]} lines
 * @param {number} width
 * @returns {import("uplot").Options}
 */
function options(lines, width) {
  const axis = { stroke: cssColor("--faint"), font: "11px system-ui, sans-serif", grid: { stroke: cssColor("--line"), width: 1 }, ticks: { show: false } };
  return {
    width,
    height: HEIGHT,
    padding: [8, 16, 0, 0],
    cursor: { y: false, drag: { x: false, y: false } },
    legend: { show: false },
    scales: { x: { time: false, range: (_, low) => [Math.min(-10, Math.floor(low)), 0] }, y: { range: (_, _low, high) => [0, Math.max(1, high * 1.1)] } },
    axes: [
      { ...axis, size: 24, values: (_, ticks) => ticks.map((tick) => (tick === 0 ? "now" : `${tick} s`)) },
      { ...axis, size: 40 },
    ],
    series: [
      {},
      ...lines.map((line) => ({
        label: line.label,
        stroke: cssColor(line.color),
        width: 1.5,
        dash: line.dash,
        fill: line.fill ? `${cssColor(line.color)}22` : undefined,
        paths: line.points ? () => null : undefined,
        points: line.points ? { show: true, size: 5, fill: cssColor(line.color), stroke: cssColor(line.color) } : { show: false },
      })),
    ],
  };
}

/** @param {{title: string, unit: string, lines: Line[], data: (number | null)[][], said: string}} props said: the chart in words */
export function Chart({ title, unit, lines, data, said }) {
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  const plot = useRef(/** @type {UPlot | null} */ (null));
  const theme = dark.value;
  const names = lines.map((line) => line.label).join();
  useEffect(() => {
    const root = place.current;
    if (!root) return undefined;
    const made = new UPlot(options(lines, root.clientWidth), /** @type {any} */ (data), root);
    plot.current = made;
    const observer = new ResizeObserver(() => made.setSize({ width: root.clientWidth, height: HEIGHT }));
    observer.observe(root);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [theme, names]);
  useEffect(() => {
    plot.current?.setData(/** @type {any} */ (data));
  }, [data]);
  return html`<figure class="chart">
    <figcaption>
      <h2>${title} <small>${unit}</small></h2>
      <ul class="legend">${lines.map((line) => html`<li style=${{ "--c": `var(${line.color})` }}><i class=${line.dash ? "dashed" : ""}></i>${line.label}</li>`)}</ul>
    </figcaption>
    <div class="plot" ref=${place} role="img" aria-label=${said}></div>
  </figure>`;
}
