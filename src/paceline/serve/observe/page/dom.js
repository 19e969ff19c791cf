/** What every part uses to draw: tagged templates, icons, numbers as text, colours of sources. */
import { Component, h } from "preact";
import htm from "htm";

export const html = htm.bind(h);

/**
 * Draw again only when a property changed. For parts that read no signal.
 * @template {object} P
 * @param {(props: P) => any} draw
 */
export function memo(draw) {
  return class extends Component {
    /** @param {any} next */
    shouldComponentUpdate(next) {
      const now = /** @type {any} */ (this.props);
      return [...Object.keys(now), ...Object.keys(next)].some((key) => now[key] !== next[key]);
    }
    /** @param {any} props */
    render(props) {
      return draw(props);
    }
  };
}

const PATHS = {
  plus: "M12 5v14M5 12h14",
  stop: "M7 7h10v10H7z",
  retry: "M4 12a8 8 0 1 0 3-6.2M4 4v4h4",
  edit: "M4 20h4L19 9l-4-4L4 16z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  trash: "M5 7h14M10 7V5h4v2M7 7l1 13h8l1-13",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M15 5v4M9 15v4",
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  key: "M9 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM13 12h8M20 12v3M16 12v2",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.500 1.500M17.500 17.500L19 19M5 19l1.500-1.500M17.500 6.500L19 5",
  moon: "M20 14A8 8 0 0 1 10 4a8 8 0 1 0 10 10z",
  auto: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  lens: "M11 5a6 6 0 1 0 0 12 6 6 0 0 0 0-12zM15.500 15.500L20 20M8.500 12v-2M11 13V8.500M13.500 12v-1.500",
  lock: "M7 11V8a5 5 0 0 1 10 0v3M6 11h12v9H6z",
  unlock: "M7 11V8a5 5 0 0 1 9.500-2M6 11h12v9H6z",
};

/** @param {{name: keyof typeof PATHS}} props */
function Icon({ name }) {
  return html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;
}

/**
 * @param {{icon: keyof typeof PATHS, label: string, onClick?: (event: any) => void, text?: string, [key: string]: any}} props
 */
export function Button({ icon, label, text, class: extra = "", ...rest }) {
  return html`<button type="button" class=${`button ${text ? "" : "square"} ${extra}`} aria-label=${label} title=${label} ...${rest}>
    <${Icon} name=${icon} />${text ? html`<span>${text}</span>` : null}
  </button>`;
}

const SOURCES = ["target", "eagle", "eagle3", "peagle", "draft-model", "ngram", "suffix", "grammar"];

/**
 * Class that gives a source of tokens its colour.
 * @param {string | null} name
 */
export function sourceClass(name) {
  return `src-${name === null || name === "none" ? "target" : SOURCES.includes(name) ? name : "other"}`;
}

/**
 * @param {number | null | undefined} value
 * @param {number} digits after the point
 */
export function fixed(value, digits = 1) {
  return value === null || value === undefined || !Number.isFinite(value) ? "–" : value.toFixed(digits);
}

/** @param {number | null | undefined} ms */
export function duration(ms) {
  if (ms === null || ms === undefined || !Number.isFinite(ms)) return "–";
  const size = Math.abs(ms);
  return size < 10 ? `${ms.toFixed(1)} ms` : size < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(size < 10000 ? 2 : 1)} s`;
}

/**
 * @param {number} count
 * @param {string} one
 */
export function counted(count, one, many = `${one}s`) {
  return `${count} ${count === 1 ? one : many}`;
}

/**
 * A text as it shows among others: line ends and lone spaces would be invisible.
 * @param {string} text
 */
export function visible(text) {
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ {2,}/g, (spaces) => `␣×${spaces.length}`).replace(/^ $/, "␣");
}

/** @param {Fault} fault */
export function faultText(fault) {
  const where = [fault.status, fault.type, fault.code, fault.param && `field ${fault.param}`].filter(Boolean).join(" · ");
  return where ? `${fault.message} (${where})` : fault.message;
}

/** @typedef {import("./types.js").Fault} Fault */
