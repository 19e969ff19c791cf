// What the rows of a round say, as the arrays that control learns from: see control/arrays.py. In one call, as every
// attribute that Python reads after a pass is cold.
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

struct Names {
    nb::object row = name("row"), decodes = name("decodes"), drafter = name("drafter"), token_ids = name("token_ids"),
               confidence = name("confidence"), num_accepted = name("num_accepted");

    static nb::object name(const char* text) { return nb::steal(PyUnicode_InternFromString(text)); }
};

const Names& names() {
    static const Names* all = new Names;  // as long as the interpreter
    return *all;
}

bool decodes(nb::handle row) { return nb::cast<bool>(row.attr(names().decodes)); }

// Numbers by row, several kinds of them one after another in one array.
Handed<int64_t, 2> table(const std::vector<int64_t>& numbers, size_t kinds, size_t n) {
    auto copy = room_for<int64_t>(kinds * n);
    for (size_t i = 0; i < n; ++i)
        for (size_t kind = 0; kind < kinds; ++kind) copy[kind * n + i] = numbers[i * kinds + kind];
    return handed(std::move(copy), kinds, n);
}

// Lines of different lengths, NaN behind the end of each.
Handed<double, 2> padded(const std::vector<std::vector<double>>& lines) {
    size_t depth = 0;
    for (const auto& line : lines) depth = std::max(depth, line.size());
    auto numbers = room_for<double>(lines.size() * depth);
    for (size_t i = 0; i < lines.size(); ++i) {
        double* to = numbers.get() + i * depth;
        std::fill(std::copy(lines[i].begin(), lines[i].end(), to), to + depth, NAN);
    }
    return handed(std::move(numbers), lines.size(), depth);
}

int64_t num_drafts(nb::handle draft) { return static_cast<int64_t>(nb::len(nb::object(draft.attr(names().token_ids)))); }

std::vector<double> numbers_of(const nb::object& sequence) {
    std::vector<double> found;
    if (sequence.is_none()) return found;
    found.reserve(nb::len(sequence));
    for (nb::handle number : sequence) found.push_back(nb::cast<double>(number));
    return found;
}

nb::tuple drafted_of(const nb::tuple& rows, const nb::tuple& drafts, const nb::dict& indices, int64_t none) {
    require(nb::len(rows) == nb::len(drafts), "every row has a draft, if an empty one");
    std::vector<int64_t> numbers;
    std::vector<std::vector<double>> confidence;
    for (size_t i = 0; i < nb::len(rows); ++i) {
        if (!decodes(rows[i])) continue;
        const nb::handle draft = drafts[i];
        const nb::object drafter = draft.attr(names().drafter);
        numbers.push_back(nb::cast<int64_t>(rows[i].attr(names().row)));
        numbers.push_back(!drafter.is_none() && indices.contains(drafter) ? nb::cast<int64_t>(indices[drafter]) : none);
        numbers.push_back(num_drafts(draft));
        confidence.push_back(numbers_of(draft.attr(names().confidence)));
    }
    return nb::make_tuple(table(numbers, 3, confidence.size()), padded(confidence));
}

Handed<int64_t, 2> kept_of(const nb::tuple& rows, const nb::tuple& drafts, const nb::tuple& verdicts) {
    require(nb::len(rows) == nb::len(drafts) && nb::len(rows) == nb::len(verdicts), "every row has a draft and a verdict");
    std::vector<int64_t> numbers;
    for (size_t i = 0; i < nb::len(rows); ++i) {
        if (!decodes(rows[i])) continue;
        numbers.push_back(num_drafts(drafts[i]));
        numbers.push_back(nb::cast<int64_t>(verdicts[i].attr(names().num_accepted)));
    }
    return table(numbers, 2, numbers.size() / 2);
}

// What is kept of each row's drafts, where the target has chosen every token: see verify/coupled.py.
nb::list kept_while_chosen(const nb::tuple& drafts, const nb::list& cu_len,
                           const nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& chosen) {
    require(nb::len(cu_len) == nb::len(drafts) + 1, "every row has its scores");
    nb::list found;
    for (size_t i = 0; i < nb::len(drafts); ++i) {
        const auto start = nb::cast<int64_t>(cu_len[i]), end = nb::cast<int64_t>(cu_len[i + 1]);
        require(0 <= start && start <= end && static_cast<size_t>(end) <= chosen.size(), "scores lie out of bounds");
        nb::list kept;
        if (start < end) {
            const nb::object token_ids = drafts[i].attr(names().token_ids);
            require(static_cast<int64_t>(nb::len(token_ids)) == end - start - 1, "a scored row has a position for each draft and one more");
            const int64_t* at = chosen.data() + start;
            for (nb::handle guess : token_ids) {
                if (*at != nb::cast<int64_t>(guess)) break;
                kept.append(*at++);
            }
            kept.append(*at);
        }
        found.append(kept);
    }
    return found;
}

}  // namespace

void bind_rounds(nb::module_& m) {
    m.def("drafted_of", &drafted_of, "rows"_a, "drafts"_a, "indices"_a, "none"_a);
    m.def("kept_while_chosen", &kept_while_chosen, "drafts"_a, "cu_len"_a, "chosen"_a);
    m.def("kept_of", &kept_of, "rows"_a, "drafts"_a, "verdicts"_a);
}

}  // namespace paceline
