// The first page: uploads, how far documents are, and which are chosen to be asked about together.

import { Problem, call, follow, toSignIn } from "./api.js";
import { $, $$, base, duration, h, known, problemText, say, t, tn, toast } from "./dom.js";

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
      const known_before = status === 200;
      this.line.remove();
      say(t(known_before ? "upload.known" : "upload.taken", { name: this.file.name }));
      refresh();
      return;
    }
    let body = {};
    try {
      body = JSON.parse(this.request.responseText);
    } catch {
      body = { title: t("problem.unreachable"), error: { code: "unreachable" } };
    }
    this.fail(new Problem(body, status));
  }

  async fail(problem) {
    const away = h("button", { type: "button", class: "quiet", onclick: () => this.line.remove() }, t("close"));
    const name = h("span", { class: "title", dir: "auto" }, this.file.name);
    this.line.replaceChildren(name, h("p", { class: "problem", role: "alert" }, ...problemText(problem)), away);
  }
}

/** Show how far a document is until it was read, then its row again. */
export function followReading(element) {
  const id = element.dataset.follow;
  element.dataset.following = "true";
  const stopped = new AbortController();
  const open = (last) => {
    if (!element.isConnected) stopped.abort();
    const headers = last ? { "Last-Event-ID": last } : {};
    return call("GET", `/v1/documents/${id}/events`, { headers, signal: stopped.signal });
  };
  const handle = ({ name, data }) => {
    if (!element.isConnected) return stopped.abort() ?? true;
    showProgress(element, data);
    if (name === "progress") return false;
    say(t(name === "ready" ? "document.ready" : "document.failed", { title: data.title }));
    ended(id);
    return true;
  };
  follow(open, handle, { signal: stopped.signal }).catch((problem) => problem.status === 404 || toast(problem));
}

function showProgress(element, { status, progress, page_count }) {
  const bar = $("progress", element);
  bar.max = progress.total || 1;
  if (progress.total) bar.value = progress.done;
  else bar.removeAttribute("value");
  const parts = [known(`status.${status}`, status)];
  if (progress.total) {
    const unit = progress.unit === "pages" ? "pages_of" : "tokens_of";
    parts.push(t(unit, { done: progress.done.toLocaleString(), total: progress.total.toLocaleString() }));
  }
  if (page_count && progress.unit !== "pages") parts.push(tn("pages", page_count));
  if (progress.eta_s) parts.push(t("eta", { time: duration(1000 * progress.eta_s) }));
  $(".reading-text", element).textContent = parts.join(" · ");
}

function ended(id) {
  const row = $(`#row-${id}`);
  if (!row) location.reload(); // a conversation about it: it can be asked now
  else window.htmx.ajax("GET", `${base}/app/documents/${id}/row`, { target: row, swap: "outerHTML" });
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
