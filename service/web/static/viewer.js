// A page beside the answer: its text with the quote marked, or the PDF in the browser's own viewer.

import { json } from "./api.js";
import { $, $$, base, h, problemText, t } from "./dom.js";

const CHOICE = "preread-viewer";
const COVERS = matchMedia("(max-width: 63.999rem)");

export class Viewer {
  constructor() {
    this.element = $("#viewer");
    this.opener = null;
    this.shown = null;
    $("#viewer-close").addEventListener("click", () => this.close());
    COVERS.addEventListener("change", () => this.cover(COVERS.matches && !this.element.hidden));
    this.element.addEventListener("keydown", (event) => event.key === "Escape" && this.close());
    $("#page-before").addEventListener("click", () => this.turn(-1));
    $("#page-after").addEventListener("click", () => this.turn(1));
    $("#page-number").addEventListener("change", (event) => this.go(Number(event.target.value)));
    for (const button of $("#viewer-switch").querySelectorAll("button")) {
      button.addEventListener("click", () => this.choose(button.dataset.show));
    }
  }

  /** `place`: `{document_id, page, quote, page_start, page_end}`; all but the first two may be missing. */
  open(place, opener) {
    const source = $(`#sources [data-document="${CSS.escape(place.document_id)}"]`);
    if (!source) return;
    this.opener = opener ?? this.opener;
    this.shown = { ...place, source };
    this.element.hidden = false;
    document.body.classList.add("viewing");
    this.cover(COVERS.matches);
    this.show();
    this.element.focus();
  }

  close() {
    this.element.hidden = true;
    document.body.classList.remove("viewing");
    this.cover(false);
    $("#page").replaceChildren();
    if (this.opener?.isConnected) this.opener.focus();
    this.shown = null;
  }

  /** Where it lies over everything, nothing below it can be reached. */
  cover(covers) {
    for (const below of $$(".top, .talk, .bottom")) below.inert = covers;
  }

  get pages() {
    return Number(this.shown.source.dataset.pages);
  }

  get canShowPdf() {
    return this.shown.source.dataset.pdf === "true" && navigator.pdfViewerEnabled === true;
  }

  turn(by) {
    this.go(this.shown.page + by);
  }

  go(page) {
    if (!(page >= 1 && page <= this.pages)) return this.showPlace();
    // The quote is only on the page it was found on.
    const { source, document_id } = this.shown;
    this.shown = { source, document_id, page };
    this.show();
  }

  choose(what) {
    localStorage.setItem(CHOICE, what);
    this.show();
  }

  show() {
    const pdf = this.canShowPdf && localStorage.getItem(CHOICE) !== "text";
    this.showPlace();
    $("#viewer-switch").hidden = !this.canShowPdf;
    for (const button of $("#viewer-switch").querySelectorAll("button")) {
      button.setAttribute("aria-pressed", String((button.dataset.show === "pdf") === pdf));
    }
    const quote = $("#viewer-quote");
    quote.hidden = !(pdf && this.shown.quote);
    quote.textContent = this.shown.quote ?? "";
    if (pdf) this.showPdf();
    else this.showText();
  }

  showPlace() {
    const { source, page, label } = this.shown;
    $("#viewer-title").textContent = source.dataset.title;
    $("#page-number").value = page;
    $("#page-number").max = this.pages;
    $("#page-of").textContent = t("viewer.of", { n: this.pages }) + (label ? ` · ${label}` : "");
    $("#page-before").disabled = page <= 1;
    $("#page-after").disabled = page >= this.pages;
  }

  showPdf() {
    const { source, document_id, page, quote } = this.shown;
    // Some viewers look for words, too; the others only know the page. Half a character cannot be encoded.
    const words = quote ? `&search=${encodeURIComponent(Array.from(quote).slice(0, 200).join(""))}` : "";
    const title = t("viewer.pdf", { title: source.dataset.title, n: page });
    const src = `${base}/app/documents/${document_id}/file#page=${page}&navpanes=0${words}`;
    $("#page").replaceChildren(h("iframe", { src, title }));
  }

  async showText() {
    const place = this.shown;
    const page = $("#page");
    try {
      const body = await json("GET", `/v1/documents/${place.document_id}/pages/${place.page}`);
      if (this.shown !== place) return; // another page was opened meanwhile
      if (body.label && !place.label) place.label = body.label;
      this.showPlace();
      const [before, quote, after] = parts(body.text, place);
      const mark = quote ? h("mark", { tabindex: "-1" }, quote) : null;
      const text = before || quote || after ? [before, mark, after] : [t("viewer.blank")];
      page.replaceChildren(h("div", { class: "page-text", dir: "auto" }, ...text.filter((part) => part !== null)));
      page.scrollTop = 0;
      mark?.scrollIntoView({ block: "center" });
    } catch (problem) {
      page.replaceChildren(h("p", { class: "problem" }, ...problemText(problem)));
    }
  }
}

/** What comes before the quote, the quote, what comes after. By its place where the API says it (in code points), else by
 * looking for its words, whatever blanks are between them. */
function parts(text, { quote, page_start, page_end }) {
  const points = Array.from(text);
  if (Number.isInteger(page_start) && page_end > page_start) {
    const cut = (from, to) => points.slice(from, to).join("");
    return [cut(0, page_start), cut(page_start, page_end), cut(page_end)];
  }
  const words = (quote ?? "").trim().split(/\s+/).filter(Boolean);
  const found = words.length ? new RegExp(words.map(RegExp.escape ?? escaped).join("\\s+")).exec(text) : null;
  if (!found) return [text, "", ""];
  const end = found.index + found[0].length;
  return [text.slice(0, found.index), found[0], text.slice(end)];
}

const escaped = (word) => word.replace(/[.*+?^${}()|[\]\\/-]/g, "\\$&");
