/** The lens: where each token came from, which drafts were refused, and what each pass cost and brought. */
import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";

import { counted, duration, fixed, html, memo, sourceClass, visible } from "./dom.js";

/** @typedef {import("./types.js").Pass} Pass */
/** @typedef {import("./types.js").Usage} Usage */

const HEIGHT = 56; // of the strip, in pixels
const BASE = 3; // a pass without drafts
const GAP = 2;
const [NARROWEST, WIDEST, USUAL] = [3, 72, 11]; // width of a bar, in pixels; the median pass has the usual one
const MEASURED = 32; // passes that set the scale, which then stays

/**
 * Sums over the passes of an answer. Only decode passes count, as in `usage.speculation`.
 * @param {Pass[]} passes
 */
function sums(passes) {
  const total = { passes: 0, tokens: 0, drafted: 0, verified: 0, kept: 0, ms: 0, plainMs: 0, plainTokens: 0, msOfPlain: 0 };
  for (const pass of passes) {
    if (pass.prefill) continue;
    total.passes += 1;
    total.tokens += pass.tokens.length;
    total.drafted += pass.proposed;
    total.verified += pass.k;
    total.kept += pass.drafts.filter((draft) => draft.kept).length;
    total.ms += pass.step_ms;
    if (pass.plain_ms !== null) {
      total.plainMs += pass.plain_ms * pass.tokens.length;
      total.plainTokens += pass.tokens.length;
      total.msOfPlain += pass.step_ms;
    }
  }
  return total;
}

/**
 * Tokens by source, most first.
 * @param {Pass[]} passes
 * @returns {[string, number][]}
 */
export function bySource(passes) {
  /** @type {Map<string, number>} */
  const counts = new Map();
  for (const pass of passes) {
    for (const token of pass.tokens) counts.set(token.from, (counts.get(token.from) ?? 0) + 1);
  }
  return [...counts].sort((a, b) => b[1] - a[1]);
}

const PassText = memo(
  /** @param {{pass: Pass, index: number, on: boolean}} props */ ({ pass, index, on }) => {
    const kept = pass.drafts.filter((draft) => draft.kept).length;
    const refused = pass.drafts.slice(kept);
    const ghosts = refused.length
      ? html`<s class=${`ghosts ${sourceClass(pass.drafter)}`} aria-hidden="true">${refused.map((draft) => visible(draft.text)).join("").trim()}</s>`
      : null;
    // refused drafts stand where they were tried: behind the kept ones, before the token that the target wrote instead
    return html`<span class=${on ? "pass on" : "pass"} data-pass=${index}>
      ${pass.tokens.map((token, at) => html`${at === kept ? ghosts : null}<span class=${`token ${sourceClass(token.from)}`}>${token.text}</span>`)}
      ${kept >= pass.tokens.length ? ghosts : null}
    </span>`;
  },
);

/** @param {Pass[]} passes */
function layout(passes) {
  const first = passes.slice(0, MEASURED).filter((pass) => !pass.prefill);
  const times = first.map((pass) => pass.step_ms).sort((a, b) => a - b);
  const usual = times[times.length >> 1] || passes[0]?.step_ms || 1;
  let x = 0;
  const bars = passes.map((pass) => {
    const width = Math.min(WIDEST, Math.max(NARROWEST, (pass.step_ms / usual) * USUAL));
    const bar = { x, width };
    x += width + GAP;
    return bar;
  });
  return { bars, width: x, most: Math.max(1, ...passes.map((pass) => pass.k)) };
}

const Bar = memo(
  /** @param {{pass: Pass, index: number, x: number, width: number, most: number, on: boolean}} props */
  ({ pass, index, x, width, most, on }) => {
    const unit = (HEIGHT - BASE) / most;
    const kept = pass.drafts.filter((draft) => draft.kept).length;
    const tall = pass.k * unit;
    const hoped = pass.expected === null || pass.k === 0 ? null : HEIGHT - BASE - Math.min(most, pass.expected - 1) * unit;
    return html`<g class=${`bar ${sourceClass(pass.drafter)} ${on ? "on" : ""} ${pass.prefill ? "prefill" : ""}`} data-pass=${index}>
      <rect class="base" x=${x} y=${HEIGHT - BASE} width=${width} height=${BASE} />
      ${pass.k ? html`<rect class="tried" x=${x + 0.5} y=${HEIGHT - BASE - tall} width=${width - 1} height=${tall} />` : null}
      ${kept ? html`<rect class="kept" x=${x} y=${HEIGHT - BASE - kept * unit} width=${width} height=${kept * unit} />` : null}
      ${hoped === null ? null : html`<path class="hoped" d=${`M${x} ${hoped}h${width}`} />`}
      <rect class="hit" x=${x} y="0" width=${width + GAP} height=${HEIGHT} />
    </g>`;
  },
);

/** @param {Pass} pass */
function headline(pass) {
  if (pass.prefill) return "reads the prompt and writes the first token";
  if (pass.k === 0) return "no drafts";
  const kept = pass.drafts.filter((draft) => draft.kept).length;
  return `${kept} of ${counted(pass.k, "draft")} kept`;
}

/** @param {{pass: Pass, index: number, count: number}} props */
function Detail({ pass, index, count }) {
  const trimmed = pass.proposed - pass.k;
  return html`<div class="detail">
    <div class="detail-head">
      <strong>Pass ${index + 1}</strong><span class="faint">of ${count}</span>
      <span class=${`chip ${sourceClass(pass.drafter)}`}>${pass.drafter ?? "target"}</span>
      <span>${headline(pass)}</span>
      ${trimmed > 0 ? html`<span class="faint">${trimmed} more not worth verifying</span>` : null}
    </div>
    <dl class="facts">
      <div><dt>tokens</dt><dd>${pass.tokens.length}<small> expected ${fixed(pass.expected)}</small></dd></div>
      <div><dt>step</dt><dd>${duration(pass.step_ms)}<small> predicted ${duration(pass.expected_ms)}</small></dd></div>
      <div><dt>plain step</dt><dd>${duration(pass.plain_ms)}<small> estimated</small></dd></div>
      <div><dt>drafting, target</dt><dd>${duration(pass.draft_ms)}<small> and </small>${duration(pass.target_ms)}</dd></div>
      <div><dt>rows</dt><dd>${pass.rows}</dd></div>
    </dl>
    ${pass.drafts.length
      ? html`<ol class="drafts" aria-label="Drafts">
          ${pass.drafts.map(
            (draft) => html`<li class=${`${sourceClass(pass.drafter)} ${draft.kept ? "kept" : "refused"}`}>
              <code>${visible(draft.text)}</code>
              <small>${draft.confidence === null ? "" : `${Math.round(draft.confidence * 100)} %`}<span class="only-read">${draft.kept ? " kept" : " refused"}</span></small>
            </li>`,
          )}
        </ol>`
      : null}
  </div>`;
}

/** @param {{passes: Pass[], usage: Usage | null}} props */
function Sums({ passes, usage }) {
  const own = sums(passes);
  /** @type {Partial<import("./types.js").Speculated>} */
  const told = usage?.speculation ?? {};
  const {
    ms_per_token: perToken = own.tokens ? own.ms / own.tokens : null,
    plain_ms_per_token: plain = own.plainTokens ? own.plainMs / own.plainTokens : null, // null: some passes have no estimate
    saved_ms: saved = own.plainTokens ? own.plainMs - own.msOfPlain : null,
  } = told;
  const length = own.passes ? own.tokens / own.passes : null;
  return html`<dl class="facts sums">
    <div><dt>tokens per pass</dt><dd data-sum="tokens_per_pass">${fixed(length, 2)}</dd></div>
    <div><dt>drafts kept</dt><dd><span data-sum="kept">${own.kept}</span><small> of ${own.verified}</small></dd></div>
    <div><dt>passes</dt><dd data-sum="passes">${own.passes}</dd></div>
    <div><dt>time per token</dt><dd>${duration(perToken)}</dd></div>
    <div><dt>plain, estimated</dt><dd>${duration(plain)}</dd></div>
    <div><dt>${saved !== null && saved < 0 ? "lost" : "saved"}</dt><dd>${saved === null ? "–" : duration(Math.abs(saved))}</dd></div>
  </dl>`;
}

/** @param {{passes: Pass[], usage: Usage | null, busy: boolean}} props */
export function Lens({ passes, usage, busy }) {
  const chosen = useSignal(-1);
  const strip = useRef(/** @type {HTMLElement | null} */ (null));
  const count = passes.length;
  const at = Math.min(chosen.value, count - 1);
  const { bars, width, most } = layout(passes);
  useEffect(() => {
    if (busy && chosen.value < 0) strip.current?.scrollTo({ left: width });
  }, [count]);

  /** @param {any} event */
  const point = (event) => {
    const found = event.target.closest?.("[data-pass]");
    if (found) chosen.value = Number(found.dataset.pass);
  };
  /** @param {KeyboardEvent} event */
  const onKey = (event) => {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: count - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    chosen.value = Math.max(0, Math.min(count - 1, to));
    const bar = bars[chosen.value];
    strip.current?.scrollTo({ left: bar.x - strip.current.clientWidth / 2 });
  };
  const said = at < 0 ? "no pass chosen" : `pass ${at + 1}: ${headline(passes[at])}, ${duration(passes[at].step_ms)}`;
  return html`<div class="lens">
    <div class="lens-text" onPointerOver=${point} onClick=${point}>
      ${passes.map((pass, index) => html`<${PassText} pass=${pass} index=${index} on=${index === at} />`)}
    </div>
    <ul class="legend" aria-label="Tokens by source">
      ${bySource(passes).map(([name, tokens]) => html`<li class=${sourceClass(name)}><i></i>${name === "target" ? "target's own" : name} <b>${tokens}</b></li>`)}
      <li class="ghost-key"><s>refused</s></li>
    </ul>
    <div
      class="strip" ref=${strip} tabindex="0" role="slider" aria-label="Passes of this answer" aria-valuemin="1" aria-valuemax=${Math.max(1, count)}
      aria-valuenow=${Math.max(1, at + 1)} aria-valuetext=${said} onKeyDown=${onKey} onPointerOver=${point} onClick=${point}
    >
      <svg width=${width} height=${HEIGHT} aria-hidden="true">
        ${passes.map((pass, index) => html`<${Bar} pass=${pass} index=${index} x=${bars[index].x} width=${bars[index].width} most=${most} on=${index === at} />`)}
      </svg>
    </div>
    <p class="strip-key faint">One bar a pass: height the drafts verified, filled those kept, line those expected, width the time. Point at one, or use the arrow keys.</p>
    ${at < 0 ? null : html`<${Detail} pass=${passes[at]} index=${at} count=${count} />`}
    <${Sums} passes=${passes} usage=${usage} />
  </div>`;
}
