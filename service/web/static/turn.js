// A question and its answer: text while it comes, then with its sources, what was not found, and what it cost.

import { count, copy, duration, h, known, problemText, say, t, tn } from "./dom.js";

const LONG_MS = 5000;

export class TurnView {
  /** `open(place, button)` shows a page; `fork(id)` begins another conversation after an answer. */
  constructor(question, { open, fork }) {
    this.open = open;
    this.fork = fork;
    this.text = document.createTextNode("");
    this.answer = h("div", { class: "answer", dir: "auto", "aria-busy": "true" }, this.text, h("span", { class: "caret" }));
    this.after = h("div", { class: "after" });
    const asked = h("h3", { class: "question", dir: "auto" }, question);
    this.element = h("article", { class: "turn" }, asked, this.answer, this.after);
  }

  add(text) {
    clearTimeout(this.late);
    this.text.data += text;
  }

  /** From now on it is waited for; when the first word takes long, that is said. */
  expect() {
    this.late = setTimeout(() => this.hint(t("answer.waits")), LONG_MS);
  }

  wait(waiting) {
    if (waiting) this.hint(t("answer.reconnecting"));
    else this.after.replaceChildren();
  }

  hint(text) {
    this.after.replaceChildren(h("p", { class: "hint", role: "status" }, text));
  }

  /** `answer` is the body of `done`. */
  finish(answer) {
    clearTimeout(this.late);
    this.answer.setAttribute("aria-busy", "false");
    this.answer.replaceChildren(...this.written(answer));
    this.after.replaceChildren(...this.notes(answer), ...this.sources(answer), this.foot(answer));
  }

  fail(problem) {
    clearTimeout(this.late);
    this.answer.setAttribute("aria-busy", "false");
    this.answer.replaceChildren(this.text);
    if (!this.text.data) this.answer.hidden = true;
    this.after.replaceChildren(h("p", { class: "problem", role: "alert" }, ...problemText(problem)));
  }

  /** The text, cut where sources belong and where something was not found. Offsets count code points. */
  written({ answer, citations, unsupported = [] }) {
    const points = Array.from(answer);
    const placed = citations.filter((each) => Number.isInteger(each.answer_end));
    const cuts = new Set([0, points.length, ...placed.map((each) => each.answer_end)]);
    for (const { start, end } of unsupported) cuts.add(start).add(end);
    const at = [...cuts].filter((cut) => cut >= 0 && cut <= points.length).sort((a, b) => a - b);
    const parts = [];
    for (let n = 0; n < at.length; n += 1) {
      for (const each of placed.filter((one) => one.answer_end === at[n])) parts.push(this.reference(each, citations));
      if (n + 1 === at.length) break;
      const text = points.slice(at[n], at[n + 1]).join("");
      const lost = unsupported.some(({ start, end }) => start <= at[n] && at[n + 1] <= end);
      parts.push(lost ? h("span", { class: "unsupported", title: t("answer.unsupported_title") }, text) : text);
    }
    return parts;
  }

  reference(citation, citations) {
    const n = citations.indexOf(citation) + 1;
    const label = t("answer.source", { n, page: pageName(citation) });
    const show = (event) => this.open(citation, event.currentTarget);
    return h("button", { type: "button", class: "reference", "aria-label": label, onclick: show }, String(n));
  }

  notes(answer) {
    const notes = [];
    const over = { length: t("answer.cut"), cancelled: t("answer.stopped") }[answer.finish_reason];
    if (over) notes.push(h("p", { class: "hint" }, over));
    if (answer.unsupported?.length) {
      notes.push(h("p", { class: "notice" }, h("span", { class: "unsupported" }, t("answer.marked")), " ", t("answer.unsupported")));
    }
    if (answer.notice) notes.push(h("p", { class: "notice", lang: "en" }, answer.notice));
    return notes;
  }

  sources({ citations }) {
    if (!citations.length) return [];
    const items = citations.map((each) => {
      const show = (event) => this.open(each, event.currentTarget);
      const name = h("span", { class: "chip-page" }, pageName(each));
      const quote = h("span", { class: "chip-quote", dir: "auto" }, each.quote);
      return h("li", {}, h("button", { type: "button", class: "chip", onclick: show }, name, " ", quote));
    });
    return [h("ol", { class: "chips", "aria-label": t("answer.sources") }, ...items)];
  }

  foot(answer) {
    const copied = async (event) => {
      const { currentTarget: button } = event;
      const done = await copy(answer.answer);
      say(t(done ? "answer.copied" : "answer.not_copied"));
      button.textContent = t(done ? "answer.copied" : "answer.not_copied");
      setTimeout(() => (button.textContent = t("answer.copy")), 2000);
    };
    return h(
      "div",
      { class: "foot" },
      cost(answer),
      h("button", { type: "button", class: "quiet", onclick: copied }, t("answer.copy")),
      this.fork ? h("button", { type: "button", class: "quiet", onclick: () => this.fork(answer.id) }, t("answer.fork")) : null,
    );
  }
}

function pageName({ page, label }) {
  return t("answer.page", { n: count(page) }) + (label ? ` · ${label}` : "");
}

/** One line, and all figures behind it. */
function cost({ usage, cache, timings }) {
  const line = [tn("cost.reused", usage.reused_tokens), tn("cost.computed", usage.prefilled_tokens)];
  if (timings.ttft_ms !== null) line.push(t("cost.first_word", { time: duration(timings.ttft_ms) }));
  const source = known(`tier.${cache.source}`, cache.source);
  const rows = [
    ["cost.document", count(usage.document_tokens)],
    ["cost.answer", count(usage.completion_tokens)],
    ["cost.source", cache.miss_reason ? `${source} (${cache.miss_reason})` : source],
    ["cost.restore", `${duration(cache.restore_ms)} · ${tn("tokens", cache.restored_tokens)}`],
    ["cost.queue", duration(timings.queue_ms)],
    ["cost.total", duration(timings.total_ms)],
  ];
  const list = rows.flatMap(([key, value]) => [h("dt", {}, t(key)), h("dd", {}, value)]);
  return h("details", { class: "cost" }, h("summary", {}, line.join(" · ")), h("dl", {}, ...list));
}
