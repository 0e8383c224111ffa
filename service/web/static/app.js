// Where the page begins: what is on it is brought to life, also what htmx puts into it later.

import { Problem, toSignIn } from "./api.js";
import { Conversation } from "./ask.js";
import { $, $$, copy, known, lang, problemText, say, t, toast } from "./dom.js";
import { cancelReading, followReadings, setUpUploads, showChosen } from "./library.js";

const kind = document.body.classList;
const dates = new Intl.DateTimeFormat(lang, { dateStyle: "medium" });
const moments = new Intl.DateTimeFormat(lang, { dateStyle: "medium", timeStyle: "short" });

function enliven() {
  for (const time of $$("time:not([title])")) {
    const at = new Date(time.dateTime);
    time.textContent = dates.format(at);
    time.title = moments.format(at);
  }
  followReadings();
  for (const input of $$("[data-link]:not([value^='http'])")) {
    input.setAttribute("value", location.origin + input.dataset.link);
    input.value = location.origin + input.dataset.link;
  }
  showChosen();
  if (asked && !asked.button.isConnected) {
    const first = asked.before?.nextElementSibling;
    asked = null;
    if (first && document.activeElement === document.body) $("a", first)?.focus();
  }
}

let asked = null;

/** Who asked for more of a list goes on with the first of it: the button is gone then. */
function setUpMore() {
  document.addEventListener("click", ({ target }) => {
    const button = target.closest?.("[data-more]");
    if (button) asked = { button, before: button.closest("li").previousElementSibling };
  });
}

/** htmx fills the dialog, or empties it when it is done. */
function setUpDialog() {
  const dialog = $("#dialog");
  new MutationObserver(() => {
    if (!dialog.firstElementChild) dialog.close();
    else if (!dialog.open) dialog.showModal();
    else ($("[autofocus]", dialog) ?? $("[data-close]", dialog))?.focus();
  }).observe(dialog, { childList: true });
  dialog.addEventListener("close", () => {
    dialog.replaceChildren();
    // What opened it may be gone with its row.
    if (document.activeElement === document.body) $("#main").focus({ preventScroll: true });
  });
  document.addEventListener("click", async ({ target }) => {
    const button = target.closest?.("[data-close], [data-copy], [data-cancel]");
    if (!button) return;
    if ("close" in button.dataset) dialog.close();
    if ("cancel" in button.dataset) cancelReading(button.dataset.cancel);
    if ("copy" in button.dataset) {
      const input = $(button.dataset.copy);
      input.select();
      say(t((await copy(input.value)) ? "answer.copied" : "answer.not_copied"));
    }
  });
}

function setUpRefusals() {
  document.addEventListener("htmx:response:error", ({ detail: { ctx } }) => {
    if (ctx.response.status === 401) toSignIn();
    let body = {};
    try {
      body = JSON.parse(ctx.text);
    } catch {
      body = { title: t("problem.unknown") };
    }
    const problem = new Problem(body, ctx.response.status);
    const place = $("#dialog[open] [data-problem]");
    if (!place) return toast(problem);
    place.replaceChildren(...problemText(problem));
    place.hidden = false;
  });
  document.addEventListener("htmx:error", () => toast({ code: "unreachable", title: t("problem.unreachable") }));
}

/** A conversation that began here has another address than the page was sent with. */
function setUpSwitches() {
  for (const form of $$(".bottom form")) {
    form.addEventListener("submit", () => ($("[name='next']", form).value = location.pathname + location.search));
  }
}

/** Another site's page that led here kept the cookie away: with it, they may be signed in. */
async function lookAgain() {
  const response = await fetch("/app/session").catch(() => null);
  if (response?.status === 204) location.replace($('.sign-in input[name="next"]').value);
}

async function openLink() {
  const status = $("#link-status");
  const token = location.hash.slice(1);
  if (!token) return (status.textContent = t("link.none"));
  history.replaceState(null, "", location.pathname);
  const response = await fetch("/app/link", { method: "POST", body: new URLSearchParams({ token }) }).catch(() => null);
  if (response?.ok) return location.replace((await response.json()).path);
  const body = (await response?.json().catch(() => null)) ?? {};
  status.textContent = known(`problem.link_${body.error?.code}`, t("link.refused"));
}

setUpDialog();
setUpRefusals();
setUpSwitches();
setUpMore();
new MutationObserver(enliven).observe(document.body, { childList: true, subtree: true });
document.addEventListener("change", showChosen);
document.addEventListener("visibilitychange", followReadings);
enliven();
if (kind.contains("library")) setUpUploads();
if (kind.contains("sign-in")) lookAgain();
if (kind.contains("opens-link")) openLink();
// The same page with another token behind the `#` is not loaded again.
if (kind.contains("opens-link")) addEventListener("hashchange", openLink);
if (kind.contains("asking")) new Conversation($("#main"));
