// What a pass reads of the rows, gathered in one call: numpy takes one for every array, each of them cold after a pass.
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "bind/arrays.h"
#include "model/decoder.h"
#include "isa/kernels.h"
#include "base/zero_pages.h"
#include "model/noise.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

using Table = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutTable = nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Committed tokens of a row from `start` on, then guesses.
struct Span {
    int64_t row, start, num_known;
    nb::object guesses;
    size_t num_guesses;

    Span(const nb::handle& span) : row(at(span, 0)), start(at(span, 1)), num_known(at(span, 2)), guesses(span[3]) {
        num_guesses = nb::len(guesses);
    }
    static int64_t at(const nb::handle& span, size_t index) { return nb::cast<int64_t>(span[index]); }
    int64_t size() const { return num_known + static_cast<int64_t>(num_guesses); }

    void check(const Table& token_ids, const Table& pages) const {
        require(0 <= row && static_cast<size_t>(row) < std::min(token_ids.shape(0), pages.shape(0)), "no such row");
        require(0 <= start && 0 <= num_known && static_cast<size_t>(start + num_known) <= token_ids.shape(1),
                "a span lies beyond its row");
        require(static_cast<size_t>(start + size()) <= pages.shape(1) * kPageTokens, "a span lies beyond its row's pages");
    }
};

// The parts of one block, one after another: see `Rows.pack_spans`.
struct Block {
    int64_t *token_ids, *positions, *slots, *cu_len, *wanted;
    const int64_t* end;
};

void write(const Span& span, const Table& token_ids, const Table& pages, const Block& to, int64_t first) {
    const int64_t* known = token_ids.data() + span.row * token_ids.shape(1) + span.start;
    const int64_t* own_pages = pages.data() + span.row * pages.shape(1);
    std::copy_n(known, span.num_known, to.token_ids + first);
    for (size_t i = 0; i < span.num_guesses; ++i)
        to.token_ids[first + span.num_known + i] = nb::cast<int64_t>(span.guesses[i]);
    for (int64_t i = 0, position = span.start; i < span.size(); ++i, ++position) {
        to.positions[first + i] = position;
        to.slots[first + i] = own_pages[position / kPageTokens] * kPageTokens + position % kPageTokens;
    }
}

void pack_spans(const Table& token_ids, const Table& pages, const nb::list& spans, const nb::list& wanted, size_t num_tokens,
                const Out& block, const OutTable& out_pages) {
    const size_t num_spans = nb::len(spans), num_pages = out_pages.shape(1);
    require(nb::len(wanted) == num_spans && out_pages.shape(0) == num_spans && num_pages <= pages.shape(1),
            "the outputs have the wrong size");
    require(block.size() >= 3 * num_tokens + num_spans + 1, "the block is too small");
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

// Append what each row gained, as (row, num_known, token_ids): see `Rows.commit`.
void append_tokens(const OutTable& token_ids, const Out& length, const Out& computed, const nb::list& gained) {
    const size_t num_rows = token_ids.shape(0);
    require(length.size() == num_rows && computed.size() == num_rows, "every row has a length");
    for (nb::handle one : gained) {
        const int64_t row = Span::at(one, 0), num_known = Span::at(one, 1);
        const nb::object tokens = one[2];
        const auto count = static_cast<int64_t>(nb::len(tokens));
        require(0 <= row && static_cast<size_t>(row) < num_rows, "no such row");
        int64_t& end = length.data()[row];
        require(0 <= end && static_cast<size_t>(end + count) <= token_ids.shape(1), "a row has no room for so many tokens");
        int64_t* to = token_ids.data() + row * token_ids.shape(1) + end;
        for (int64_t i = 0; i < count; ++i) to[i] = nb::cast<int64_t>(tokens[i]);
        end += count;
        computed.data()[row] += num_known + std::max<int64_t>(0, count - 1);
    }
}

// Writes some tokens of a pass to their slots, halved, what was tapped of them side by side: see `FeatureStore.write`.
void write_halves(const nb::list& taps, const nb::list& starts, const nb::list& counts,
                  const nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& slots,
                  const nb::ndarray<uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& store) {
    using States = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
    const size_t width = store.shape(1), part = taps.size() ? width / taps.size() : 0;
    require(part * taps.size() == width, "the taps do not fit the store");
    std::vector<States> states;
    for (nb::handle tap : taps) {
        states.push_back(nb::cast<States>(tap, false));
        require(states.back().shape(0) == slots.size() && states.back().shape(1) == part, "the taps do not fit the store");
    }
    require(starts.size() == counts.size(), "as many starts as counts");
    for (size_t run = 0; run < starts.size(); ++run) {
        const auto start = nb::cast<int64_t>(starts[run]), count = nb::cast<int64_t>(counts[run]);
        const auto most = static_cast<int64_t>(slots.size());
        require(0 <= start && start <= most && 0 <= count && count <= most - start, "a run beyond the tokens of the pass");
        for (int64_t token = start; token < start + count; ++token) {
            const int64_t slot = slots.data()[token];
            require(0 <= slot && static_cast<size_t>(slot) < store.shape(0), "a slot out of range");
            for (size_t tap = 0; tap < states.size(); ++tap)
                kernels().layer.to_halves(states[tap].data() + token * part, part, store.data() + slot * width + tap * part);
        }
    }
}

// Halves of a store, of the tokens of rows, widened, as (row, start, count) one piece after another: see `FeatureStore.read`.
void read_halves(const nb::ndarray<const uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& store, const Table& pages,
                 const nb::list& pieces, const nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>& out) {
    const size_t width = store.shape(1);
    require(out.shape(1) == width, "the output has the wrong size");
    size_t done = 0;
    for (nb::handle piece : pieces) {
        const int64_t row = Span::at(piece, 0), start = Span::at(piece, 1), count = Span::at(piece, 2);
        require(0 <= row && static_cast<size_t>(row) < pages.shape(0), "no such row");
        require(0 <= start && 0 <= count && static_cast<size_t>(start + count) <= pages.shape(1) * kPageTokens,
                "a piece lies beyond its row's pages");
        require(done + static_cast<size_t>(count) <= out.shape(0), "the output is too small");
        const int64_t* own_pages = pages.data() + row * pages.shape(1);
        for (int64_t position = start; position < start + count; ++position, ++done) {
            const int64_t slot = own_pages[position / kPageTokens] * kPageTokens + position % kPageTokens;
            require(0 <= slot && static_cast<size_t>(slot) < store.shape(0), "a slot out of range");
            kernels().layer.from_halves(store.data() + slot * width, width, out.data() + done * width);
        }
    }
    require(done == out.shape(0), "the output is too large");
}

// One `Choose` of core/nouns.py.
class Reader {
  public:
    ChooseList read(const nb::list& chooses, int64_t vocab) {
        ChooseList list;
        for (nb::handle choose : chooses) list.all.push_back(read_one(choose, vocab, list.kept));
        return list;
    }

  private:
    template <class T>
    T number(const nb::handle& object, const nb::object& name) {
        return nb::cast<T>(object.attr(name));
    }

    Choose read_one(const nb::handle& choose, int64_t vocab, std::vector<nb::ndarray<>>& kept) {
        const nb::object params = choose.attr(params_);
        const Kind kind = kind_of(choose.attr(kind_));
        const auto top_k = number<int64_t>(params, top_k_);
        require(0 <= top_k && top_k < int64_t{1} << 31, "top_k lies out of bounds");
        Choose found{kind, number<double>(params, temperature_), {top_k, number<double>(params, top_p_), number<double>(params, min_p_)},
                     {0, 0}, {}};
        if (kind != Kind::argmax)
            found.key = choice_key(number<uint64_t>(choose, seed_), number<uint32_t>(choose, choice_), number<uint32_t>(choose, position_));
        const nb::object edits = choose.attr(edits_);
        if (!edits.is_none()) found.edits = edits_of(edits, vocab, kept);
        return found;
    }

    // Those of ids below `vocab`: others change nothing.
    Edits edits_of(const nb::object& edits, int64_t vocab, std::vector<nb::ndarray<>>& kept) {
        const auto ids = number<Ids>(edits, ids_);
        const auto scale = number<Floats>(edits, scale_), add = number<Floats>(edits, add_);
        require(ids.size() == scale.size() && ids.size() == add.size(), "edits need as many scales and sums as ids");
        for (const auto& array : {nb::ndarray<>(ids), nb::ndarray<>(scale), nb::ndarray<>(add)}) kept.push_back(array);
        const auto end = std::lower_bound(ids.data(), ids.data() + ids.size(), vocab);
        return {ids.data(), scale.data(), add.data(), static_cast<size_t>(end - ids.data())};
    }

    static Kind kind_of(const nb::object& kind) {
        const std::string_view name(nb::cast<const char*>(kind));
        for (size_t i = 0; i < kKinds.size(); ++i)
            if (name == kKinds[i]) return static_cast<Kind>(i);
        throw std::invalid_argument("a kind is argmax, noisy, logits or sampled");
    }

    using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    static constexpr std::array<std::string_view, 4> kKinds{"argmax", "noisy", "logits", "sampled"};  // in the order of `Kind`
    static nb::object name(const char* text) { return nb::steal(PyUnicode_InternFromString(text)); }
    const nb::object kind_ = name("kind"), params_ = name("params"), seed_ = name("seed"), choice_ = name("choice"),
                     position_ = name("position"), edits_ = name("edits"), temperature_ = name("temperature"),
                     top_k_ = name("top_k"), top_p_ = name("top_p"), min_p_ = name("min_p"), ids_ = name("ids"),
                     scale_ = name("scale"), add_ = name("add");
};

}  // namespace

size_t ChooseList::num_logit_rows() const {
    return static_cast<size_t>(std::count_if(all.begin(), all.end(), [](const Choose& c) { return c.wants_logits(); }));
}

const std::vector<Choose>& ChooseList::checked(size_t num_wanted, size_t vocab) const {
    require(all.size() == num_wanted, "every wanted token needs to know how it is chosen");
    for (const Choose& c : all) {
        const int64_t* end = c.edits.ids + c.edits.count;
        require(std::is_sorted(c.edits.ids, end), "edits must be in the order of their ids");
        if (c.edits.count && (c.edits.ids[0] < 0 || static_cast<size_t>(end[-1]) >= vocab))
            throw std::out_of_range("an edit's token id lies outside the vocabulary");
    }
    return all;
}

// A store of halves that takes memory where it is written, in huge pages: numpy asks for those for what it does not zero.
nb::ndarray<nb::numpy, uint16_t, nb::ndim<2>> zero_halves(size_t rows, size_t width) {
    require(width == 0 || rows <= SIZE_MAX / sizeof(uint16_t) / width, "more halves than can be addressed");
    auto* all = new Lazy(lazy_zeros(rows * width * sizeof(uint16_t)));
    const nb::capsule owner(all, [](void* p) noexcept { delete static_cast<Lazy*>(p); });
    return {all->get(), {rows, width}, owner};
}

// All numbers of every entry, for tests.
std::vector<std::vector<double>> told(const ChooseList& list) {
    std::vector<std::vector<double>> all;
    for (const Choose& c : list.all) {
        std::vector<double> one{double(c.kind), c.temperature, double(c.filters.top_k), c.filters.top_p, c.filters.min_p,
                                double(c.key.k0), double(c.key.k1)};
        for (size_t i = 0; i < c.edits.count; ++i)
            for (double number : {double(c.edits.ids[i]), double(c.edits.scale[i]), double(c.edits.add[i])}) one.push_back(number);
        all.push_back(std::move(one));
    }
    return all;
}

void bind_rows(nb::module_& m) {
    m.def("read_chooses", [](const nb::list& chooses, int64_t vocab) {
        static Reader* reader = new Reader;  // names outlive the interpreter, as other caches of a process do
        return reader->read(chooses, vocab);
    }, "chooses"_a, "vocab"_a);
    m.def("pack_spans", &pack_spans, "token_ids"_a.noconvert(), "pages"_a.noconvert(), "spans"_a, "wanted"_a, "num_tokens"_a,
          "block"_a.noconvert(), "out_pages"_a.noconvert());
    m.def("append_tokens", &append_tokens, "token_ids"_a.noconvert(), "length"_a.noconvert(), "computed"_a.noconvert(),
          "gained"_a);
    m.def("zero_halves", &zero_halves, "rows"_a, "width"_a);
    m.def("write_halves", &write_halves, "taps"_a, "starts"_a, "counts"_a, "slots"_a.noconvert(), "store"_a.noconvert());
    m.def("read_halves", &read_halves, "store"_a.noconvert(), "pages"_a.noconvert(), "pieces"_a, "out"_a.noconvert());
}

}  // namespace paceline
