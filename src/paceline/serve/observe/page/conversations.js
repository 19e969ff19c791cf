/** Conversations, kept in this browser only (IndexedDB), or in memory where it keeps nothing. */
import { signal } from "@preact/signals";

/** @typedef {import("./types.js").Conversation} Conversation */
/** @typedef {import("./types.js").Listed} Listed */

const LISTED = "listed";
const WHOLE = "whole";

export const listed = signal(/** @type {Listed[]} */ ([]));
export const current = signal(/** @type {Conversation} */ (fresh()));
export const lasting = signal(true); // false: they are gone when the page closes

const tabs = channel(); // to this page in other tabs: what was stored or removed

/** @type {Map<string, Conversation>} */
const memory = new Map();
/** @type {Promise<IDBDatabase | null> | null} */
let opened = null;

function channel() {
  try {
    return new BroadcastChannel("paceline.conversations");
  } catch {
    return null; // a browser that keeps nothing may have none
  }
}

/** @returns {Conversation} */
export function fresh() {
  return { id: newId(), title: "", updated: Date.now(), system: "", messages: [] };
}

function newId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** @returns {Promise<IDBDatabase | null>} */
function database() {
  opened ??= new Promise((resolve) => {
    try {
      const request = indexedDB.open("paceline", 1);
      request.onupgradeneeded = () => {
        request.result.createObjectStore(LISTED, { keyPath: "id" });
        request.result.createObjectStore(WHOLE, { keyPath: "id" });
      };
      request.onsuccess = () => {
        request.result.onclose = () => (opened = null); // the user has cleared the site's data
        resolve(request.result);
      };
      request.onerror = () => resolve(null);
      request.onblocked = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return opened;
}

/**
 * Run a transaction over both stores; null where the browser keeps nothing.
 * @template T
 * @param {IDBTransactionMode} mode
 * @param {(listed: IDBObjectStore, whole: IDBObjectStore) => IDBRequest<T> | void} work
 * @returns {Promise<T | null>}
 */
async function within(mode, work) {
  const db = await database();
  if (!db) {
    lasting.value = false;
    return null;
  }
  return new Promise((resolve) => {
    const failed = () => {
      lasting.value = false;
      resolve(null);
    };
    try {
      const transaction = db.transaction([LISTED, WHOLE], mode);
      const request = work(transaction.objectStore(LISTED), transaction.objectStore(WHOLE));
      transaction.oncomplete = () => resolve(request ? request.result : null);
      transaction.onerror = failed;
      transaction.onabort = failed;
    } catch {
      failed();
    }
  });
}

/** Read the list; newest first. */
export async function loadList() {
  const stored = /** @type {Listed[] | null} */ (await within("readonly", (list) => list.getAll()));
  const all = stored ?? [...memory.values()];
  listed.value = all.map(({ id, title, updated }) => ({ id, title, updated })).sort((a, b) => b.updated - a.updated);
}

/** @param {string} id */
export async function open(id) {
  const stored = /** @type {Conversation | null} */ (await within("readonly", (_, whole) => whole.get(id)));
  const found = stored ?? memory.get(id);
  if (found) current.value = found;
}

/** Store a conversation. @param {Conversation} conversation */
export async function keep(conversation) {
  const { id, title, updated } = conversation;
  listed.value = [{ id, title, updated }, ...listed.value.filter((other) => other.id !== id)];
  memory.set(id, conversation);
  const stored = await within("readwrite", (list, whole) => {
    list.put({ id, title, updated });
    whole.put(conversation);
  });
  if (stored === null && lasting.value) memory.delete(id);
  tabs?.postMessage(id);
}

/**
 * @param {string} id
 * @param {string} title
 */
export async function rename(id, title) {
  if (current.value.id === id) current.value = { ...current.value, title };
  const stored = /** @type {Conversation | null} */ (await within("readonly", (_, whole) => whole.get(id)));
  const found = stored ?? memory.get(id);
  if (found) await keep({ ...found, title });
}

/** @param {string} id */
export async function remove(id) {
  listed.value = listed.value.filter((other) => other.id !== id);
  memory.delete(id);
  if (current.value.id === id) current.value = fresh();
  await within("readwrite", (list, whole) => {
    list.delete(id);
    whole.delete(id);
  });
  tabs?.postMessage(id);
}

/**
 * Show what other tabs store and remove: a conversation that is kept as this tab knew it would lose their messages.
 * @param {(id: string) => boolean} isAnswered
 */
export function followTabs(isAnswered) {
  if (!tabs) return;
  tabs.onmessage = async ({ data: id }) => {
    if (!lasting.value) return;
    await loadList();
    if (current.value.id !== id || isAnswered(id)) return;
    if (listed.value.some((other) => other.id === id)) await open(id);
    else current.value = fresh();
  };
}

/** Give a conversation to the user as a file. @param {string} id */
export async function download(id) {
  const stored = /** @type {Conversation | null} */ (await within("readonly", (_, whole) => whole.get(id)));
  const found = stored ?? memory.get(id);
  if (!found) return;
  const address = URL.createObjectURL(new Blob([JSON.stringify(found, null, 2)], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = address;
  link.download = `${found.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation"}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
