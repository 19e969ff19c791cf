"""Adapter of llama.cpp's C interface: rows as sequences of one context, one batch per step."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.peers.llama_cpp_drafts import PeerDraftModel, PeerLookup
from tools.peers.protocol import PeerAnswers, PeerSetting, Recorder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy import float32
    from numpy.typing import NDArray

    from tools.peers.llama_cpp_drafts import PeerDrafts

    Token = tuple[int, int, int, bool]  # id, position, row, logits wanted

BATCH_TOKENS = 2048  # per call; llama.cpp cuts them into passes of its own default size
FLASH = {False: 0, True: 1}  # llama_flash_attn_type


@dataclass(frozen=True, slots=True, eq=False)
class LlamaCpp:
    """A loaded model. Each question gets its own context, made before the clock starts."""

    lib: Any  # the module of ctypes bindings
    model: Any
    vocab_size: int
    flash: bool
    threads: int
    drafts: PeerDrafts | None = None

    def describe(self) -> str:
        """Return the version of the bindings and the instruction sets of the build."""
        info: bytes = self.lib.llama_print_system_info()
        return f"llama-cpp-python {version('llama-cpp-python')}: {info.decode()}"

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> PeerAnswers:
        """Continue all prompts at once, see `protocol.Peer`."""
        if self.drafts is not None:
            (prompt,) = prompts
            return self._speculate(self.drafts, prompt, num_tokens)
        longest = max(map(len, prompts)) + num_tokens
        with self.context(len(prompts), longest) as (context, batch):
            recorder = Recorder(len(prompts))
            newest: dict[int, int] = {}
            for part in _parts([t for row, ids in enumerate(prompts) for t in _tokens(ids, row)]):
                newest |= self._choose(context, batch, part, recorder)
            for place in range(num_tokens - 1):
                step = [(newest[row], len(ids) + place, row, True) for row, ids in enumerate(prompts)]
                newest = self._choose(context, batch, step, recorder)
        return recorder.answers()

    def logits(self, token_ids: Sequence[int], num_judged: int) -> NDArray[float32]:
        """Return the logits [num_judged, vocab] that predict a text's last tokens."""
        first = len(token_ids) - 1 - num_judged
        tokens = [(t, place, 0, place >= first) for place, t in enumerate(token_ids[:-1])]
        with self.context(1, len(token_ids)) as (context, batch):
            return np.concatenate([self._run(context, batch, part)[1].copy() for part in _parts(tokens)])

    def _speculate(self, drafts: PeerDrafts, prompt: Sequence[int], num_tokens: int) -> PeerAnswers:
        """Continue one prompt; each pass scores drafts and keeps those that agree."""
        length, text = len(prompt) + num_tokens + drafts.max_drafts, list(prompt)
        with self.context(1, length) as (context, batch), drafts.open(length) as draft:
            recorder = Recorder(1)
            logits = self.extend(context, batch, prompt, 0, 1)
            proposed: list[int] = []
            while True:
                best = logits.argmax(axis=1).tolist()
                kept = next(
                    (i for i, (a, b) in enumerate(zip(proposed, best, strict=False)) if a != b), len(proposed)
                )
                room = num_tokens - len(recorder.token_ids[0])
                recorder.add(0, best[: kept + 1][:room])
                text += best[: kept + 1]
                if room <= kept + 1:
                    return recorder.answers()
                self.forget(context, len(text) - 1)
                proposed = draft(text)
                logits = self.extend(context, batch, [text[-1], *proposed], len(text) - 1, 1 + len(proposed))

    def forget(self, context: Any, length: int) -> None:
        """Drop the KV of a one-row context beyond `length` tokens."""
        self.lib.llama_memory_seq_rm(self.lib.llama_get_memory(context), 0, length, -1)

    def extend(
        self, context: Any, batch: Any, ids: Sequence[int], start: int, num_wanted: int
    ) -> NDArray[float32]:
        """Run a row's tokens from a position; return the last logits [num_wanted, vocab]."""
        first = len(ids) - num_wanted
        tokens = [(t, start + i, 0, i >= first) for i, t in enumerate(ids)]
        return [self._run(context, batch, part)[1] for part in _parts(tokens)][-1]

    @contextmanager
    def context(self, num_rows: int, length: int) -> Iterator[tuple[Any, Any]]:
        """Make a context and a batch for `num_rows` rows of `length` tokens."""
        lib = self.lib
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = num_rows * (-(-length // 256) * 256), num_rows
        params.n_batch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = self.threads
        params.flash_attn_type = FLASH[self.flash]
        params.kv_unified = False  # a row attends to its own cells only
        params.no_perf = True
        context, batch = lib.llama_init_from_model(self.model, params), lib.llama_batch_init(BATCH_TOKENS, 0, 1)
        if not context:
            raise MemoryError(f"llama.cpp made no context for {num_rows} rows of {length} tokens")
        try:
            yield context, batch
        finally:
            lib.llama_batch_free(batch)
            lib.llama_free(context)

    def _choose(self, context: Any, batch: Any, tokens: Sequence[Token], recorder: Recorder) -> dict[int, int]:
        """Run tokens; return the likeliest next token of each row whose logits were wanted."""
        rows, logits = self._run(context, batch, tokens)
        chosen = dict(zip(rows, logits.argmax(axis=1).tolist(), strict=True))
        for row, token_id in chosen.items():
            recorder.add(row, [token_id])
        return chosen

    def _run(self, context: Any, batch: Any, tokens: Sequence[Token]) -> tuple[list[int], NDArray[float32]]:
        """Run tokens; return the rows with logits, and these logits, valid until the next call."""
        batch.n_tokens = len(tokens)
        for i, (token_id, place, row, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token_id, place, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        if code := self.lib.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        rows = [row for _, _, row, wanted in tokens if wanted]
        if not rows:
            return rows, np.empty((0, self.vocab_size), np.float32)
        return rows, np.ctypeslib.as_array(self.lib.llama_get_logits(context), (len(rows), self.vocab_size))


def _tokens(ids: Sequence[int], row: int) -> list[Token]:
    return [(t, place, row, place == len(ids) - 1) for place, t in enumerate(ids)]


def _parts(tokens: Sequence[Token]) -> Iterator[Sequence[Token]]:
    for start in range(0, len(tokens), BATCH_TOKENS):
        yield tokens[start : start + BATCH_TOKENS]


def load(
    setting: PeerSetting, flash: bool, lookup: int = 0, draft_model: str = "", max_drafts: int = 16
) -> LlamaCpp:
    """Load a GGUF file. lookup: number of drafts by prompt lookup. draft_model: GGUF file."""
    target = _load(setting.file, setting.threads, flash)
    if lookup:
        return replace(target, drafts=PeerLookup(lookup))
    if draft_model:
        return replace(target, drafts=PeerDraftModel(_load(draft_model, setting.threads, flash), max_drafts))
    return target


def _load(file: str, threads: int, flash: bool) -> LlamaCpp:
    lib = import_module("llama_cpp.llama_cpp")
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(file.encode(), lib.llama_model_default_params())
    if not model:
        raise ValueError(f"llama.cpp cannot load {file}")
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    return LlamaCpp(lib, model, vocab_size, flash, threads)
