/** Chat: conversations, messages, the field to write in. */
import { batch, computed, signal, useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";

import { AnswerView } from "./answer.js";
import { answer, emptyAnswer } from "./api.js";
import { current, download, followTabs, fresh, keep, lasting, listed, loadList, open, remove, rename } from "./conversations.js";
import { Button, faultText, html } from "./dom.js";
import { Drawer } from "./drawer.js";
import { copy } from "./markdown.js";
import { announced, change, contextTokens, sampling, settings, speculation } from "./settings.js";

/** @typedef {import("./types.js").ChatMessage} ChatMessage */
/** @typedef {import("./types.js").Conversation} Conversation */
/** @typedef {import("./types.js").Answer} Answer */

const TITLE_CHARS = 48;
const NEAR_END = 80; // pixels from the end within which the view follows the text
const SUGGESTIONS = [
  "Explain what a draft is in cycling, in three sentences.",
  "Write a Python function that returns the n-th Fibonacci number.",
  "List the planets of the solar system with one fact for each.",
];

/** @type {AbortController | null} */
let running = null;
const busy = signal(/** @type {string | null} */ (null)); // id of the conversation that is being answered
const listOpen = signal(false);
const drawerOpen = signal(matchMedia("(min-width: 1200px)").matches);
const shownId = computed(() => current.value.id); // `current` itself changes with each frame of an answer
const draft = signal(""); // what the user has written and not sent

followTabs((id) => busy.value === id);

/** @param {Conversation} conversation */
function bodyOf(conversation) {
  const system = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  const said = conversation.messages.map(({ role, content }) => ({ role, content }));
  const asked = speculation(settings.value);
  return {
    messages: [...system, ...said],
    ...sampling(settings.value),
    ...(Object.keys(asked).length ? { speculation: asked } : {}),
  };
}

/** Answer the last message of a conversation. @param {Conversation} asked */
async function respond(asked) {
  running?.abort();
  const control = new AbortController();
  running = control;
  const body = bodyOf(asked);
  let latest = asked;
  /** @param {Answer} now */
  const withAnswer = (now) => {
    /** @type {ChatMessage} */
    const message = { role: "assistant", content: now.text, answer: now };
    latest = { ...latest, ...changed(asked.id), updated: Date.now(), messages: [...asked.messages, message] };
    return latest;
  };
  /** @param {Answer} now */
  const show = (now) => {
    if (current.value.id === asked.id && running === control) current.value = withAnswer(now);
  };
  batch(() => {
    busy.value = asked.id;
    show(emptyAnswer());
  });
  await keep({ ...asked, updated: Date.now() });
  const last = await answer(body, control.signal, show);
  const askedAnew = running !== control && busy.value === asked.id;
  if (running === control) {
    running = null;
    busy.value = null;
  }
  if (!askedAnew && listed.value.some((other) => other.id === asked.id)) await keep(withAnswer(last));
  if (last.seed !== null && !settings.value.lockSeed) change({ seed: String(last.seed) });
  announced.value = last.fault ? `Error: ${faultText(last.fault)}` : `Answer complete: ${last.usage?.completion_tokens ?? 0} tokens`;
}

/** What the user may change while an answer is written. @param {string} id */
function changed(id) {
  const { title, system } = current.value;
  if (current.value.id === id) return { title, system };
  const found = listed.value.find((other) => other.id === id);
  return found ? { title: found.title } : {};
}

/** @param {string} content */
function say(content) {
  const now = current.value;
  const title = now.title || content.trim().replace(/\s+/g, " ").slice(0, TITLE_CHARS);
  current.value = { ...now, title, messages: [...now.messages, { role: "user", content }] };
  return respond(current.value);
}

/** Ask again from a message of the user on, with other words if given. @param {number} index @param {string} [content] */
function again(index, content) {
  const { messages } = current.value;
  const asked = content === undefined ? messages[index] : { ...messages[index], content };
  current.value = { ...current.value, messages: [...messages.slice(0, index), asked] };
  return respond(current.value);
}

function stop() {
  running?.abort();
}

function startNew() {
  current.value = fresh();
  listOpen.value = false;
  document.getElementById("say")?.focus();
}

/** @param {import("./types.js").Listed} item */
function drop({ id, title }) {
  if (!confirm(`Delete "${title}"?`)) return;
  if (busy.value === id) stop();
  remove(id);
}

/** A name of its own, as each drawing would call a new function again. @param {HTMLInputElement | null} field */
function selectAll(field) {
  field?.select();
}

/** @param {{item: import("./types.js").Listed}} props */
function ListItem({ item }) {
  const renaming = useSignal(false);
  const here = shownId.value === item.id;
  if (renaming.value) {
    /** @param {any} event */
    const done = (event) => {
      event.preventDefault();
      renaming.value = false;
      const title = new FormData(event.target).get("title");
      if (String(title).trim()) rename(item.id, String(title).trim());
    };
    return html`<li><form class="rename" onSubmit=${done}>
      <input name="title" aria-label="New name" maxlength="120" defaultValue=${item.title} ref=${selectAll}
        onKeyDown=${(/** @type {any} */ event) => event.key === "Escape" && (renaming.value = false)} />
    </form></li>`;
  }
  return html`<li class=${here ? "here" : ""}>
    <button type="button" class="open" aria-current=${here ? "true" : undefined}
      onClick=${() => (open(item.id), (listOpen.value = false))}>${item.title || "Untitled"}</button>
    <span class="tools">
      <${Button} icon="edit" label=${`Rename ${item.title}`} onClick=${() => (renaming.value = true)} />
      <${Button} icon="save" label=${`Export ${item.title}`} onClick=${() => download(item.id)} />
      <${Button} icon="trash" label=${`Delete ${item.title}`} onClick=${() => drop(item)} />
    </span>
  </li>`;
}

function Conversations() {
  return html`<nav class=${`list ${listOpen.value ? "open" : ""}`} aria-label="Conversations">
    <div class="pane-head">
      <h2>Conversations</h2>
      <${Button} icon="close" class="only-narrow" label="Close the list" onClick=${() => (listOpen.value = false)} />
    </div>
    <${Button} icon="plus" label="New conversation" text="New" class="wide" onClick=${startNew} />
    <ul>${listed.value.map((item) => html`<${ListItem} key=${item.id} item=${item} />`)}</ul>
    <p class="faint">${lasting.value ? "Kept in this browser only." : "This browser keeps nothing: they are gone when the page closes."}</p>
  </nav>`;
}

/** @param {{message: ChatMessage, index: number}} props */
function UserMessage({ message, index }) {
  const editing = useSignal(false);
  if (editing.value) {
    /** @param {any} event */
    const done = (event) => {
      event.preventDefault();
      editing.value = false;
      again(index, String(new FormData(event.target).get("content")));
    };
    return html`<form class="said editing" onSubmit=${done}>
      <textarea name="content" aria-label="Edit the message" rows="3" ref=${(/** @type {any} */ field) => field?.focus()}
        onKeyDown=${(/** @type {any} */ event) => event.key === "Escape" && (editing.value = false)}>${message.content}</textarea>
      <div class="row"><button type="button" class="plain" onClick=${() => (editing.value = false)}>Cancel</button><button class="main">Send again</button></div>
    </form>`;
  }
  return html`<div class="said">
    <p>${message.content}</p>
    <span class="tools">
      <${Button} icon="edit" label="Edit and ask again" onClick=${() => (editing.value = true)} />
      <${Button} icon="copy" label="Copy the message" onClick=${() => copy(message.content)} />
    </span>
  </div>`;
}

/** @param {{message: ChatMessage, index: number, working: boolean, lens: boolean}} props */
function Reply({ message, index, working, lens }) {
  const onSeed = (/** @type {number} */ seed) => {
    change({ seed: String(seed), lockSeed: true });
    drawerOpen.value = true;
  };
  const shown = message.answer ?? { ...emptyAnswer(), text: message.content };
  return html`<div class="reply">
    <${AnswerView} answer=${shown} lens=${lens} busy=${working} onSeed=${onSeed} />
    ${working ? null : html`<span class="tools">
      <${Button} icon="copy" label="Copy the answer" onClick=${() => copy(message.content)} />
      <${Button} icon="retry" label="Answer again" onClick=${() => again(index - 1)} />
    </span>`}
  </div>`;
}

function Messages() {
  const { messages, id } = current.value;
  const view = useRef(/** @type {HTMLElement | null} */ (null));
  const follows = useRef(true);
  const working = busy.value === id;
  const { lens } = settings.value;
  useLayoutEffect(() => {
    if (follows.current && view.current) view.current.scrollTop = view.current.scrollHeight;
  });
  useEffect(() => {
    follows.current = true;
  }, [id, messages.length]);
  const onScroll = () => {
    const seen = view.current;
    if (seen) follows.current = seen.scrollHeight - seen.scrollTop - seen.clientHeight < NEAR_END;
  };
  if (!messages.length) {
    return html`<div class="empty">
      <h1>What shall it write?</h1>
      <p>Turn the lens on to see which tokens were drafted, which drafts were refused, and what it saved.</p>
      <ul>${SUGGESTIONS.map((text) => html`<li><button type="button" onClick=${() => say(text)}>${text}</button></li>`)}</ul>
    </div>`;
  }
  return html`<div class="messages" ref=${view} onScroll=${onScroll} tabindex="0" role="region" aria-label="Messages">
    <div class="column">${messages.map((message, index) =>
      message.role === "user"
        ? html`<${UserMessage} key=${`${id} ${index}`} message=${message} index=${index} />`
        : html`<${Reply} key=${`${id} ${index}`} message=${message} index=${index} working=${working && index === messages.length - 1} lens=${lens} />`,
    )}</div>
  </div>`;
}

function Composer() {
  const field = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  const working = busy.value === current.value.id;
  const { lens } = settings.value;
  useLayoutEffect(() => {
    const area = field.current;
    if (!area) return;
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight, innerHeight * 0.4)}px`;
  }, [draft.value]);
  /** @param {Event} event */
  const send = (event) => {
    event.preventDefault();
    const content = draft.value;
    if (!content.trim() || working) return;
    draft.value = "";
    say(content);
  };
  /** @param {KeyboardEvent} event */
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    if (event.key === "Escape" && working) stop();
  };
  return html`<form class="composer" onSubmit=${send}>
    <textarea id="say" ref=${field} rows="1" placeholder="Write a message" aria-label="Message" value=${draft.value}
      onInput=${(/** @type {any} */ event) => (draft.value = event.target.value)} onKeyDown=${onKey}></textarea>
    <div class="row">
      <${Button} icon="menu" class="only-narrow" label="Conversations" onClick=${() => (listOpen.value = !listOpen.value)} />
      <${Button} icon="lens" text="Lens" label="Lens: show where each token came from" class="toggle" aria-pressed=${lens} onClick=${() => change({ lens: !lens })} />
      <${Button} icon="sliders" text="Settings" label="Settings" class="toggle" aria-pressed=${drawerOpen.value} onClick=${() => (drawerOpen.value = !drawerOpen.value)} />
      <span class="grow"></span>
      ${working
        ? html`<${Button} icon="stop" text="Stop" label="Stop the answer" class="main" onClick=${stop} />`
        : html`<button class="button main" aria-label="Send" disabled=${!draft.value.trim()}>Send</button>`}
    </div>
  </form>`;
}

export function Chat() {
  useEffect(() => {
    loadList();
  }, []);
  const newest = current.value.messages.findLast(({ answer }) => answer?.usage); // one that was stopped has none
  const last = newest?.answer?.usage?.total_tokens ?? null;
  useEffect(() => {
    contextTokens.value = last;
  }, [last]);
  return html`<div class=${`chat ${drawerOpen.value ? "with-drawer" : ""}`}>
    <${Conversations} />
    <section class="talk" aria-label="Conversation">
      <${Messages} />
      <${Composer} />
    </section>
    ${drawerOpen.value ? html`<${Drawer} onClose=${() => (drawerOpen.value = false)} />` : null}
  </div>`;
}
