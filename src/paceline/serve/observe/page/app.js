/** The page: header, three tabs, the key. */
import { effect, signal } from "@preact/signals";
import { render } from "preact";
import { useEffect, useRef } from "preact/hooks";

import { loadModel, ServerError } from "./api.js";
import { Chat } from "./chat.js";
import { Button, faultText, html } from "./dom.js";
import { Engine } from "./engine.js";
import { Race } from "./race.js";
import { announced, apiKey, change, contextTokens, dark, keepKey, keyWanted, model, settings } from "./settings.js";

const TABS = [
  { name: "chat", title: "Chat", part: Chat },
  { name: "race", title: "Race", part: Race },
  { name: "engine", title: "Engine", part: Engine },
];
const RETRY_MS = 3000;

const tab = signal(named(location.hash));
const trouble = signal("");
const asksKey = signal(false);

/** @param {string} hash */
function named(hash) {
  return TABS.some(({ name }) => `#${name}` === hash) ? hash.slice(1) : "chat";
}

addEventListener("hashchange", () => (tab.value = named(location.hash)));

/** Ask for the model until the server has one. */
async function connect() {
  try {
    await loadModel();
    trouble.value = "";
  } catch (error) {
    if (error instanceof ServerError && error.fault.status === 401) return;
    trouble.value = error instanceof ServerError ? faultText(error.fault) : String(error);
    setTimeout(connect, RETRY_MS);
  }
}

function Tabs() {
  /** @param {KeyboardEvent} event */
  const onKey = (event) => {
    const at = TABS.findIndex(({ name }) => name === tab.value);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: TABS.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const { name } = TABS[(to + TABS.length) % TABS.length];
    location.hash = name;
    document.getElementById(`tab-${name}`)?.focus();
  };
  return html`<div class="tabs" role="tablist" aria-label="Parts of the page" onKeyDown=${onKey}>
    ${TABS.map(
      ({ name, title }) => html`<button type="button" role="tab" id=${`tab-${name}`} aria-selected=${tab.value === name} aria-controls="part"
        tabindex=${tab.value === name ? 0 : -1} onClick=${() => (location.hash = name)}>${title}</button>`,
    )}
  </div>`;
}

function ModelInfo() {
  const served = model.value;
  if (!served) return html`<span class="model faint">${trouble.value ? "not connected" : "…"}</span>`;
  const used = contextTokens.value ?? 0;
  const share = Math.min(1, used / served.max_model_len);
  return html`<span class="model" title=${`${used} of ${served.max_model_len} tokens of the context`}>
    <span class="model-name">${served.id}</span>
    <span class="context">
      <span class="meter"><i style=${{ width: `${(share * 100).toFixed(1)}%` }}></i></span>
      <span>${used}<small> / ${served.max_model_len} tokens</small></span>
    </span>
  </span>`;
}

const THEMES = /** @type {const} */ ({ system: "light", light: "dark", dark: "system" });

function ThemeSwitch() {
  const { theme } = settings.value;
  const icon = theme === "system" ? "auto" : dark.value ? "moon" : "sun";
  const names = { system: "as the system", light: "light", dark: "dark" };
  return html`<${Button} icon=${icon} label=${`Colours: ${names[theme]}. Change`} onClick=${() => change({ theme: THEMES[theme] })} />`;
}

function KeyDialog() {
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const shown = asksKey.value || keyWanted.value !== null;
  useEffect(() => {
    if (shown && !dialog.current?.open) dialog.current?.showModal();
    if (!shown) dialog.current?.close();
  }, [shown]);
  const close = () => {
    asksKey.value = false;
    keyWanted.value = null;
  };
  /** @param {Event} event Escape was pressed */
  const onCancel = (event) => {
    event.preventDefault();
    close();
  };
  /** @param {any} event */
  const done = (event) => {
    event.preventDefault();
    const given = new FormData(event.target);
    keepKey(String(given.get("key")).trim(), given.get("remember") !== null);
    close();
    connect();
  };
  return html`<dialog ref=${dialog} onCancel=${onCancel} aria-labelledby="key-title">
    <form onSubmit=${done}>
      <h2 id="key-title">API key</h2>
      ${keyWanted.value ? html`<p class="fault">${keyWanted.value}</p>` : html`<p class="faint">Sent with every request of this page.</p>`}
      <label class="field"><span>Key</span><input name="key" type="password" autocomplete="off" spellcheck="false"
        pattern=" *[!-~]* *" title="Letters, digits and signs of ASCII: no others can be sent" value=${apiKey.value} /></label>
      <label class="check"><input name="remember" type="checkbox" /><span>Remember it in this browser; otherwise until this tab is closed</span></label>
      <div class="row"><button type="button" class="plain" onClick=${close}>Cancel</button><button class="button main">Use the key</button></div>
    </form>
  </dialog>`;
}

function App() {
  const { part: Part, title } = TABS.find(({ name }) => name === tab.value) ?? TABS[0];
  return html`
    <header class="top">
      <span class="brand"><i></i><i></i><i></i><b>Paceline</b></span>
      <${Tabs} />
      <${ModelInfo} />
      <${ThemeSwitch} />
      <${Button} icon="key" label="API key" onClick=${() => (asksKey.value = true)} />
    </header>
    ${trouble.value ? html`<p class="fault banner" role="alert">${trouble.value}</p>` : null}
    <main id="part" role="tabpanel" aria-labelledby=${`tab-${tab.value}`} aria-label=${title}><${Part} key=${tab.value} /></main>
    <div class="only-read" role="status" aria-live="polite">${announced.value}</div>
    <${KeyDialog} />`;
}

effect(() => {
  document.title = `${TABS.find(({ name }) => name === tab.value)?.title} · Paceline`;
});
const root = /** @type {HTMLElement} */ (document.getElementById("app"));
root.textContent = "";
render(html`<${App} />`, root);
connect();
