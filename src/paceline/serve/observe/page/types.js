/**
 * Shapes of what the server sends and of what the browser keeps. Only types: no code is loaded from here.
 *
 * @typedef {{id: number, text: string, from: string}} PassToken text: what it adds to the answer's
 * @typedef {{id: number, text: string, confidence: number | null, kept: boolean}} PassDraft
 *
 * @typedef {object} Pass What one pass of the target did for one answer.
 * @property {string | null} drafter
 * @property {boolean} prefill
 * @property {PassToken[]} tokens
 * @property {PassDraft[]} drafts those that were verified, in order
 * @property {number} k verified drafts
 * @property {number} proposed drafts before trimming
 * @property {number | null} draft_ms
 * @property {number | null} target_ms
 * @property {number} step_ms
 * @property {number} rows
 * @property {number | null} expected tokens that the controller expected of this row
 * @property {number | null} expected_ms
 * @property {number | null} plain_ms
 *
 * @typedef {object} Speculated `usage.speculation` of an answer.
 * @property {number} drafted_tokens
 * @property {number} verified_tokens
 * @property {number} accepted_tokens
 * @property {number} decode_passes
 * @property {number} acceptance_length
 * @property {number | null} [ms_per_token]
 * @property {number | null} [plain_ms_per_token]
 * @property {number | null} [saved_ms]
 *
 * @typedef {{prompt_tokens: number, completion_tokens: number, total_tokens: number, speculation?: Speculated}} Usage
 * @typedef {{message: string, type?: string | null, param?: string | null, code?: string | null, status?: number}} Fault
 *
 * @typedef {object} Answer An answer while it is written and afterwards.
 * @property {string} text
 * @property {string} reasoning what the model wrote before its answer, if the server tells it apart
 * @property {Pass[]} passes
 * @property {number | null} seed
 * @property {Usage | null} usage
 * @property {string | null} finish
 * @property {Fault | null} fault
 * @property {number | null} firstMs from the request to the first text
 * @property {number | null} totalMs
 *
 * @typedef {{role: "user" | "assistant", content: string, answer?: Answer}} ChatMessage
 * @typedef {{id: string, title: string, updated: number}} Listed
 * @typedef {Listed & {system: string, messages: ChatMessage[]}} Conversation
 *
 * @typedef {object} Settings What is sent with each request; an empty text leaves the choice to the server.
 * @property {string} temperature
 * @property {string} top_p
 * @property {string} max_tokens
 * @property {string} seed
 * @property {boolean} lockSeed
 * @property {string} draft
 * @property {string} k
 * @property {boolean} lens
 * @property {"system" | "light" | "dark"} theme
 *
 * @typedef {{id: string, max_model_len: number, drafters?: string[]}} Model
 *
 * @typedef {object} Step One of the engine's last steps.
 * @property {number} age_ms
 * @property {number} rows
 * @property {number} tokens
 * @property {string | null} drafter
 * @property {number} k_max
 * @property {number} k_mean
 * @property {number} step_ms
 * @property {number | null} expected_ms
 * @property {string} why
 *
 * @typedef {object} Live One event of the live feed.
 * @property {number} time
 * @property {boolean} ready whether an engine takes requests
 * @property {number} tokens_per_s
 * @property {number | null} plain_tokens_per_s
 * @property {number | null} tokens_per_pass
 * @property {number[]} acceptance_by_position
 * @property {Record<string, number[]>} k_by_drafter
 * @property {Record<string, number>} tokens_by_source
 * @property {number} rows_running
 * @property {number} rows_waiting
 * @property {number} pages_used
 * @property {number} pages_total
 * @property {{p50: number | null, p95: number | null}} ttft_ms
 * @property {{p50: number | null, p95: number | null}} tpot_ms
 * @property {Step[]} steps
 * @property {Replica[]} [replicas] of a fleet
 *
 * @typedef {object} Replica One engine of a fleet.
 * @property {string} replica
 * @property {string} state
 * @property {string} cores
 * @property {number} rows
 * @property {number | null} tpot_ms
 * @property {number | null} k_mean
 * @property {number | null} hit_rate
 * @property {number} pages_held
 * @property {number} resumes
 */
export {};
