/** The race: one prompt and seed, plain decoding beside `auto`, two clocks, and whether the texts are the same. */
import { signal, useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";

import { answer, emptyAnswer } from "./api.js";
import { FaultBox } from "./answer.js";
import { duration, fixed, html, sourceClass } from "./dom.js";
import { bySource } from "./lens.js";
import { announced } from "./settings.js";

/** @typedef {import("./types.js").Answer} Answer */
/** @typedef {{name: "off" | "auto", title: string, answer: Answer, state: "waits" | "runs" | "done", startedMs: number}} Lane */

const PROMPT = "Write a short Python class for a bank account with deposit, withdraw and a history. Then explain each method.";
const MAX_TOKENS = 200;
const CLOCK_MS = 50;

const prompt = signal(PROMPT);
const seed = signal("7");
const maxTokens = signal(String(MAX_TOKENS));
const together = signal(false);
const lanes = signal(/** @type {Lane[]} */ ([lane("off"), lane("auto")]));
/** @type {AbortController | null} */
let running = null;
const busy = signal(false);

/**
 * @param {"off" | "auto"} name
 * @returns {Lane}
 */
function lane(name) {
  const title = name === "off" ? "Plain decoding" : "With speculation";
  return { name, title, answer: emptyAnswer(), state: "waits", startedMs: 0 };
}

/**
 * @param {string} name
 * @param {Partial<Lane>} changes
 */
function set(name, changes) {
  lanes.value = lanes.value.map((other) => (other.name === name ? { ...other, ...changes } : other));
}

/**
 * Run one lane. Its salt is new, so that neither finds the prompt in the cache that the other has filled.
 * @param {"off" | "auto"} name
 * @param {object} body
 * @param {AbortSignal} stop
 */
async function run(name, body, stop) {
  if (stop.aborted) return;
  set(name, { state: "runs", startedMs: performance.now() });
  const salt = `race-${[...crypto.getRandomValues(new Uint32Array(2))].join("-")}`;
  const asked = { ...body, cache_salt: salt, speculation: { draft: name, details: true } };
  const last = await answer(asked, stop, (now) => set(name, { answer: now }));
  set(name, { answer: last, state: "done" });
}

async function start() {
  const control = new AbortController();
  running = control;
  busy.value = true;
  lanes.value = [lane("off"), lane("auto")];
  const number = Number(seed.value);
  const body = {
    messages: [{ role: "user", content: prompt.value }],
    seed: seed.value.trim() === "" || Number.isNaN(number) ? seed.value : number,
    max_tokens: Number(maxTokens.value) || MAX_TOKENS,
  };
  if (together.value) {
    await Promise.all([run("off", body, control.signal), run("auto", body, control.signal)]);
  } else {
    await run("off", body, control.signal);
    await run("auto", body, control.signal);
  }
  if (running !== control) return;
  busy.value = false;
  const end = outcome(lanes.value);
  announced.value = end ? `Race over. Same text: ${end.same ? "yes" : "no"}. ${fixed(end.ratio, 2)} times as fast.` : "Race ended";
}

/** @param {Answer} told */
function ids(told) {
  return told.passes.flatMap((pass) => pass.tokens.map((token) => token.id));
}

/** What the race showed; null until both ended by themselves. @param {Lane[]} both */
function outcome(both) {
  const [plain, auto] = both.map((one) => one.answer);
  if (both.some((one) => one.state !== "done" || one.answer.fault || one.answer.finish === "stopped")) return null;
  const [left, right] = [ids(plain), ids(auto)];
  const sameIds = left.length === right.length && left.every((id, at) => id === right[at]);
  const same = plain.text === auto.text && plain.finish === auto.finish && sameIds;
  return { same, tokens: left.length, ratio: (plain.totalMs ?? 0) / (auto.totalMs ?? 1) };
}

/** @param {{of: Lane}} props */
function Clock({ of }) {
  const now = useSignal(0);
  const runs = of.state === "runs";
  useEffect(() => {
    if (!runs) return undefined;
    const timer = setInterval(() => (now.value = performance.now()), CLOCK_MS);
    return () => clearInterval(timer);
  }, [runs]);
  const ms = of.state === "done" ? of.answer.totalMs : runs ? Math.max(0, now.value - of.startedMs) : null;
  return html`<span class="clock">${ms === null ? "0.00" : (ms / 1000).toFixed(2)}<small> s</small></span>`;
}

/** @param {{of: Lane}} props */
function LaneView({ of }) {
  const { answer: told, state } = of;
  const tokens = ids(told).length || (told.usage?.completion_tokens ?? 0);
  const ms = state === "runs" ? performance.now() - of.startedMs : told.totalMs;
  const speed = tokens && ms ? (tokens / ms) * 1000 : null;
  return html`<section class=${`lane ${of.name}`} aria-label=${of.title} data-state=${state}>
    <header><h2>${of.title}</h2><code>draft: ${of.name}</code></header>
    <div class="dials">
      <${Clock} of=${of} />
      <dl class="facts">
        <div><dt>tokens</dt><dd>${tokens}</dd></div>
        <div><dt>tokens/s</dt><dd>${fixed(speed)}</dd></div>
        <div><dt>passes</dt><dd>${told.passes.filter((pass) => !pass.prefill).length}</dd></div>
        <div><dt>first token</dt><dd>${duration(told.firstMs)}</dd></div>
      </dl>
    </div>
    <div class="lane-text" tabindex="0" role="region" aria-label=${`Text: ${of.title}`}>
      ${told.passes.length
        ? told.passes.map((pass) => pass.tokens.map((token) => html`<span class=${`token ${sourceClass(token.from)}`}>${token.text}</span>`))
        : told.text}
    </div>
    <ul class="legend">${bySource(told.passes).map(([name, count]) => html`<li class=${sourceClass(name)}><i></i>${name === "target" ? "target's own" : name} <b>${count}</b></li>`)}</ul>
    ${told.fault ? html`<${FaultBox} fault=${told.fault} />` : null}
  </section>`;
}

function Result() {
  const end = outcome(lanes.value);
  if (!end) return html`<p class="result faint">${busy.value ? "Running…" : "Both lanes get the same prompt and seed. What differs is only how the tokens are found."}</p>`;
  return html`<p class=${`result ${end.same ? "good" : "bad"}`} data-same=${end.same ? "yes" : "no"}>
    <span>Same text: <strong>${end.same ? "yes" : "no"}</strong></span>
    <span>${end.tokens} tokens compared</span>
    <span><strong>${fixed(end.ratio, 2)}×</strong> as fast</span>
  </p>`;
}

export function Race() {
  /** @param {any} event */
  const go = (event) => {
    event.preventDefault();
    if (busy.value) running?.abort();
    else start();
  };
  /** @param {import("@preact/signals").Signal<any>} to */
  const bind = (to) => (/** @type {any} */ event) => (to.value = event.target.value);
  return html`<div class="page race"><div class="wide-column">
    <h1>Race</h1>
    <form class="race-form" onSubmit=${go}>
      <label class="field prompt"><span>Prompt</span><textarea rows="2" value=${prompt.value} onInput=${bind(prompt)}></textarea></label>
      <label class="field"><span>Seed</span><input type="text" inputmode="numeric" required value=${seed.value} onInput=${bind(seed)} /></label>
      <label class="field"><span>Tokens</span><input type="number" min="1" max="4096" value=${maxTokens.value} onInput=${bind(maxTokens)} /></label>
      <label class="field"><span>Start</span>
        <select value=${together.value ? "together" : "turns"} onChange=${(/** @type {any} */ event) => (together.value = event.target.value === "together")}>
          <option value="turns">one after the other (fair)</option>
          <option value="together">both at once</option>
        </select>
      </label>
      <button class="button main">${busy.value ? "Stop" : "Start"}</button>
    </form>
    ${together.value ? html`<p class="faint">At once, both share the machine and are decoded in the same passes: the clocks say less.</p>` : null}
    <${Result} />
    <div class="lanes">${lanes.value.map((one) => html`<${LaneView} key=${one.name} of=${one} />`)}</div>
  </div></div>`;
}
