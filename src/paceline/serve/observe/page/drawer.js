/** The drawer: system prompt, sampling, seed, and what to draft with. */
import { current, keep } from "./conversations.js";
import { Button, html } from "./dom.js";
import { change, model, settings } from "./settings.js";

/** @typedef {import("./types.js").Settings} Settings */

/**
 * A field of the settings; an empty one leaves the choice to the server.
 * @param {{name: "temperature" | "top_p" | "max_tokens" | "k", label: string, hint: string, step: string, min: string, max?: string}} props
 */
function NumberField({ name, label, hint, ...bounds }) {
  return html`<label class="field"><span>${label}</span>
    <input type="number" inputmode="decimal" placeholder=${hint} value=${settings.value[name]} ...${bounds}
      onInput=${(/** @type {any} */ event) => change({ [name]: event.target.value })} />
  </label>`;
}

function SeedField() {
  const { seed, lockSeed } = settings.value;
  return html`<div class="field">
    <label for="seed">Seed</label>
    <div class="joined">
      <input id="seed" type="text" inputmode="numeric" placeholder="drawn by the server" value=${seed}
        onInput=${(/** @type {any} */ event) => change({ seed: event.target.value, lockSeed: event.target.value !== "" })} />
      <${Button} icon=${lockSeed ? "lock" : "unlock"} label=${lockSeed ? "The seed is locked; draw a new one each time" : "Lock this seed"}
        aria-pressed=${lockSeed} disabled=${seed === ""} onClick=${() => change({ lockSeed: !lockSeed })} />
    </div>
    <small>${lockSeed ? "Locked: the same seed gives the same text." : "Shows the last answer's seed; lock it to repeat that text."}</small>
  </div>`;
}

function DraftField() {
  const { draft } = settings.value;
  const names = ["auto", "off", ...(model.value?.drafters ?? [])];
  if (!names.includes(draft)) names.push(draft);
  return html`<label class="field"><span>Draft with</span>
    <select value=${draft} onChange=${(/** @type {any} */ event) => change({ draft: event.target.value })}>
      ${names.map((name) => html`<option value=${name}>${name === "auto" ? "auto (the engine's choice)" : name === "off" ? "off (plain decoding)" : name}</option>`)}
    </select>
  </label>`;
}

function SamplingFields() {
  return html`
    <${NumberField} name="temperature" label="Temperature" hint="server's default" step="0.1" min="0" max="2" />
    <${NumberField} name="top_p" label="Top p" hint="server's default" step="0.05" min="0" max="1" />
    <${NumberField} name="max_tokens" label="Max tokens" hint="to the end of the context" step="1" min="1" />
    <${SeedField} />
    <${DraftField} />
    <${NumberField} name="k" label="Drafts a pass, at most" hint="the engine's choice" step="1" min="0" max="64" />`;
}

/** @param {{onClose: () => void}} props */
export function Drawer({ onClose }) {
  /** @param {any} event */
  const onSystem = (event) => {
    current.value = { ...current.value, system: event.target.value };
  };
  const onSystemDone = () => {
    if (current.value.messages.length) keep(current.value);
  };
  return html`<aside class="drawer" aria-label="Settings">
    <div class="pane-head"><h2>Settings</h2><${Button} icon="close" label="Close the settings" onClick=${onClose} /></div>
    <label class="field"><span>System prompt</span>
      <textarea rows="4" placeholder="None" value=${current.value.system} onInput=${onSystem} onChange=${onSystemDone}></textarea>
    </label>
    <${SamplingFields} />
  </aside>`;
}
