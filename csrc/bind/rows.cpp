// Token rows and features, gathered for a pass and written back in one call each: numpy takes a call for every array, and after a
// pass the code and data of each call are out of the caches.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <vector>

#include "base/zero_pages.h"
#include "bind/arrays.h"
#include "isa/kernels.h"

namespace paceline {
namespace {

// The slot of a position in a row's pages. A page may be any number: slots are checked where they are used.
int64_t slot_at(const int64_t* pages, int64_t position) {
    const auto page = static_cast<uint64_t>(pages[position / kPageTokens]);
    return static_cast<int64_t>(page * kPageTokens + static_cast<uint64_t>(position % kPageTokens));
}

// A part of a row: committed tokens from `start` on, then guesses.
struct Span {
    int64_t row, start, num_known;
    nb::object guesses;
    size_t num_guesses;

    Span(const nb::handle& span) : row(at(span, 0)), start(at(span, 1)), num_known(at(span, 2)), guesses(span[3]), num_guesses(nb::len(guesses)) {}
    static int64_t at(const nb::handle& span, size_t index) { return nb::cast<int64_t>(span[index]); }
    int64_t size() const { return num_known + static_cast<int64_t>(num_guesses); }

    void check(const Table<int64_t>& token_ids, const Table<int64_t>& pages) const {
        require(0 <= row && static_cast<size_t>(row) < std::min(token_ids.shape(0), pages.shape(0)), "no such row");
        require(within(start, num_known, token_ids.shape(1)), "a span lies beyond its row");
        require(static_cast<size_t>(start + size()) <= pages.shape(1) * kPageTokens, "a span lies beyond its row's pages");
    }
};

// The arrays of a pass, one after another in one block: see `Rows.pack_spans`.
struct Block {
    int64_t *token_ids, *positions, *slots, *cu_len, *wanted;
    const int64_t* end;
};

void write(const Span& span, const Table<int64_t>& token_ids, const Table<int64_t>& pages, const Block& to, int64_t first) {
    const int64_t* known = token_ids.data() + span.row * token_ids.shape(1) + span.start;
    const int64_t* own_pages = pages.data() + span.row * pages.shape(1);
    std::copy_n(known, span.num_known, to.token_ids + first);
    for (size_t i = 0; i < span.num_guesses; ++i)
        to.token_ids[first + span.num_known + i] = nb::cast<int64_t>(span.guesses[i]);
    for (int64_t i = 0, position = span.start; i < span.size(); ++i, ++position) {
        to.positions[first + i] = position;
        to.slots[first + i] = slot_at(own_pages, position);
    }
}

void pack_spans(const Table<int64_t>& token_ids, const Table<int64_t>& pages, const nb::list& spans, const nb::list& wanted,
                size_t num_tokens, const OutArray<int64_t>& block, const OutTable<int64_t>& out_pages) {
    const size_t num_spans = nb::len(spans), num_pages = out_pages.shape(1);
    require(nb::len(wanted) == num_spans && out_pages.shape(0) == num_spans && num_pages <= pages.shape(1), "the outputs have the wrong size");
    require(num_tokens <= block.size() && block.size() >= 3 * num_tokens + num_spans + 1, "the block is too small");
    int64_t* data = block.data();
    Block to{data, data + num_tokens, data + 2 * num_tokens, data + 3 * num_tokens, data + 3 * num_tokens + num_spans + 1,
             data + block.size()};
    int64_t first = to.cu_len[0] = 0;
    for (size_t i = 0; i < num_spans; ++i) {
        const Span span(spans[i]);
        span.check(token_ids, pages);
        const int64_t end = first + span.size(), asked = nb::cast<int64_t>(wanted[i]);
        require(static_cast<size_t>(end) <= num_tokens, "the block is too small");
        require(0 <= asked && asked <= span.size() && asked <= to.end - to.wanted, "more is wanted than there is");
        write(span, token_ids, pages, to, first);
        for (int64_t token = end - asked; token < end; ++token) *to.wanted++ = token;
        std::copy_n(pages.data() + span.row * pages.shape(1), num_pages, out_pages.data() + i * num_pages);
        first = to.cu_len[i + 1] = end;
    }
    require(static_cast<size_t>(first) == num_tokens && to.wanted == to.end, "the block is too large");
}

// Write the taps of some tokens of a pass to their slots as float16, the taps of a token side by side: see `FeatureStore.write`.
void write_halves(const nb::list& taps, const nb::list& starts, const nb::list& counts, const Ids& slots, const OutTable<uint16_t>& store) {
    const size_t width = store.shape(1), part = taps.size() ? width / taps.size() : 0;
    require(part * taps.size() == width, "the taps do not fit the store");
    std::vector<Table<float>> states;
    for (nb::handle tap : taps) {
        states.push_back(nb::cast<Table<float>>(tap, false));
        require(states.back().shape(0) == slots.size() && states.back().shape(1) == part, "the taps do not fit the store");
    }
    require(starts.size() == counts.size(), "as many starts as counts");
    for (size_t run = 0; run < starts.size(); ++run) {
        const auto start = nb::cast<int64_t>(starts[run]), count = nb::cast<int64_t>(counts[run]);
        const auto num_tokens = static_cast<int64_t>(slots.size());
        require(0 <= start && start <= num_tokens && 0 <= count && count <= num_tokens - start, "a run beyond the tokens of the pass");
        for (int64_t token = start; token < start + count; ++token) {
            const int64_t slot = slots.data()[token];
            require(0 <= slot && static_cast<size_t>(slot) < store.shape(0), "a slot out of range");
            for (size_t tap = 0; tap < states.size(); ++tap)
                kernels().layer.to_halves(states[tap].data() + token * part, part, store.data() + slot * width + tap * part);
        }
    }
}

// Read features of rows from a store of float16, one piece after another. pieces: (row, start, count) each, see `FeatureStore.read`.
void read_halves(const Table<uint16_t>& store, const Table<int64_t>& pages, const nb::list& pieces, const OutTable<float>& out) {
    const size_t width = store.shape(1);
    require(out.shape(1) == width, "the output has the wrong size");
    size_t done = 0;
    for (nb::handle piece : pieces) {
        const int64_t row = Span::at(piece, 0), start = Span::at(piece, 1), count = Span::at(piece, 2);
        require(0 <= row && static_cast<size_t>(row) < pages.shape(0), "no such row");
        require(within(start, count, pages.shape(1) * kPageTokens), "a piece lies beyond its row's pages");
        require(done + static_cast<size_t>(count) <= out.shape(0), "the output is too small");
        const int64_t* own_pages = pages.data() + row * pages.shape(1);
        for (int64_t position = start; position < start + count; ++position, ++done) {
            const int64_t slot = slot_at(own_pages, position);
            require(0 <= slot && static_cast<size_t>(slot) < store.shape(0), "a slot out of range");
            kernels().layer.from_halves(store.data() + slot * width, width, out.data() + done * width);
        }
    }
    require(done == out.shape(0), "the output is too large");
}

// A store of float16 zeros in a region of its own.
Returned<uint16_t, 2> halves(const nb::handle& self, size_t width) {
    auto& memory = nb::cast<PageMemory&>(self);
    const size_t rows = memory.num_pages() * kPageTokens;
    require(memory.num_pages() <= (SIZE_MAX >> 1) / sizeof(uint16_t) / kPageTokens / std::max<size_t>(width, 1), "more halves than can be addressed");
    return {memory.add(kPageTokens * width * sizeof(uint16_t)), {rows, width}, self};
}

}  // namespace

void bind_rows(nb::module_& m) {
    m.def("pack_spans", &pack_spans, "token_ids"_a.noconvert(), "pages"_a.noconvert(), "spans"_a, "wanted"_a, "num_tokens"_a,
          "block"_a.noconvert(), "out_pages"_a.noconvert());
    nb::class_<PageMemory>(m, "PageMemory")
        .def(nb::init<size_t>(), "num_pages"_a)
        .def("halves", &halves, "width"_a)
        .def("expect", &PageMemory::expect, "first"_a);
    m.def("write_halves", &write_halves, "taps"_a, "starts"_a, "counts"_a, "slots"_a.noconvert(), "store"_a.noconvert());
    m.def("read_halves", &read_halves, "store"_a.noconvert(), "pages"_a.noconvert(), "pieces"_a, "out"_a.noconvert());
}

}  // namespace paceline
