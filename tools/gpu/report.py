"""A run's results as a short table of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tools.gpu.sizes import SEED_TPOT_MS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    Results = Mapping[str, Any]

MAX_FAULTS = 12  # lines


def table(found: Results) -> str:
    """Return the table."""
    phases: Mapping[str, Any] = found["phases"]
    machine = found["machine"]
    head = f"{machine['gpu']} | torch {machine['torch']}, Triton {machine['triton']}"
    mark = " | DRY RUN, figures mean nothing" if found["dry"] else ""
    lines = [f"{head} | {found['commit']} | {found['date']}{mark}"]
    for name, section in SECTIONS.items():
        if results := phases.get(name, {}).get("results"):
            lines += ["", *section(results)]
    return "\n".join([*lines, "", *_troubles(phases)]) + "\n"


def _troubles(phases: Mapping[str, Any]) -> Iterator[str]:
    """Yield how phases ended, what failed and what was left out."""
    for name, phase in phases.items():
        errors, left_out = phase.get("errors", {}), phase.get("left_out", [])
        yield f"{name}: {phase.get('seconds', 0):.0f} s, ended {phase.get('ended', 'before it began')}"
        yield from (f"    failed: {what}: {why[:160]}" for what, why in errors.items())
        if left_out:
            yield f"    left out: {', '.join(left_out[:MAX_FAULTS])}"


def _columns(rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yield lines of aligned columns; numbers have three digits."""
    texts = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        yield "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"
    return "-" if value is None else str(value)


def _at(results: Results, *path: object) -> Any:
    """Return a value under a path of names; None where there is none."""
    value: Any = results
    for name in path:
        if not isinstance(value, dict) or str(name) not in value:
            return None
        value = value[str(name)]
    return value


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _numbered(results: Results) -> list[str]:
    """Return those names of results that are numbers of rows, ascending."""
    return sorted((name for name in results if str(name).isdecimal()), key=int)


# Phases -------------------------------------------------------------------------------------------


def _ceilings(r: Results) -> Iterator[str]:
    def over(name: str, unit: float) -> str:
        value = r.get(name)
        return "-" if value is None else f"{value / unit:.3g}"

    yield (
        f"ceilings: read {over('read_bytes_per_s', 1e12)} TB/s, copy {over('copy_bytes_per_s', 1e12)} TB/s, "
        f"bf16 {over('matmul_per_s', 1e12)} TFLOP/s, launch {over('launch_us', 1)} us (a kernel of ours "
        f"{over('kernel_launch_us', 1)}), graph to graph {over('graph_gap_us', 1)} us"
    )


def _compile(r: Results) -> Iterator[str]:
    made, failed = r.get("compiled", {}), _at(r, "compiled", "failed") or {}
    yield f"kernels: {_at(r, 'found', 'variants')} found, {made.get('variants', 0)} compiled, {len(failed)} failed"
    yield from (f"    {name}: {why}" for name, why in list(failed.items())[:MAX_FAULTS])


def _right(r: Results) -> Iterator[str]:
    checks: Results = r.get("float64", {})
    right = [f"{name} {'right' if c['right'] else 'WRONG'} ({c['checks']})" for name, c in checks.items()]
    yield f"against float64: {', '.join(right)}"
    faults = [fault for c in checks.values() for fault in c["faults"]]
    yield from (f"    {fault}" for fault in faults[:MAX_FAULTS])
    unlike = [path for path, value in _leaves(r.get("bits", {})) if value is False]
    total = sum(isinstance(value, bool) for _, value in _leaves(r.get("bits", {})))
    yield f"bits: {total - len(unlike)} of {total} comparisons equal; replays {r.get('replays')}"
    yield from (f"    differ: {path}" for path in unlike[:MAX_FAULTS])


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{path} / {name}" if path else str(name))
    else:
        yield path, value


def _plain(r: Results) -> Iterator[str]:
    passes: Results = r.get("passes", {})
    yield "passes as graphs, ms:"
    rows: list[Sequence[object]] = [
        ("rows x tokens", "exact", "fast", "exact/fast", "over floor", "of reads", "fp8")
    ]
    for shape in _at(passes, "exact") or {}:
        exact, fast = (_at(passes, numerics, shape, "ms") for numerics in ("exact", "fast"))
        more = (_at(passes, "exact", shape, name) for name in ("over_floor", "share_of_reads"))
        rows.append((shape, exact, fast, _ratio(exact, fast), *more, _at(passes, "fp8", shape, "ms")))
    yield from _columns(rows)
    for numerics, prefill in (r.get("prefill") or {}).items():
        rate = _cell(prefill["share_of_matmul"])
        yield f"prefill {numerics}: {prefill['tokens']} tokens in {prefill['ms']:.3g} ms, {rate} of bf16's rate"
    engine: Results = r.get("engine", {})
    yield "plain decoding by the engine, ms a token:"
    heads = (
        "rows",
        "exact",
        "fast",
        "exact/fast",
        "over its pass",
        "device idle",
        "kernels run",
        "vLLM's, its H100",
    )
    rows = [heads]
    for name in _numbered(_at(engine, "exact") or {}):
        exact, fast = (_at(engine, numerics, name, "tpot_ms") for numerics in ("exact", "fast"))
        over = _ratio(exact, _at(passes, "exact", f"{name}x1", "ms"))
        busy, target_ms = (_at(engine, "exact", name, figure) for figure in ("kernels_run", "target_ms"))
        passes_share = _ratio(target_ms, _at(engine, "exact", name, "step_ms"))
        idle = None if passes_share is None else max(0.0, 1.0 - passes_share)
        seed = SEED_TPOT_MS.get(int(name), (None,))[0]
        rows.append((name, exact, fast, _ratio(exact, fast), over, idle, busy, seed))
    yield from _columns(rows)
    for count, kernels in (r.get("kernels") or {}).items():
        yield f"kernels of a pass of {count}: " + "; ".join(
            f"{k['kernel'][:36]} x{k['launches']:.0f} {k['us']:.0f} us ({k['share']:.0%})" for k in kernels[:6]
        )


def _speculation(r: Results) -> Iterator[str]:
    yield from _drafter_table("speculation", r)


def _pairs(r: Results) -> Iterator[str]:
    for name, results in r.items():
        yield from _drafter_table(name, results)


def _drafter_table(name: str, r: Results) -> Iterator[str]:
    """Yield times of a token, and of steps, beside those of plain decoding."""
    off: Results = r.get("off", {})
    ks = sorted((k for k in r if k.startswith("k") and k[1:].isdecimal()), key=lambda k: int(k[1:]))
    ways = [*ks, *(["auto"] if "auto" in r else [])]
    yield f"{name} ({r.get('drafter')}), ms a token; auto over off; vLLM's (its H100); steps over plain ones:"
    heads = ["rows", "off", *ways, "auto/off", "vLLM", *(f"step {k}/off" for k in ks), "drafts kept"]
    rows: list[Sequence[object]] = [heads]
    for count in _numbered(off):
        plain = _at(off, count, "tpot_ms")
        seed = SEED_TPOT_MS.get(int(count))
        steps = [_ratio(_at(r, k, count, "step_ms"), _at(off, count, "step_ms")) for k in ks]
        kept = _ratio(_at(r, ks[-1], count, "accepted"), _at(r, ks[-1], count, "verified")) if ks else None
        times = [_at(r, way, count, "tpot_ms") for way in ways]
        auto = _ratio(_at(r, "auto", count, "tpot_ms"), plain)
        rows.append((count, plain, *times, auto, seed and seed[2] / seed[0], *steps, kept))
    yield from _columns(rows)
    if busy := r.get("kernels_run"):
        shares = ", ".join(f"{count} rows {_cell(share)}" for count, share in busy.items())
        yield f"share of time in which kernels run, K = 3, under the profiler: {shares}"


def _text(r: Results) -> Iterator[str]:
    ways: Results = r.get("ways", {})
    yield (
        f"texts: {r.get('requests')} requests in {len(ways)} ways, "
        f"{r.get('different_answers')} answers differ from the recording"
    )
    yield from (f"    {way}: {w['different']} differ: {w['first']}" for way, w in ways.items() if w["different"])


def _peers(r: Results) -> Iterator[str]:
    yield "peers, ms a token:"
    counts = sorted({count for peer in r.values() for count in _numbered(peer)}, key=int)
    rows: list[Sequence[object]] = [("", *counts)]
    rows += [(name, *(_at(peer, count, "tpot_ms") for count in counts)) for name, peer in r.items()]
    yield from _columns(rows)


SECTIONS = {
    "ceilings": _ceilings,
    "compile": _compile,
    "right": _right,
    "plain": _plain,
    "speculation": _speculation,
    "text": _text,
    "peers": _peers,
    "pairs": _pairs,
}
