/** Requests to the server: the key, errors as the server words them, and streams of events. */
import { apiKey, keyWanted, model } from "./settings.js";

/** @typedef {import("./types.js").Fault} Fault */
/** @typedef {import("./types.js").Answer} Answer */

export class ServerError extends Error {
  /** @param {Fault} fault */
  constructor(fault) {
    super(fault.message);
    this.fault = fault;
  }
}

/**
 * Ask a route. Raises `ServerError` for a refusal and for a server that cannot be reached.
 * @param {string} path
 * @param {{body?: object, signal?: AbortSignal}} options
 */
export async function ask(path, { body, signal } = {}) {
  /** @type {Record<string, string>} */
  const headers = { accept: "application/json, text/event-stream" };
  if (apiKey.value) headers.authorization = `Bearer ${apiKey.value}`;
  if (body) headers["content-type"] = "application/json";
  /** @type {Response} */
  let response;
  try {
    response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
      referrerPolicy: "no-referrer",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ServerError({ message: "the server cannot be reached; is it still running?", type: "connection" });
  }
  if (response.ok) return response;
  const fault = await faultOf(response);
  if (response.status === 401) keyWanted.value = fault.message;
  throw new ServerError(fault);
}

/**
 * @param {Response} response
 * @returns {Promise<Fault>}
 */
async function faultOf(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    if (typeof error.message === "string") return { ...error, status: response.status };
  } catch {
    // a proxy answered in words of its own
  }
  return { message: text.slice(0, 300) || response.statusText, status: response.status };
}

/**
 * The data of server-sent events, as JSON.
 * @param {Response} response
 * @returns {AsyncGenerator<any>}
 */
export async function* events(response) {
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  const decoder = new TextDecoder();
  let unread = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      unread += decoder.decode(value, { stream: true });
      const blocks = unread.split(/\r?\n\r?\n/);
      unread = /** @type {string} */ (blocks.pop());
      for (const block of blocks) {
        const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length === 0) continue;
        if (data[0] === "[DONE]") return;
        yield JSON.parse(data.join("\n"));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Learn which model is served. */
export async function loadModel() {
  const { data } = await (await ask("v1/models")).json();
  model.value = data[0];
  keyWanted.value = null;
}

/** @returns {Answer} */
export function emptyAnswer() {
  return { text: "", reasoning: "", passes: [], seed: null, usage: null, finish: null, fault: null, firstMs: null, totalMs: null };
}

/** Time between two drawings: a long answer takes longer to draw. @param {Answer} now */
function pauseMs(now) {
  return Math.min(400, now.passes.length / 4 + now.text.length / 200);
}

/**
 * Stream an answer to a conversation. Never raises: what went wrong is in the answer.
 * @param {object} body
 * @param {AbortSignal} signal
 * @param {(answer: Answer) => void} onChange called at most once a frame, and at the end
 * @returns {Promise<Answer>}
 */
export async function answer(body, signal, onChange) {
  let now = emptyAnswer();
  const started = performance.now();
  let [waits, over] = [false, false];
  const show = () => {
    waits = false;
    if (!over) onChange(now);
  };
  try {
    const asked = { ...body, stream: true, stream_options: { include_usage: true } };
    for await (const event of events(await ask("v1/chat/completions", { body: asked, signal }))) {
      if (event.error) throw new ServerError(event.error);
      now = withEvent(now, event, performance.now() - started);
      if (waits || document.hidden) continue;
      waits = true;
      setTimeout(() => requestAnimationFrame(show), pauseMs(now));
    }
    if (now.finish === null) now = { ...now, fault: { message: "the stream ended before the answer did", type: "connection" } };
  } catch (error) {
    if (signal.aborted) now = { ...now, finish: "stopped" };
    else if (error instanceof ServerError) now = { ...now, fault: error.fault };
    else now = { ...now, fault: { message: `the stream broke: ${error}`, type: "connection" } };
  }
  over = true;
  now = { ...now, totalMs: now.totalMs ?? performance.now() - started };
  onChange(now);
  return now;
}

/**
 * @param {Answer} now
 * @param {any} event
 * @param {number} ms since the request
 * @returns {Answer}
 */
function withEvent(now, event, ms) {
  const next = { ...now, seed: event.seed ?? now.seed, usage: event.usage ?? now.usage };
  const choice = event.choices?.[0];
  if (!choice) return next;
  next.text += choice.delta?.content ?? "";
  next.reasoning += choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
  const passes = choice.speculation?.passes;
  if (passes) next.passes = [...next.passes, ...passes];
  if (next.firstMs === null && (next.text || next.reasoning || passes)) next.firstMs = ms;
  if (choice.finish_reason) {
    next.finish = choice.finish_reason;
    next.totalMs = ms;
  }
  return next;
}
