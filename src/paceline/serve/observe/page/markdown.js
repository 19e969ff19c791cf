/** Answers as HTML: marked makes it, DOMPurify lets through only what a text needs. */
import { useLayoutEffect, useRef } from "preact/hooks";
import DOMPurify from "dompurify";
import { Marked } from "marked";

import { announced } from "./settings.js";
import { html, memo } from "./dom.js";

const ALLOWED = {
  ALLOWED_TAGS: [
    ...["a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "li", "ol", "p", "pre", "s"],
    ...["strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ],
  ALLOWED_ATTR: ["href", "start", "align", "target", "rel"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
};

const marked = new Marked({ gfm: true, breaks: true });
marked.use({
  renderer: {
    // a picture would tell its host that the answer was read; its address is shown instead
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    html: ({ text }) => escaped(text),
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "), // as text: no field of a form is let through
  },
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
});

/** @param {string} text */
function escaped(text) {
  return text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
}

/** @param {string} text */
export function toHtml(text) {
  let made;
  try {
    made = /** @type {string} */ (marked.parse(text));
  } catch {
    made = `<pre>${escaped(text)}</pre>`; // lists or quotes too deep in each other for its recursion
  }
  return DOMPurify.sanitize(made, ALLOWED);
}

/** @param {string} text */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    announced.value = "Copied";
  } catch {
    announced.value = copyBySelection(text) ? "Copied" : "This browser does not let the page copy";
  }
}

/** Where the page came by plain HTTP from another machine there is no clipboard. @param {string} text */
function copyBySelection(text) {
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "only-read";
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

/** Put a copy button on every block of code. @param {HTMLElement} root */
function addCopyButtons(root) {
  for (const block of root.querySelectorAll("pre")) {
    const code = block.textContent ?? "";
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy-code";
    button.textContent = "Copy";
    button.setAttribute("aria-label", "Copy this code");
    button.addEventListener("click", async () => {
      await copy(code);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    block.tabIndex = 0; // it may scroll
    block.append(button);
  }
}

export const Markdown = memo(
  /** @param {{text: string}} props */ ({ text }) => {
    const made = toHtml(text);
    return html`<${Html} made=${made} />`;
  },
);

/** @param {{made: string}} props */
function Html({ made }) {
  const root = useRef(/** @type {HTMLElement | null} */ (null));
  useLayoutEffect(() => {
    if (root.current) addCopyButtons(root.current);
  }, [made]);
  return html`<div class="markdown" ref=${root} dangerouslySetInnerHTML=${{ __html: made }}></div>`;
}
