/** One answer: its text or the lens on it, its figures, and what went wrong. */
import { duration, faultText, fixed, html } from "./dom.js";
import { Lens } from "./lens.js";
import { Markdown } from "./markdown.js";

/** @typedef {import("./types.js").Answer} Answer */

/** @param {Answer} answer */
function tokensPerSecond(answer) {
  const tokens = answer.usage?.completion_tokens ?? answer.passes.reduce((sum, pass) => sum + pass.tokens.length, 0);
  return tokens && answer.totalMs ? (tokens / answer.totalMs) * 1000 : null;
}

const ENDS = /** @type {Record<string, string>} */ ({ length: "reached the token limit", stopped: "stopped by you" });

/** @param {{answer: Answer, onSeed?: (seed: number) => void}} props */
function Figures({ answer, onSeed }) {
  const { usage, seed } = answer;
  const accepted = usage?.speculation?.acceptance_length;
  return html`<p class="figures">
    ${usage ? html`<span>${usage.completion_tokens} tokens</span>` : null}
    ${answer.totalMs ? html`<span>${duration(answer.totalMs)}</span>` : null}
    ${usage ? html`<span>${fixed(tokensPerSecond(answer))} tokens/s</span>` : null}
    ${answer.firstMs ? html`<span>first after ${duration(answer.firstMs)}</span>` : null}
    ${accepted ? html`<span>${fixed(accepted, 2)} a pass</span>` : null}
    ${answer.finish && ENDS[answer.finish] ? html`<span>${ENDS[answer.finish]}</span>` : null}
    ${seed === null ? null : onSeed
      ? html`<button type="button" class="link" title="Use this seed again: same seed, same text" onClick=${() => onSeed(seed)}>seed ${seed}</button>`
      : html`<span>seed ${seed}</span>`}
  </p>`;
}

/** @param {{fault: import("./types.js").Fault}} props */
export function FaultBox({ fault }) {
  return html`<p class="fault" role="alert">${faultText(fault)}</p>`;
}

/** @param {{answer: Answer, lens: boolean, busy: boolean, onSeed?: (seed: number) => void}} props */
export function AnswerView({ answer, lens, busy, onSeed }) {
  const waiting = busy && !answer.text && !answer.reasoning && answer.passes.length === 0;
  const looks = lens && answer.passes.length > 0;
  return html`<div class="answer" aria-busy=${busy}>
    ${waiting ? html`<p class="waiting" aria-label="Waiting for the first token"><i></i><i></i><i></i></p>` : null}
    ${answer.reasoning && !looks ? html`<details class="reasoning" open=${busy && !answer.text}><summary>Reasoning</summary><${Markdown} text=${answer.reasoning} /></details>` : null}
    ${looks ? html`<${Lens} passes=${answer.passes} usage=${answer.usage} busy=${busy} />` : html`<${Markdown} text=${answer.text} />`}
    ${lens && !looks && !busy && answer.text ? html`<p class="faint">No passes were noted for this answer; retry it with the lens on.</p>` : null}
    ${answer.fault ? html`<${FaultBox} fault=${answer.fault} />` : null}
    ${busy ? null : html`<${Figures} answer=${answer} onSeed=${onSeed} />`}
  </div>`;
}
