// The text index, as Python sees it. Everything that comes in is checked here.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>

#include "bind/arrays.h"
#include "host/lookup.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using TokenTable = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr size_t kMostCapacity = size_t{1} << 30;
constexpr int64_t kMostId = int64_t{1} << 31;

void append(TextIndex& index, const int64_t* ids, size_t count) {
    require(std::all_of(ids, ids + count, [](int64_t id) { return 0 <= id && id < kMostId; }), "a token id lies between 0 and 2**31");
    index.extend(ids, count);
}

void extend(TextIndex& index, const Ids& ids) { append(index, ids.data(), ids.size()); }

// Bring the texts of some rows up to their lengths. token_ids: [rows there are, most tokens]; lengths: of all rows.
void extend_rows(const std::vector<TextIndex*>& texts, const std::vector<int64_t>& rows, const TokenTable& token_ids, const Ids& lengths) {
    require(texts.size() == rows.size() && lengths.size() == token_ids.shape(0), "every row has a text and a length");
    for (size_t i = 0; i < rows.size(); ++i) {
        require(texts[i] && 0 <= rows[i] && static_cast<size_t>(rows[i]) < lengths.size(), "there is no such row");
        const int64_t length = lengths.data()[rows[i]];
        require(0 <= length && static_cast<size_t>(length) <= token_ids.shape(1), "a row is longer than its room");
        const uint64_t known = texts[i]->size();
        if (known < static_cast<uint64_t>(length))
            append(*texts[i], token_ids.data() + static_cast<size_t>(rows[i]) * token_ids.shape(1) + known, static_cast<size_t>(length) - known);
    }
}

Wish wish_of(size_t most, size_t min_match, size_t max_match, double reach, double least_share) {
    require(2 <= min_match && min_match <= max_match && max_match <= 1024, "2 <= min_match <= max_match <= 1024");
    require(most <= 1024 && 0.0 <= reach && reach <= 1024.0, "most and reach are at most 1024");
    return {most, min_match, max_match, reach, least_share};
}

std::tuple<std::vector<int32_t>, std::vector<double>, size_t> propose(const TextIndex& index, const Ids& tail, size_t most,
                                                                      size_t min_match, size_t max_match, double reach,
                                                                      double least_share) {
    Proposal found = index.propose(tail.data(), tail.size(), wish_of(most, min_match, max_match, reach, least_share));
    return {std::move(found.token_ids), std::move(found.shares), found.match};
}

// What `propose` says of each text's own end, up to so many tokens.
nb::list go_on(const std::vector<const TextIndex*>& texts, const std::vector<size_t>& most, size_t min_match, size_t max_match, double reach,
               double least_share) {
    require(texts.size() == most.size(), "a number for each text");
    nb::list all;
    for (size_t i = 0; i < texts.size(); ++i) {
        require(texts[i], "a text is none");
        Proposal found = texts[i]->go_on(wish_of(most[i], min_match, max_match, reach, least_share));
        all.append(nb::make_tuple(std::move(found.token_ids), std::move(found.shares), found.match));
    }
    return all;
}

// drafted: the text's newest token and the drafts of a pass that were verified. chosen: what the target said after each,
// from this place of the text on. Keeps what it said behind the first draft that differs from it, `num_kept`.
void learn(Recycled& self, const std::vector<int64_t>& drafted, const Ids& chosen, size_t num_kept, int64_t place) {
    require(chosen.size() == drafted.size(), "the target says something after every token");
    require(0 <= place && place < kMostId, "a place of a text lies between 0 and 2**31");
    for (size_t i = num_kept + 1; i < drafted.size(); ++i)
        if (chosen(i) >= 0) self.learn(drafted[i - 1], drafted[i], chosen(i), place + static_cast<int64_t>(i));
}

void make_pointer(Pointer* self, const TextIndex& text, const Ids& tail, double gain, size_t min_match, size_t max_match) {
    require(2 <= min_match && min_match <= max_match && max_match <= 1024, "2 <= min_match <= max_match <= 1024");
    require(std::isfinite(gain), "the gain is not a finite number");
    new (self) Pointer(text, {tail.data(), tail.data() + tail.size()}, gain, min_match, max_match);
}

void recycle(Pointer& self, const Recycled& recycled, const std::tuple<double, double, double>& gains, int64_t length) {
    const auto [pair, far_pair, token] = gains;
    require(std::isfinite(pair) && std::isfinite(far_pair) && std::isfinite(token), "a gain is not a finite number");
    require(0 <= length && length < kMostId, "a text has less than 2**31 tokens");
    self.recycle(recycled, {pair, far_pair, token}, length);
}

std::optional<std::tuple<int64_t, float>> look(const Pointer& pointer, const Ids& guesses) {
    const auto found = pointer.look(guesses.data(), guesses.size());
    if (!found) return {};
    return std::tuple{found->token_id, found->add};
}

}  // namespace

void bind_lookup(nb::module_& m) {
    nb::class_<TextIndex>(m, "TextIndex")
        .def("__init__", [](TextIndex* self, size_t capacity) {
            require(0 < capacity && capacity <= kMostCapacity, "an index keeps 1 to 2**30 tokens");
            new (self) TextIndex(capacity);
        }, "capacity"_a)
        .def("extend", &extend, "token_ids"_a.noconvert())
        .def("end_text", &TextIndex::end_text)
        .def("propose", &propose, "tail"_a.noconvert(), "most"_a, "min_match"_a, "max_match"_a, "reach"_a, "least_share"_a);
    m.def("extend_rows", &extend_rows, "texts"_a, "rows"_a, "token_ids"_a.noconvert(), "lengths"_a.noconvert());
    m.def("go_on", &go_on, "texts"_a, "most"_a, "min_match"_a, "max_match"_a, "reach"_a, "least_share"_a);
    nb::class_<Recycled>(m, "Recycled")
        .def(nb::init<>())
        .def("learn", &learn, "drafted"_a, "chosen"_a.noconvert(), "num_kept"_a, "place"_a);
    nb::class_<Pointer>(m, "Pointer")
        .def("__init__", &make_pointer, "text"_a, "tail"_a.noconvert(), "gain"_a, "min_match"_a, "max_match"_a, nb::keep_alive<1, 2>())
        .def("recycle", &recycle, "recycled"_a, "gains"_a, "length"_a, nb::keep_alive<1, 2>())
        .def("look", &look, "guesses"_a.noconvert());
}

}  // namespace paceline
