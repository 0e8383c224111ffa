// Calls of the REST API, and streams of events that are taken up again where they broke off.

import { base, t } from "./dom.js";

const LONGEST_PAUSE_MS = 8000;
const TRIES = 10;
// Quiet streams have a comment now and then. One without was cut off somewhere, which is not always told: a laptop slept.
const LONGEST_QUIET_MS = 3000 * Number(document.body.dataset.heartbeatS);
// No connection; what a proxy says while the server starts again, and the server itself.
const PASSING = [0, 502, 503, 504];

/** What a refusal said: the members of problem+json that the page shows. */
export class Problem extends Error {
  constructor(body, status, retryAfterS = null) {
    super(body.detail ?? body.title ?? String(status));
    this.status = status;
    this.code = body.error?.code ?? "unknown";
    this.title = body.title;
    this.detail = body.detail;
    this.retryAfterS = retryAfterS ?? body.retry_after_s ?? null;
  }
}

export async function problemOf(response) {
  const body = await response.json().catch(() => ({ title: response.statusText }));
  return new Problem(body, response.status, Number(response.headers.get("retry-after")) || null);
}

const unreachable = () => new Problem({ title: t("problem.unreachable"), error: { code: "unreachable" } }, 0);

/** The response of a call. Throws Problem; its status is 0 when the server cannot be reached. */
export async function call(method, path, { body, headers = {}, signal } = {}) {
  const sent = body === undefined ? {} : { body: JSON.stringify(body) };
  if (body !== undefined) headers = { "Content-Type": "application/json", ...headers };
  const response = await fetch(base + path, { method, headers, signal, ...sent }).catch((error) => {
    throw error.name === "AbortError" ? error : unreachable();
  });
  if (response.ok) return response;
  if (response.status === 401) toSignIn();
  throw await problemOf(response);
}

export const json = async (...args) => (await call(...args)).json();

/** Their time is over, or the key was revoked. */
export function toSignIn() {
  location.assign(base ? "/app/link" : `/app/sign-in?next=${encodeURIComponent(location.pathname + location.search)}`);
}

/** Events of a response, as `{id, name, data}`. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await inTime(reader.read());
      if (done) return;
      const blocks = (rest + value).split("\r\n\r\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const event = eventOf(block);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** What is read, unless nothing comes for too long. */
function inTime(reading) {
  let timer;
  const late = new Promise((_, fail) => (timer = setTimeout(() => fail(unreachable()), LONGEST_QUIET_MS)));
  return Promise.race([reading, late]).finally(() => clearTimeout(timer));
}

function eventOf(block) {
  const event = { id: null, name: "message", data: null };
  for (const line of block.split("\r\n")) {
    const colon = line.indexOf(": ");
    const [field, value] = [line.slice(0, colon), line.slice(colon + 2)];
    if (field === "id") event.id = value;
    else if (field === "event") event.name = value;
    else if (field === "data") event.data = JSON.parse(value);
  }
  return event.data === null ? null : event; // a comment keeps quiet connections open
}

/** Follow a stream to its end through lost connections and restarts.
 *
 * `open(lastId)` gives the response with what comes after that event; `handle(event)` says true at the last one; `waiting`
 * is told while there is no connection. Throws the Problem that cannot be waited out.
 */
export async function follow(open, handle, { signal, waiting = () => {} } = {}) {
  let lastId = null;
  let failures = 0;
  for (;;) {
    try {
      const response = await open(lastId);
      if (response.status === 204) return;
      for await (const event of eventsOf(response)) {
        waiting(false);
        failures = 0;
        if (event.id !== null) lastId = event.id;
        if (event.name === "error" && event.id === null) break; // the server stops: no end of what is told
        if (handle(event)) return;
      }
    } catch (error) {
      if (signal?.aborted) return;
      if (error instanceof Problem && !PASSING.includes(error.status)) throw error;
      // While the whole network is away, it is worth trying on.
      if (failures >= TRIES && navigator.onLine) throw error instanceof Problem ? error : unreachable();
    }
    if (signal?.aborted) return;
    failures += 1;
    waiting(true);
    await new Promise((go) => setTimeout(go, Math.min(LONGEST_PAUSE_MS, 250 * 2 ** failures)));
  }
}
