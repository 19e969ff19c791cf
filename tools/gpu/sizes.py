"""Sizes of a run on a GPU, and tiny ones of a dry run."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Cost profile of Dynamic SD: Llama-3.1-8B-Instruct with an EAGLE head in vLLM on one H100, MT-Bench.
SEED_ACCEPTANCE = (0.6812, 0.3914, 0.2035, 0.1014, 0.0514)  # share of drafts kept at each position
SEED_TPOT_MS = {  # batch size: (plain, K = 3, dynamic), of the same run
    1: (6.30, 3.98, 3.98),
    4: (6.38, 4.03, 4.05),
    16: (6.77, 4.45, 4.45),
    64: (7.94, 6.78, 6.56),
    128: (10.15, 11.19, 9.88),
    256: (16.20, 19.96, 17.20),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A target with its draft model, by shape."""

    target: str
    draft: str  # drafter, with its options in brackets
    batches: tuple[int, ...]
    acceptance: tuple[float, ...]  # share of drafts kept at each position


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of all phases."""

    model: str  # target, by shape
    head: str  # EAGLE-3 head, by shape
    weights: str
    batches: tuple[int, ...]  # rows that decode at once
    context: int  # prompt tokens of each row
    answer: int  # most tokens of an answer that is timed
    repeats: int  # of what is timed by itself
    # Ceilings
    copied_bytes: int
    square: int  # side of the matrices of a product
    # Kernels
    matrices: tuple[tuple[int, int], ...]  # outputs, inputs
    token_counts: tuple[int, ...]  # numbers of tokens whose bits are compared with one token's; 1 is the first
    heads: tuple[tuple[int, int, int], ...]  # KV heads, query heads of each, size; the first are the model's
    rows: tuple[tuple[int, int], ...]  # tokens before those of a pass, tokens of it
    many_short_rows: tuple[int, ...]  # rows of one token, more than the smaller planners take
    vocab_size: int
    replays: int
    # Passes
    one_row: tuple[int, ...]  # tokens of one row in a pass
    many_rows: tuple[int, tuple[int, ...]]  # rows, and tokens of each in a pass
    prefill: int  # tokens of one prompt
    profiled: tuple[int, ...]  # batches whose kernels are listed
    # Speculation
    ks: tuple[int, ...]
    pairs: tuple[Pair, ...]
    # Peers
    loop_batches: tuple[int, ...]
    library_batches: tuple[int, ...]
    # Text
    text_model: str
    requests: int
    text_answer: int
    text_batches: tuple[int, ...]
    text_chunks: tuple[int, ...]  # prompt tokens computed in one step

    def of_model(self, model: str) -> Sizes:
        """Return the sizes for another target, by shape; its first layers write the texts."""
        return replace(self, model=model, text_model=f"{model},num_layers={TEXT_LAYERS}")


TEXT_LAYERS = 4  # of a target that writes texts
FULL = Sizes(
    model="shape:llama-3.1-8b",
    head="shape:eagle3/32000",
    weights="bf16",
    batches=(1, 4, 16, 64, 128, 256),
    context=576,
    answer=128,
    repeats=30,
    copied_bytes=4 << 30,
    square=8192,
    matrices=((6144, 4096), (4096, 14336)),
    token_counts=(1, 2, 16, 17, 64, 128, 129, 512),
    heads=((8, 4, 128), (8, 8, 128), (3, 3, 64), (4, 1, 64), (1, 4, 256), (4, 2, 80), (8, 4, 96)),
    rows=((0, 1), (511, 1), (2000, 1), (300, 4), (0, 70), (900, 40)),
    many_short_rows=(70, 560),
    vocab_size=128256,
    replays=50,
    one_row=(1, 2, 4, 8, 16, 32),
    many_rows=(64, (1, 2, 4)),
    prefill=2048,
    profiled=(1, 256),
    ks=(1, 3, 5),
    pairs=(
        Pair(
            target="shape:qwen3-1.7b,hidden_size=2560,intermediate_size=9728,num_layers=36,num_heads=32",
            draft="draft-model[model=shape:qwen3-0.6b]",
            batches=(1, 100),
            acceptance=(0.8, 0.62, 0.47),
        ),
        Pair(
            target="shape:qwen3-32b",
            draft="draft-model[model=shape:qwen3-1.7b]",
            batches=(1, 100),
            acceptance=(0.8, 0.62, 0.47),
        ),
    ),
    loop_batches=(1, 16, 64),
    library_batches=(16, 64, 256),
    text_model=f"shape:llama-3.1-8b,num_layers={TEXT_LAYERS}",
    requests=64,
    text_answer=24,
    text_batches=(64, 16, 1),
    text_chunks=(512, 64),
)
_TINY = (
    "shape:vocab_size=320,hidden_size=32,intermediate_size=48,num_layers=4,num_heads=4,num_kv_heads=2,head_dim=8"
)
DRY = Sizes(
    model=_TINY,
    head="shape:eagle3/64",
    weights="f64",
    batches=(1, 3),
    context=20,
    answer=40,
    repeats=2,
    copied_bytes=1 << 20,
    square=64,
    matrices=((96, 640),),
    token_counts=(1, 2, 17),
    heads=((2, 2, 16), (1, 3, 16)),
    rows=((0, 1), (20, 1), (300, 2), (0, 6)),
    many_short_rows=(9,),
    vocab_size=320,
    replays=2,
    one_row=(1, 2),
    many_rows=(3, (1, 2)),
    prefill=32,
    profiled=(1,),
    ks=(1, 3),
    pairs=(Pair(target=_TINY, draft="draft-model[layers=1]", batches=(2,), acceptance=(0.8, 0.6, 0.5)),),
    loop_batches=(1,),
    library_batches=(2,),
    text_model=_TINY,
    requests=4,
    text_answer=8,
    text_batches=(4, 1),
    text_chunks=(64, 16),
)
