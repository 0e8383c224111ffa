// Small things that every part of the page uses. Text of documents and answers only ever becomes text nodes.

export const base = document.body.dataset.base;
export const lang = document.documentElement.lang;
const messages = JSON.parse(document.body.dataset.messages);
const number = new Intl.NumberFormat(lang);

export const $ = (selector, root = document) => root.querySelector(selector);
export const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

/** A message of the catalogue; `{name}` becomes `values.name`. */
export function t(key, values = {}) {
  const text = messages[`js.${key}`] ?? key;
  return text.replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
}

/** The form for one, or for other numbers. */
export function tn(key, n) {
  return t(`${key}.${n === 1 ? "one" : "other"}`, { n: number.format(n) });
}

/** A message where the API may have a name that is new; `fallback` then. */
export function known(key, fallback) {
  return messages[`js.${key}`] ?? fallback;
}

export const count = (n) => number.format(n);

/** 350 ms, 4.2 s, 3 min. */
export function duration(ms) {
  if (ms < 1000) return t("time.ms", { n: count(Math.round(ms)) });
  if (ms < 90_000) return t("time.s", { n: count(Math.round(ms / 100) / 10) });
  return t("time.min", { n: count(Math.round(ms / 60_000)) });
}

/** An element: attributes by name (`on…` is a listener), children are elements or text. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Tell those who do not see it. */
export function say(text) {
  const status = $("#status");
  if (status) status.textContent = text;
}

/** What went wrong and what to do, as elements. `error` is a Problem of `api.js`, or anything else.
 *
 * The server speaks English. On a page in another language its sentence is folded behind the page's own words, if it has
 * some for this code; where these are too general to help, it is open. */
export function problemText(error) {
  const detail = error.detail ?? "";
  // What HTTP calls it ("Unprocessable Entity") says nothing to a reader; the detail does.
  const title = known(`problem.${error.code}`, detail || (error.title ?? t("problem.unknown")));
  const parts = [h("strong", { lang: title === detail ? "en" : null }, title)];
  const theirs = detail && detail !== title ? h("span", { lang: "en" }, detail) : null;
  if (theirs && lang === "en") parts.push(" ", theirs);
  if (error.retryAfterS) parts.push(" ", t("problem.retry_after", { n: count(error.retryAfterS) }));
  if (theirs && lang !== "en") parts.push(folded(theirs, GENERAL.includes(error.code)));
  return parts;
}

const GENERAL = ["invalid", "bad_request", "conflict"];
const folded = (words, open) =>
  h("details", { class: "original", open }, h("summary", {}, known("problem.original")), words);

/** Show a problem where there is no better place for it; it stays until it is closed. */
export function toast(error) {
  const close = h("button", { type: "button", class: "quiet", onclick: () => box.remove() }, t("close"));
  const box = h("div", { class: "toast" }, h("p", {}, ...problemText(error)), close);
  $("#toasts").replaceChildren(box);
}

/** Put a text on the clipboard; false when the browser does not let us. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelection(text);
  }
}

/** Browsers keep the clipboard from pages that came without HTTPS from another machine; not from a selection. */
function copySelection(text) {
  const focused = document.activeElement;
  const area = h("textarea", { class: "visually-hidden", "aria-hidden": "true", tabindex: "-1" });
  area.value = text;
  ($("#dialog[open]") ?? document.body).append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return done;
}
