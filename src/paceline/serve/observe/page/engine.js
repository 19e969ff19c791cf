/** The engine as it works: figures, charts and reasons from the live feed. */
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";

import { ServerError, ask, events } from "./api.js";
import { FaultBox } from "./answer.js";
import { Chart } from "./chart.js";
import { duration, fixed, html, sourceClass } from "./dom.js";
import { apiKey } from "./settings.js";

/** @typedef {import("./types.js").Live} Live */
/** @typedef {import("./types.js").Step} Step */
/** @typedef {{at: number, live: Live}} Sample at: seconds of this page's clock */

const KEPT_S = 120; // of history
const MAX_SAMPLES = 1200;
const MAX_STEPS = 1200;
const DRAW_MS = 250; // between two drawings
const RETRY_MS = 2000;

const live = signal(/** @type {Live | null} */ (null));
const history = signal(/** @type {Sample[]} */ ([]));
const steps = signal(/** @type {{at: number, step: Step}[]} */ ([]));
const fault = signal(/** @type {import("./types.js").Fault | null} */ (null));

/** @type {Sample[]} */
let samples = [];
/** @type {{at: number, step: Step}[]} */
let seen = [];

/** Add an event to the history. @param {Live} event */
function add(event) {
  const at = performance.now() / 1000;
  const newest = seen.at(-1)?.at ?? -Infinity;
  const added = event.steps
    .map((step) => ({ at: at - step.age_ms / 1000, step }))
    .filter((one) => one.at > newest + 0.001)
    .sort((a, b) => a.at - b.at);
  seen = [...seen, ...added].filter((one) => at - one.at < KEPT_S).slice(-MAX_STEPS);
  samples = [...samples, { at, live: event }].filter((one) => at - one.at < KEPT_S).slice(-MAX_SAMPLES);
}

/** Follow the feed until told to stop; connect again when it breaks. @param {AbortSignal} stop */
async function follow(stop) {
  let drawn = 0;
  while (!stop.aborted) {
    try {
      for await (const event of events(await ask("v1/speculation/live", { signal: stop }))) {
        if (!event.ready) fault.value = { message: "the engine is not ready: it loads, or is being replaced" };
        if (event.tokens_per_s === undefined) continue; // it has told nothing yet
        add(event);
        if (performance.now() - drawn < DRAW_MS) continue;
        drawn = performance.now();
        if (event.ready) fault.value = null;
        live.value = event;
        history.value = samples;
        steps.value = seen;
      }
    } catch (error) {
      if (stop.aborted) return;
      fault.value = error instanceof ServerError ? error.fault : { message: `the feed broke: ${error}`, type: "connection" };
      if (fault.value.status === 401) return; // a key is asked for; with a new one this begins anew
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

/** @param {{name: string, value: string, note?: string, mark?: string}} props */
function Tile({ name, value, note, mark }) {
  return html`<div class="tile"><dt>${name}</dt><dd data-figure=${mark}>${value}</dd>${note ? html`<dd class="note">${note}</dd>` : null}</div>`;
}

/** @param {{now: Live}} props */
function Tiles({ now }) {
  const { tokens_per_s: speed, plain_tokens_per_s: plain, rows_running: rows } = now;
  const estimate = plain ? `plain ${fixed(plain)} (estimate)` : "plain: not known yet";
  return html`<dl class="tiles">
    <${Tile} name="tokens/s" mark="tokens_per_s" value=${fixed(speed)} note=${rows ? estimate : "idle"} />
    <${Tile} name="speed-up" mark="speedup" value=${plain && speed ? `${fixed(speed / plain, 2)}×` : "–"} note="estimated" />
    <${Tile} name="tokens per pass" mark="tokens_per_pass" value=${fixed(now.tokens_per_pass, 2)} note="1 is plain decoding" />
    <${Tile} name="first token" value=${duration(now.ttft_ms.p50)} note=${`p95 ${duration(now.ttft_ms.p95)}`} />
    <${Tile} name="time per token" value=${duration(now.tpot_ms.p50)} note=${`p95 ${duration(now.tpot_ms.p95)}`} />
    <${Tile} name="rows" mark="rows_running" value=${String(now.rows_running)} note=${`${now.rows_waiting} waiting`} />
    <${Tile} name="KV pages" mark="pages_used" value=${String(now.pages_used)} note=${`of ${now.pages_total}`} />
  </dl>`;
}

/** @param {{now: Live}} props */
function Acceptance({ now }) {
  const rates = now.acceptance_by_position.slice(0, 16);
  return html`<figure class="chart">
    <figcaption><h2>Acceptance by position <small>share of verified drafts</small></h2></figcaption>
    ${rates.length
      ? html`<ol class="columns">${rates.map(
          (rate, at) => html`<li><b>${Math.round(rate * 100)}</b><i style=${{ height: `${Math.round(rate * 100)}%` }}></i><span>${at + 1}</span></li>`,
        )}</ol>`
      : html`<p class="faint none">No draft has been verified yet.</p>`}
  </figure>`;
}

/** @param {{now: Live}} props */
function Sources({ now }) {
  const counts = Object.entries(now.tokens_by_source).filter(([, count]) => count > 0).sort((a, b) => b[1] - a[1]);
  return html`<figure class="chart whole">
    <figcaption><h2>Tokens by source <small>since the engine started</small></h2></figcaption>
    <div class="shares" aria-hidden="true">${counts.map(([name, count]) => html`<i class=${sourceClass(name)} style=${{ flexGrow: count }}></i>`)}</div>
    <ul class="legend" aria-label="Tokens by source">${counts.map(
      ([name, count]) => html`<li class=${sourceClass(name)}><i></i>${name === "target" ? "target's own" : name} <b data-source=${name}>${count}</b></li>`,
    )}</ul>
  </figure>`;
}

/** @param {{now: Live}} props */
function Depths({ now }) {
  const names = Object.keys(now.k_by_drafter);
  const most = Math.max(1, ...Object.values(now.k_by_drafter).map((counts) => counts.length));
  return html`<figure class="chart">
    <figcaption><h2>Passes by K <small>drafts verified in a pass</small></h2></figcaption>
    ${names.length
      ? html`<div class="scroll" tabindex="0" role="region" aria-label="Passes by K"><table class="heat">
          <thead><tr><th scope="col">drafter</th>${Array.from({ length: most }, (_, k) => html`<th scope="col">${k}</th>`)}</tr></thead>
          <tbody>${names.map((name) => {
            const counts = now.k_by_drafter[name];
            const largest = Math.max(1, ...counts);
            return html`<tr class=${sourceClass(name)}><th scope="row"><i></i>${name}</th>${Array.from({ length: most }, (_, k) => {
              const count = counts[k] ?? 0;
              return html`<td style=${{ "--share": `${Math.round((count / largest) * 36)}%` }}>${count || ""}</td>`;
            })}</tr>`;
          })}</tbody>
        </table></div>`
      : html`<p class="faint none">No pass yet.</p>`}
  </figure>`;
}

/** @param {{now: Live}} props */
function Why({ now }) {
  const newest = [...now.steps].sort((a, b) => a.age_ms - b.age_ms);
  return html`<figure class="chart whole">
    <figcaption><h2>Why this K <small>the last steps, newest first</small></h2></figcaption>
    ${newest.length
      ? html`<div class="scroll" tabindex="0" role="region" aria-label="The last steps"><table class="steps">
          <thead><tr><th scope="col">drafter</th><th scope="col">K</th><th scope="col">rows</th><th scope="col">tokens</th><th scope="col">ms</th><th scope="col">predicted</th><th scope="col" class="why">why</th></tr></thead>
          <tbody>${newest.map(
            (step) => html`<tr><td><span class=${`chip ${sourceClass(step.drafter)}`}>${step.drafter ?? "none"}</span></td><td>${step.k_max === step.k_mean ? step.k_max : `${fixed(step.k_mean)} (${step.k_max})`}</td><td>${step.rows}</td><td>${step.tokens}</td><td>${fixed(step.step_ms)}</td><td>${fixed(step.expected_ms)}</td><td class="why">${step.why}</td></tr>`,
          )}</tbody>
        </table></div>`
      : html`<p class="faint none">No step yet. Ask something in the chat.</p>`}
  </figure>`;
}

function Charts() {
  const now = history.value.at(-1)?.at ?? 0;
  const times = history.value.map(({ at }) => Math.round((at - now) * 10) / 10);
  /** @param {(of: Live) => number | null} read */
  const series = (read) => history.value.map((sample) => read(sample.live));
  /** @param {(of: Live) => number | null} read without a row there is no speed */
  const busy = (read) => series((of) => (of.rows_running ? read(of) : null));
  const speeds = [times, busy((of) => of.tokens_per_s), busy((of) => of.plain_tokens_per_s)];
  const rows = [times, series((of) => of.rows_running), series((of) => of.rows_waiting)];
  const pages = [times, series((of) => of.pages_used)];
  const drafters = [...new Set(steps.value.map(({ step }) => step.drafter ?? "none"))].sort();
  const depth = [
    [times[0] ?? 0, ...steps.value.map(({ at }) => at - now)], // from where the other charts begin
    ...drafters.map((name) => [null, ...steps.value.map(({ step }) => ((step.drafter ?? "none") === name ? step.k_mean : null))]),
  ];
  const last = history.value.at(-1)?.live;
  const dots = drafters.map((name) => ({ label: name, color: `--${sourceClass(name === "none" ? null : name)}`, points: true }));
  return html`
    <${Chart} title="Speed" unit="tokens/s" data=${speeds} said=${`Tokens per second over time, now ${fixed(last?.tokens_per_s)}`}
      lines=${[{ label: "measured", color: "--accent", fill: true }, { label: "plain, estimated", color: "--faint", dash: [5, 4] }]} />
    <${Chart} title="K and drafter" unit="mean drafts a row, by step" data=${depth} lines=${dots} said="Drafts per row of each step, by drafter" />
    <${Sources} now=${last} />
    <${Acceptance} now=${last} />
    <${Depths} now=${last} />
    <${Chart} title="Rows" unit="requests" data=${rows} said=${`Rows over time, now ${last?.rows_running} running`}
      lines=${[{ label: "running", color: "--accent", fill: true }, { label: "waiting", color: "--warn" }]} />
    <${Chart} title="KV pages" unit="held" data=${pages} said=${`Pages over time, now ${last?.pages_used}`} lines=${[{ label: "held", color: "--accent", fill: true }]} />`;
}

/** @param {{replicas: import("./types.js").Replica[]}} props */
function Fleet({ replicas }) {
  return html`<figure class="chart fleet">
    <figcaption><h2>Replicas <small>${replicas.filter((one) => one.state === "up").length} of ${replicas.length} up</small></h2></figcaption>
    <div class="scroll" tabindex="0" role="region" aria-label="Replicas"><table>
      <thead><tr>${["replica", "state", "cores", "rows", "TPOT", "K", "hits", "pages", "resumes"].map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
      <tbody>${replicas.map((one) => html`<tr data-replica=${one.replica}><td>${one.replica}</td><td data-state=${one.state}>${one.state}</td><td>${one.cores}</td>
        <td>${one.rows}</td><td>${duration(one.tpot_ms)}</td><td>${fixed(one.k_mean)}</td>
        <td>${one.hit_rate === null ? "–" : `${Math.round(100 * one.hit_rate)} %`}</td><td>${one.pages_held}</td><td>${one.resumes}</td></tr>`)}</tbody>
    </table></div>
  </figure>`;
}

export function Engine() {
  const key = apiKey.value;
  useEffect(() => {
    let control = new AbortController();
    const attend = () => {
      control.abort();
      control = new AbortController();
      if (!document.hidden) follow(control.signal); // nobody looks: the server sends nothing
    };
    attend();
    document.addEventListener("visibilitychange", attend);
    return () => {
      document.removeEventListener("visibilitychange", attend);
      control.abort();
    };
  }, [key]);
  const now = live.value;
  return html`<div class="page engine"><div class="wide-column">
    <h1>Engine</h1>
    ${fault.value ? html`<${FaultBox} fault=${fault.value} />` : null}
    ${now ? html`<${Tiles} now=${now} />${now.replicas ? html`<${Fleet} replicas=${now.replicas} />` : null}<div class="charts"><${Charts} /><${Why} now=${now} /></div>` : fault.value ? null : html`<p class="faint">Waiting for the feed…</p>`}
  </div></div>`;
}
