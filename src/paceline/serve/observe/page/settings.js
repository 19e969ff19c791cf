/** State that all parts share: settings, the key, the theme, the model. */
import { effect, signal } from "@preact/signals";

/** @typedef {import("./types.js").Settings} Settings */

const SETTINGS = "paceline.settings";
const KEY = "paceline.key";

/** @type {Settings} */
const DEFAULTS = {
  temperature: "",
  top_p: "",
  max_tokens: "",
  seed: "",
  lockSeed: false,
  draft: "auto",
  k: "",
  lens: true,
  theme: "system",
};

/**
 * Read from a store of the browser, which may be switched off.
 * @param {() => Storage} store
 * @param {string} name
 */
function read(store, name) {
  try {
    return store().getItem(name);
  } catch {
    return null;
  }
}

/**
 * @param {() => Storage} store
 * @param {string} name
 * @param {string | null} value
 */
function write(store, name, value) {
  try {
    if (value === null) store().removeItem(name);
    else store().setItem(name, value);
  } catch {
    // the value lives as long as the page
  }
}

const forNow = () => sessionStorage;
const forGood = () => localStorage;

/** @returns {Settings} */
function storedSettings() {
  /** @type {any} */
  const settings = { ...DEFAULTS };
  try {
    const stored = JSON.parse(read(forGood, SETTINGS) ?? "{}");
    for (const [name, value] of Object.entries(DEFAULTS)) {
      if (typeof stored[name] === typeof value) settings[name] = stored[name];
    }
  } catch {
    // not ours: start anew
  }
  return settings;
}

export const settings = signal(storedSettings());
export const apiKey = signal(read(forNow, KEY) ?? read(forGood, KEY) ?? "");
export const keyWanted = signal(/** @type {string | null} */ (null)); // why the key is asked for
export const model = signal(/** @type {import("./types.js").Model | null} */ (null));
export const contextTokens = signal(/** @type {number | null} */ (null)); // of the conversation that is shown
export const announced = signal(""); // read out by screen readers
export const dark = signal(false);

/** @param {Partial<Settings>} changes */
export function change(changes) {
  settings.value = { ...settings.value, ...changes };
  write(forGood, SETTINGS, JSON.stringify({ ...storedSettings(), ...changes })); // another tab may have changed others
}

/**
 * Keep the key for this tab, or in this browser if the user asks for it.
 * @param {string} key
 * @param {boolean} remember
 */
export function keepKey(key, remember) {
  apiKey.value = key;
  write(forNow, KEY, key || null);
  write(forGood, KEY, remember && key ? key : null);
}

const systemDark = matchMedia("(prefers-color-scheme: dark)");
const seenDark = signal(systemDark.matches);
systemDark.addEventListener("change", () => (seenDark.value = systemDark.matches));
effect(() => {
  const { theme } = settings.value;
  dark.value = theme === "dark" || (theme === "system" && seenDark.value);
  document.documentElement.dataset.theme = dark.value ? "dark" : "light";
});

/** @param {string} text */
function number(text) {
  return text.trim() === "" || Number.isNaN(Number(text)) ? undefined : Number(text);
}

/**
 * Fields of a request that the settings ask for. A text that is no number is sent as it is: the server explains it.
 * @param {Settings} from
 */
export function sampling(from) {
  /** @type {Record<string, any>} */
  const fields = {};
  for (const name of /** @type {const} */ (["temperature", "top_p", "max_tokens"])) {
    if (from[name].trim() !== "") fields[name] = number(from[name]) ?? from[name];
  }
  if (from.lockSeed && from.seed.trim() !== "") fields.seed = number(from.seed) ?? from.seed;
  return fields;
}

/**
 * @param {Settings} from
 * @returns {Record<string, any>}
 */
export function speculation(from) {
  const k = from.k.trim();
  return {
    ...(from.draft === "auto" ? {} : { draft: from.draft }),
    ...(k === "" || from.draft === "off" ? {} : { k: number(k) ?? k }),
    ...(from.lens ? { details: true } : {}),
  };
}
