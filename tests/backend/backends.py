"""Test backends: one reveals outcomes a step late, one keeps its arrays where a host cannot look.

A third is `cuda` on a host, for all tests of that backend.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from paceline import kernels
from paceline.backend.cuda import load as cuda
from paceline.backend.device import Device
from paceline.backend.native import cut_model, load
from paceline.backend.registry import BACKENDS, BackendSpec
from paceline.backend.rows import Rows
from paceline.backend.seam import FedBack, Packed
from paceline.backend.target import Deferred

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backend.seam import CorrectRequest, PassRequest, PassResult, Pending, RowView, Span
    from paceline.core.nouns import Batch, SamplingSpec, Taps, Verdict
    from paceline.core.request_nouns import Admission

# A step late ---------------------------------------------------------------------------------------


class LateRows(Rows):
    """Rows whose view trails by the outcome of each row's last step."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._view = LateView(self)

    @property
    def view(self) -> RowView:
        return self._view

    def _admit(self, admission: Admission) -> None:
        super()._admit(admission)
        self._view.reveal(admission.row)
        self._view.indexes[admission.row] = None

    def commit(self, batch: Batch, verdict: Verdict) -> None:
        for r in batch.rows:
            self._view.reveal(r.row)
        super().commit(batch, verdict)


class LateView:
    late_steps = 1

    def __init__(self, rows: LateRows) -> None:
        self._rows = rows
        self._known = np.zeros(rows.num_rows, np.int64)
        self._computed = [0] * rows.num_rows
        self.indexes: list[kernels.TextIndex | None] = [None] * rows.num_rows

    def reveal(self, row: int) -> None:
        self._known[row] = self._rows.known_len(row)
        self._computed[row] = self._rows.computed_len(row)

    @property
    def num_rows(self) -> int:
        return self._rows.num_rows

    @property
    def max_len(self) -> int:
        return self._rows.max_len

    def known_len(self, row: int) -> int:
        return self._known.item(row)

    def computed_len(self, row: int) -> int:
        return self._computed[row]

    def tokens(self, row: int) -> Any:
        return self._rows.token_ids[row, : self._known[row]]

    def texts(self, rows: Sequence[int]) -> list[kernels.TextIndex]:
        found = []
        for row in rows:
            index = self.indexes[row] or kernels.TextIndex(self.max_len)
            self.indexes[row] = index
            found.append(index)
        kernels.extend_rows(found, rows, self._rows.token_ids, self._known)
        return found

    def page_ids(self, row: int, start: int, end: int) -> list[int]:
        return self._rows.page_ids(row, start, end)

    def pack(self, spans: Sequence[Span], wanted: Sequence[int], ahead: int = 0, **more: Any) -> Packed:
        return self._rows.pack(spans, wanted, ahead, **more)

    def row_specs(self, row: int, guesses: Sequence[int], *, margin: bool = False) -> list[SamplingSpec]:
        sampling = self._rows._sampling[row]
        assert sampling is not None
        return sampling.after_each(self.known_len(row), guesses, margin=margin)

    def spec_after(self, row: int, guesses: Sequence[int]) -> SamplingSpec:
        sampling = self._rows._sampling[row]
        assert sampling is not None
        return sampling.after(self.known_len(row), guesses)

    def penalised(self, row: int) -> bool:
        return self._rows.penalised(row)


# Arrays that are handles ---------------------------------------------------------------------------


class Handle:
    """An array on a device."""

    def __init__(self, array: Any) -> None:
        self.on_device = array

    def _looked(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("somebody but the backend looked into its array")

    __array__ = __len__ = __iter__ = __getitem__ = __bool__ = __float__ = __int__ = _looked
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __lt__ = __gt__ = __matmul__ = _looked


def handle(array: Any) -> Any:
    return None if array is None else Handle(array)


def on_host(array: Any) -> Any:
    """The array of a handle, or of PyTorch; all else is on the host already."""
    inside = array.on_device if isinstance(array, Handle) else array
    return None if inside is None else np.asarray(inside)


class OpaqueRows(Rows):
    def pack(self, *args: Any, **named: Any) -> Packed:
        packed = super().pack(*args, **named)
        return Packed(**{f.name: handle(getattr(packed, f.name)) for f in fields(packed)})  # type: ignore[arg-type]


class OpaqueTapStore:
    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.bytes_per_token = inner.bytes_per_token

    def write(self, taps: Taps, counts: Sequence[int]) -> None:
        states = {layer: on_host(of) for layer, of in taps.states.items()}
        self.inner.write(
            replace(taps, states=states, cu_len=on_host(taps.cu_len), slots=on_host(taps.slots)), counts
        )


class OpaqueExecutor:
    """A native executor whose arrays nobody sees."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def new_tap_store(self, num_pages: int) -> OpaqueTapStore:
        return OpaqueTapStore(self.inner.new_tap_store(num_pages))

    def launch(self, request: PassRequest) -> Pending:
        packed = Packed(**{f.name: on_host(getattr(request.packed, f.name)) for f in fields(request.packed)})  # type: ignore[arg-type]
        features: Any = request.features
        if features is not None:
            store = features.taps.inner if isinstance(features.taps, OpaqueTapStore) else features.taps
            features = replace(features, taps=store, fed_back=_fed_back(features.fed_back))
        pending = self.inner.launch(replace(request, packed=packed, features=features))
        return Deferred(lambda: _hidden(pending.wait()))

    def correct(self, request: CorrectRequest) -> PassResult:
        hidden, state = on_host(request.hidden), _fed_back(request.state)
        return _hidden(self.inner.correct(replace(request, hidden=hidden, state=state)))


def _fed_back(fed_back: Any) -> Any:
    return fed_back and FedBack(on_host(fed_back.hidden), fed_back.rows)


def _hidden(result: PassResult) -> PassResult:
    taps: Any = {layer: Handle(states) for layer, states in result.taps.items()}
    return replace(result, taps=taps, hidden=handle(result.hidden))


def load_decoder(*args: Any) -> Any:
    return OpaqueExecutor(load.load_decoder(*args))


def load_runner(draft_head: Any, target: Any, *rest: Any) -> Any:
    return OpaqueExecutor(load.load_runner(draft_head, target.inner, *rest))


def load_cut_model(model: Any, target: Any, *rest: Any) -> Any:
    return OpaqueExecutor(cut_model.load_cut_model(model, target.inner, *rest))


def narrowed(decoder: Any, token_ids: Any) -> Any:
    return OpaqueExecutor(cut_model.narrowed(decoder.inner, token_ids))


# On a host ------------------------------------------------------------------------------------------

HOST = Device(torch_name="cpu")


def load_on_host(*args: Any, **named: Any) -> Any:
    config, weights, weight_type, kv_type, threads, *where = args
    return cuda.load_decoder(config, weights, weight_type, kv_type, threads, *(where or (HOST,)), **named)


HERE = "tests.backend.backends"
TEST_BACKENDS = {
    "late": replace(BACKENDS["reference"], name="late", rows_class=f"{HERE}:LateRows"),
    "opaque": BackendSpec(
        "opaque",
        "native kernels behind handles",
        BACKENDS["native"].weight_types,
        BACKENDS["native"].kv_types,
        f"{HERE}:load_decoder",
        f"{HERE}:load_runner",
        f"{HERE}:load_cut_model",
        f"{HERE}:OpaqueRows",
        narrower=f"{HERE}:narrowed",
    ),
    "cuda": replace(
        BACKENDS["cuda"], loader=f"{HERE}:load_on_host", devices=tuple(reversed(BACKENDS["cuda"].devices))
    ),
}
ALL_BACKENDS = {**BACKENDS, **TEST_BACKENDS}
