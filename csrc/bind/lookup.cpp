// Text indexes and hints.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>

#include "bind/arrays.h"
#include "host/hints.h"
#include "host/text_index.h"

namespace paceline {
namespace {

constexpr size_t kMaxCapacity = size_t{1} << 30;
constexpr auto kIdsEnd = static_cast<int64_t>(kMaxIds);

void append(TextIndex& index, const int64_t* ids, size_t count) {
    require(std::all_of(ids, ids + count, [](int64_t id) { return 0 <= id && id < kIdsEnd; }), "a token id lies between 0 and 2**31");
    index.extend(ids, count);
}

void extend(TextIndex& index, const Ids& ids) { append(index, ids.data(), ids.size()); }

// Bring the texts of some rows up to their lengths. token_ids: [num_rows, capacity], lengths: [num_rows], of all rows.
void extend_rows(const std::vector<TextIndex*>& texts, const std::vector<int64_t>& rows, const Table<int64_t>& token_ids, const Ids& lengths) {
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

void check_matches(size_t min_match, size_t max_match) {
    require(2 <= min_match && min_match <= max_match && max_match <= 1024, "2 <= min_match <= max_match <= 1024");
}

LookupLimits checked_limits(size_t max_tokens, size_t min_match, size_t max_match, double tokens_per_match, double min_share) {
    check_matches(min_match, max_match);
    require(max_tokens <= 1024 && 0.0 <= tokens_per_match && tokens_per_match <= 1024.0, "max_tokens and tokens_per_match are at most 1024");
    return {max_tokens, min_match, max_match, tokens_per_match, min_share};
}

nb::tuple as_tuple(Proposal found) { return nb::make_tuple(std::move(found.token_ids), std::move(found.shares), found.match); }

nb::tuple propose(const TextIndex& index, const Ids& tail, size_t max_tokens, size_t min_match, size_t max_match, double tokens_per_match,
                  double min_share) {
    return as_tuple(index.propose(tail.data(), tail.size(), checked_limits(max_tokens, min_match, max_match, tokens_per_match, min_share)));
}

// For each text what `propose` returns for the text's own end.
nb::list propose_continuations(const std::vector<const TextIndex*>& texts, const std::vector<size_t>& max_tokens, size_t min_match,
                               size_t max_match, double tokens_per_match, double min_share) {
    require(texts.size() == max_tokens.size(), "a number for each text");
    nb::list all;
    for (size_t i = 0; i < texts.size(); ++i) {
        require(texts[i], "a text is none");
        const LookupLimits limits = checked_limits(max_tokens[i], min_match, max_match, tokens_per_match, min_share);
        all.append(as_tuple(texts[i]->propose_continuation(limits)));
    }
    return all;
}

// drafted: the text's newest token and the verified drafts of a pass. chosen: the target's choice after each of them, the first at
// `position` of the text. Keeps what it chose behind each draft after the first that was dropped.
void learn(RecycledTokens& self, const std::vector<int64_t>& drafted, const Ids& chosen, size_t num_accepted, int64_t position) {
    require(chosen.size() == drafted.size(), "the target chooses after every token");
    require(0 <= position && position < kIdsEnd, "a position of a text lies between 0 and 2**31");
    require(num_accepted <= drafted.size(), "more drafts were accepted than there are");
    for (size_t i = num_accepted + 1; i < drafted.size(); ++i)
        if (chosen(i) >= 0) self.learn(drafted[i - 1], drafted[i], chosen(i), position + static_cast<int64_t>(i));
}

void make_hints(TokenHints* self, const TextIndex& text, const Ids& tail, double gain, size_t min_match, size_t max_match) {
    check_matches(min_match, max_match);
    require(std::isfinite(gain), "the gain is not a finite number");
    new (self) TokenHints(text, {tail.data(), tail.data() + tail.size()}, gain, min_match, max_match);
}

void add_recycled(TokenHints& self, const RecycledTokens& recycled, const std::tuple<double, double, double>& gains, int64_t length) {
    const auto [pair, far_pair, token] = gains;
    require(std::isfinite(pair) && std::isfinite(far_pair) && std::isfinite(token), "a gain is not a finite number");
    require(0 <= length && length < kIdsEnd, "a text has less than 2**31 tokens");
    self.add_recycled(recycled, {pair, far_pair, token}, length);
}

std::optional<std::tuple<int64_t, float>> next_hint(const TokenHints& hints, const Ids& guesses) {
    const auto found = hints.next(guesses.data(), guesses.size());
    if (!found) return {};
    return std::tuple{found->token_id, found->add};
}

}  // namespace

void bind_lookup(nb::module_& m) {
    nb::class_<TextIndex>(m, "TextIndex")
        .def("__init__", [](TextIndex* self, size_t capacity) {
            require(0 < capacity && capacity <= kMaxCapacity, "an index keeps 1 to 2**30 tokens");
            new (self) TextIndex(capacity);
        }, "capacity"_a)
        .def("extend", &extend, "token_ids"_a.noconvert())
        .def("end_text", &TextIndex::end_text)
        .def("propose", &propose, "tail"_a.noconvert(), "max_tokens"_a, "min_match"_a, "max_match"_a, "tokens_per_match"_a, "min_share"_a);
    m.def("extend_rows", &extend_rows, "texts"_a, "rows"_a, "token_ids"_a.noconvert(), "lengths"_a.noconvert());
    m.def("propose_continuations", &propose_continuations, "texts"_a, "max_tokens"_a, "min_match"_a, "max_match"_a,
          "tokens_per_match"_a, "min_share"_a);
    nb::class_<RecycledTokens>(m, "RecycledTokens")
        .def(nb::init<>())
        .def("learn", &learn, "drafted"_a, "chosen"_a.noconvert(), "num_accepted"_a, "position"_a);
    nb::class_<TokenHints>(m, "TokenHints")
        .def("__init__", &make_hints, "text"_a, "tail"_a.noconvert(), "gain"_a, "min_match"_a, "max_match"_a, nb::keep_alive<1, 2>())
        .def("add_recycled", &add_recycled, "recycled"_a, "gains"_a, "length"_a, nb::keep_alive<1, 2>())
        .def("next_hint", &next_hint, "guesses"_a.noconvert());
}

}  // namespace paceline
