// The first page: uploads, how far documents are, and which are chosen to be asked about together.

import { Problem, call, follow, json, toSignIn } from "./api.js";
import { $, $$, base, count, duration, h, known, problemText, say, t, tn, toast } from "./dom.js";

const STREAMS = 1;
const LOOK_MS = 2000;
const ROW_TRIES = 30;
const streams = new Map(); // how to end them, by document
const over = new Set(); // what needs no more looks, until its row is gone
let looking = false;

const refresh = () => document.body.dispatchEvent(new CustomEvent("documents-changed"));

/** Uploads one after the other; each is a line until the server has it. */
export function setUpUploads() {
  const form = $("#upload");
  if (!form) return;
  let queue = Promise.resolve();
  const take = (files) => {
    for (const file of files) {
      const line = new UploadLine(file);
      queue = queue.then(() => line.send(form));
    }
  };
  $("#files").addEventListener("change", (event) => {
    take([...event.target.files]);
    event.target.value = "";
  });
  $("#files").disabled = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      const inside = name === "dragenter" || name === "dragover";
      form.classList.toggle("over", inside);
      if (name === "drop") take([...event.dataTransfer.files]);
    });
  }
}

class UploadLine {
  constructor(file) {
    this.file = file;
    this.request = new XMLHttpRequest(); // fetch does not tell how much was sent
    this.cancelled = false;
    this.bar = h("progress", { max: file.size || 1, value: 0, "aria-label": t("upload.of", { name: file.name }) });
    this.text = h("span", { class: "reading-text" }, t("upload.waits"));
    const cancel = h("button", { type: "button", class: "quiet", onclick: () => this.cancel() }, t("cancel"));
    this.line = h("li", {}, h("span", { class: "title", dir: "auto" }, file.name), this.bar, this.text, cancel);
    $("#uploads").append(this.line);
  }

  cancel() {
    this.cancelled = true;
    this.request.abort();
    this.line.remove();
  }

  /** Ends, in whatever way, before the next one begins. */
  send(form) {
    if (this.cancelled) return Promise.resolve();
    const most = Number(form.dataset.maxNbytes);
    if (this.file.size > most) return this.fail({ title: t("upload.too_large"), code: "too_large" });
    const body = new FormData();
    // The fields come first: the server reads the file as it arrives.
    if ($("#upload-keep").value) body.append("ttl_s", $("#upload-keep").value);
    if ($("#upload-password").value) body.append("password", $("#upload-password").value);
    body.append("file", this.file);
    return new Promise((over) => {
      const { request } = this;
      request.open("POST", `${base}/v1/documents`);
      request.upload.addEventListener("progress", (event) => {
        this.bar.value = event.loaded;
        this.text.textContent = t("upload.sending", { n: Math.round((100 * event.loaded) / (event.total || 1)) });
      });
      request.addEventListener("loadend", () => over(this.ended()));
      request.send(body);
    });
  }

  ended() {
    if (this.cancelled) return;
    const { status } = this.request;
    if (status === 401) toSignIn();
    if (status === 200 || status === 202) {
      if (status === 200) this.end(h("p", { class: "hint", role: "status" }, t("upload.known", { name: this.file.name })));
      else {
        this.line.remove();
        say(t("upload.taken", { name: this.file.name }));
      }
      refresh();
      return;
    }
    let body = {};
    try {
      body = JSON.parse(this.request.responseText);
    } catch {
      // What stands in front of the server may have a limit of its own.
      const code = status === 413 ? "too_large" : "unreachable";
      body = { title: t(`problem.${code}`), error: { code } };
    }
    this.fail(new Problem(body, status));
  }

  async fail(problem) {
    const name = h("span", { class: "title", dir: "auto" }, this.file.name);
    this.end(name, h("p", { class: "problem", role: "alert" }, ...problemText(problem)));
  }

  /** What is left to be said, until it is closed. */
  end(...said) {
    const away = h("button", { type: "button", class: "quiet", onclick: () => this.line.remove() }, t("close"));
    this.line.replaceChildren(said[0], away, ...said.slice(1));
  }
}

/** Show how far documents are until they were read, then their rows again. Called for every change of the page.
 *
 * A browser has six connections to a server, for all of its tabs. Most of them are left to everything else: a page follows
 * one document by its events, looks at the others now and then, and nobody looks at pages that cannot be seen. */
export function followReadings() {
  const unread = unreadIds();
  for (const [id, stopped] of streams) {
    if (unread.includes(id)) continue;
    stopped.abort();
    streams.delete(id);
  }
  for (const id of over) if (!elementOf(id)) over.delete(id);
  for (const id of unread) if (streams.size < STREAMS && !streams.has(id)) followEvents(id);
  if (!looking && unread.some((id) => !streams.has(id))) lookAtOthers();
}

const elementOf = (id) => $(`[data-follow="${CSS.escape(id)}"]`);

/** The oldest first: it is read first. */
function unreadIds() {
  if (document.hidden) return [];
  const ids = $$("[data-follow]").map((each) => each.dataset.follow);
  return [...new Set(ids)].filter((id) => !over.has(id)).reverse();
}

async function followEvents(id) {
  const stopped = new AbortController();
  const { signal } = stopped;
  streams.set(id, stopped);
  const open = (last) => {
    const headers = last ? { "Last-Event-ID": last } : {};
    return call("GET", `/v1/documents/${id}/events`, { headers, signal });
  };
  try {
    await follow(open, ({ data }) => heard(id, data), { signal });
  } catch (problem) {
    if (problem.status !== 404) toast(problem);
  }
  if (signal.aborted) return;
  streams.delete(id);
  over.add(id);
  followReadings();
}

async function lookAtOthers() {
  looking = true;
  const others = () => unreadIds().filter((id) => !streams.has(id));
  for (let ids = others(); ids.length; ids = others()) {
    for (const id of ids) {
      await new Promise((go) => setTimeout(go, LOOK_MS));
      if (!others().includes(id)) continue;
      try {
        if (heard(id, await json("GET", `/v1/documents/${id}`))) over.add(id);
      } catch (problem) {
        if (problem.status === 404) over.add(id); // else it is looked at again
      }
    }
  }
  looking = false;
}

/** Whether a document is ready, failed or cancelled. */
function heard(id, body) {
  const element = elementOf(id);
  if (!element) return false;
  showProgress(element, body);
  if (!["ready", "failed", "cancelled"].includes(body.status)) return false;
  say(t(body.status === "ready" ? "document.ready" : "document.failed", { title: body.title }));
  ended(id);
  return true;
}

function showProgress(element, { status, progress, page_count }) {
  const bar = $("progress", element);
  // Its text was found, and another document is still being read.
  const waits = status === "parsing" && progress.total && progress.done >= progress.total;
  const shown = progress.total && !waits;
  bar.max = progress.total || 1;
  if (shown) bar.value = progress.done;
  else bar.removeAttribute("value");
  const parts = [waits ? t("status.queued") : known(`status.${status}`, status)];
  if (shown) {
    const unit = progress.unit === "pages" ? "pages_of" : "tokens_of";
    parts.push(t(unit, { done: count(progress.done), total: count(progress.total) }));
  }
  if (page_count && !(shown && progress.unit === "pages")) parts.push(tn("pages", page_count));
  if (progress.eta_s) parts.push(t("eta", { time: duration(1000 * Math.ceil(progress.eta_s)) })); // a guess
  $(".reading-text", element).textContent = parts.join(" · ");
}

/** Its row anew. A list that the server made before may come meanwhile, and stand with the row as it was where this one was
 * asked for: it is asked for again until it is there. */
async function ended(id) {
  if (!$(`#row-${id}`)) location.reload(); // a conversation about it: it can be asked now
  for (let tries = 0; tries < ROW_TRIES && elementOf(id); tries++) {
    if (tries) await new Promise((go) => setTimeout(go, LOOK_MS));
    const row = $(`#row-${id}`);
    if (!row) return;
    try {
      await window.htmx.ajax("GET", `${base}/app/documents/${id}/row`, { target: row, swap: "outerHTML" });
    } catch {
      // Its next try is another.
    }
  }
}

export async function cancelReading(id) {
  try {
    await call("POST", `/v1/documents/${id}/cancel`);
    say(t("document.cancelled"));
  } catch (problem) {
    toast(problem);
  }
}

/** The line that asks about all that are chosen. */
export function showChosen() {
  const line = $("#chosen");
  if (!line) return;
  const n = $$('input[name="document"]:checked').length;
  line.hidden = n === 0;
  const text = tn("chosen", n);
  // Called for every change of the page, also for its own.
  if ($("#chosen-count").textContent !== text) $("#chosen-count").textContent = text;
}
