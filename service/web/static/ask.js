// A conversation: questions, answers as they come, and those from before.

import { call, follow, json } from "./api.js";
import { $, $$, base, say, t, toast } from "./dom.js";
import { TurnView } from "./turn.js";
import { Viewer } from "./viewer.js";

const MAX_TITLE = 120;

/** Who reads further up is left there. */
const isAtEnd = () => innerHeight + scrollY >= document.documentElement.scrollHeight - 80;
const toEnd = () => scrollTo(0, document.documentElement.scrollHeight);

export class Conversation {
  constructor(main) {
    this.sessionId = main.dataset.session || null;
    this.own = main.dataset.own === "true";
    this.viewer = new Viewer();
    this.running = false;
    this.turns = $("#turns");
    this.setUp();
    this.load();
  }

  get documentIds() {
    return $$("#sources [data-document]").map((each) => each.dataset.document);
  }

  setUp() {
    for (const button of $$("[data-read]")) {
      button.addEventListener("click", () => this.viewer.open({ document_id: button.dataset.read, page: 1 }, button));
    }
    $("#go-on")?.addEventListener("click", () => this.fork(null));
    for (const button of $$("[data-dialog]")) {
      const open = () => window.htmx.ajax("GET", `${base}/app/sessions/${this.sessionId}/${button.dataset.dialog}`, { target: "#dialog" });
      button.addEventListener("click", open);
    }
    this.form = $("#composer");
    if (!this.form) return;
    this.question = $("#question");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask(this.question.value.trim());
    });
    this.question.addEventListener("keydown", (event) => {
      // Safari ends a composition before the Enter that ended it; 229 is its key.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
      event.preventDefault();
      this.form.requestSubmit();
    });
    $("#stop").addEventListener("click", () => this.stop());
    // Until here nobody could write a question that would be lost.
    this.allow($$("#sources [data-status]").every((each) => each.dataset.status === "ready"));
  }

  allow(may) {
    this.question.disabled = !may;
    $("#send").disabled = !may;
  }

  /** What was said before; an answer that still runs is taken up. */
  async load() {
    if (!this.sessionId) return;
    try {
      const session = await json("GET", `/v1/sessions/${this.sessionId}`);
      for (const turn of session.turns) this.show(turn);
      if (session.turns.length > 1) this.turns.lastElementChild.scrollIntoView({ block: "start" });
      const last = session.turns.at(-1);
      if (last?.status === "running") await this.run(this.turns.lastElementChild.view, last.id);
    } catch (problem) {
      toast(problem);
    }
  }

  show({ question, status, answer, error }) {
    const view = this.begin(question);
    if (answer) view.finish(answer);
    else if (status !== "running") view.fail({ code: error?.code, detail: error?.message });
  }

  begin(question) {
    $("#teach").hidden = true;
    const fork = (id) => this.fork(id);
    const view = new TurnView(question, { open: (...place) => this.viewer.open(...place), fork });
    view.element.view = view;
    this.turns.append(view.element);
    return view;
  }

  async ask(question) {
    if (!question || this.running) return;
    const view = this.begin(question);
    this.question.value = "";
    this.busy(true);
    toEnd();
    try {
      await this.begun(question);
      await this.run(view, null, question);
    } catch (problem) {
      this.busy(false);
      view.fail(problem);
      if (!this.question.value) this.question.value = question; // nothing is lost: it can be sent again
    }
  }

  /** The session is made with the first question, which names it. */
  async begun(question) {
    if (this.sessionId) return;
    const instructions = $("#instructions")?.value.trim() ?? "";
    const title = Array.from(question).slice(0, MAX_TITLE).join("");
    const body = { document_ids: this.documentIds, title, instructions };
    const session = await json("POST", "/v1/sessions", { body });
    this.sessionId = session.id;
    $("#instructions")?.closest("details").remove(); // they are the session's
    history.replaceState(null, "", `${base}/app/sessions/${session.id}`);
    if ($("#about-actions")) $("#about-actions").hidden = false;
  }

  /** Follow an answer to its end: one that is asked now, or one that runs. */
  async run(view, answerId, question) {
    const key = crypto.getRandomValues(new Uint32Array(4)).join("-");
    const path = `/v1/sessions/${this.sessionId}/questions`;
    const open = async (last) => {
      if (answerId) return call("GET", `${path}/${answerId}/events`, { headers: last ? { "Last-Event-ID": last } : {} });
      const body = { question, stream: true };
      const response = await call("POST", path, { body, headers: { "Idempotency-Key": key } });
      answerId = response.headers.get("location")?.split("/").at(-2) ?? null;
      return response;
    };
    this.busy(true);
    view.expect();
    try {
      await follow(open, (event) => this.heard(view, event), { waiting: (waiting) => view.wait(waiting) });
      if (view.answer.getAttribute("aria-busy") === "true") await this.reload(view, answerId);
    } catch (problem) {
      view.fail(problem);
      say(problem.detail ?? t("problem.unknown"));
      if (question && this.question && !this.question.value) this.question.value = question;
    } finally {
      this.busy(false);
    }
  }

  heard(view, { name, data }) {
    const follows = isAtEnd();
    if (name === "token") view.add(data.text);
    if (name === "done") {
      view.finish(data);
      say(t("answer.complete"));
    }
    if (name === "error") view.fail({ ...data, code: data.error?.code, retryAfterS: data.retry_after_s });
    if (follows) toEnd();
    return name === "done" || name === "error";
  }

  /** Its end was told while nobody listened. */
  async reload(view, answerId) {
    const session = await json("GET", `/v1/sessions/${this.sessionId}`);
    const turn = session.turns.find((each) => each.id === answerId);
    if (turn?.answer) view.finish(turn.answer);
    else view.fail({ code: turn?.error?.code, detail: turn?.error?.message });
  }

  busy(running) {
    this.running = running;
    if (!this.form) return;
    const left = document.activeElement === $("#stop") && !running;
    $("#stop").hidden = !running;
    $("#send").hidden = running;
    if (running) say(t("answer.coming"));
    if (left || !running) this.question.focus({ preventScroll: true });
  }

  async stop() {
    if (!this.sessionId) return;
    try {
      await call("POST", `/app/sessions/${this.sessionId}/stop`);
    } catch (problem) {
      toast(problem);
    }
  }

  async fork(after) {
    try {
      const session = await json("POST", `/v1/sessions/${this.sessionId}/fork`, { body: after ? { after_turn: after } : {} });
      location.assign(`${base}/app/sessions/${session.id}`);
    } catch (problem) {
      toast(problem);
    }
  }
}

