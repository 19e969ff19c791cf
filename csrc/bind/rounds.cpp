// The outcome of a step as the arrays that control learns from, see control/policy.py. Each is one call: after a pass every attribute
// that Python reads is out of the caches.
#include <algorithm>
#include <cmath>
#include <vector>

#include "bind/arrays.h"
#include "bind/attribute.h"

namespace paceline {
namespace {

// Attributes of the nouns that are read here.
struct Names {
    Attribute row{"row"}, decodes{"decodes"}, drafter{"drafter"}, token_ids{"token_ids"}, confidence{"confidence"},
        num_accepted{"num_accepted"}, num_known{"num_known"}, samples{"samples"}, chunk_end{"chunk_end"}, in_flight{"in_flight"},
        in_flight_tokens{"in_flight_tokens"}, request{"request"}, speculation{"speculation"}, prompt_ids{"prompt_ids"},
        params{"params"}, max_tokens{"max_tokens"}, most{"most"};
};

const Names& names() {
    static const Names* all = new Names;  // as long as the interpreter
    return *all;
}

bool decodes(nb::handle row) { return nb::cast<bool>(names().decodes.get(row)); }

// Transpose numbers [n, kinds] to [kinds, n].
Returned<int64_t, 2> table(const std::vector<int64_t>& numbers, size_t kinds, size_t n) {
    auto copy = new_array<int64_t>(kinds * n);
    for (size_t i = 0; i < n; ++i)
        for (size_t kind = 0; kind < kinds; ++kind) copy[kind * n + i] = numbers[i * kinds + kind];
    return returned(std::move(copy), kinds, n);
}

// A table from lines of different lengths, with NaN behind the end of each.
Returned<double, 2> padded(const std::vector<std::vector<double>>& lines) {
    size_t depth = 0;
    for (const auto& line : lines) depth = std::max(depth, line.size());
    auto numbers = new_array<double>(lines.size() * depth);
    for (size_t i = 0; i < lines.size(); ++i) {
        double* to = numbers.get() + i * depth;
        std::fill(std::copy(lines[i].begin(), lines[i].end(), to), to + depth, NAN);
    }
    return returned(std::move(numbers), lines.size(), depth);
}

int64_t num_drafts(nb::handle draft) { return static_cast<int64_t>(nb::len(nb::object(names().token_ids.get(draft)))); }

int64_t drafter_of(nb::handle draft, const nb::dict& indices, int64_t none) {
    const nb::object drafter = names().drafter.get(draft);
    return !drafter.is_none() && indices.contains(drafter) ? nb::cast<int64_t>(indices[drafter]) : none;
}

std::vector<double> numbers_of(const nb::object& sequence) {
    std::vector<double> found;
    if (sequence.is_none()) return found;
    found.reserve(nb::len(sequence));
    for (nb::handle number : sequence) found.push_back(nb::cast<double>(number));
    return found;
}

// The drafts of the rows that decode: (row, drafter, number of drafts) [3, n], and confidence [n, depth].
nb::tuple draft_arrays(const nb::tuple& rows, const nb::tuple& drafts, const nb::dict& indices, int64_t none) {
    require(nb::len(rows) == nb::len(drafts), "every row has a draft, if an empty one");
    std::vector<int64_t> numbers;
    std::vector<std::vector<double>> confidence;
    for (size_t i = 0; i < nb::len(rows); ++i) {
        if (!decodes(rows[i])) continue;
        const nb::handle draft = drafts[i];
        numbers.push_back(nb::cast<int64_t>(names().row.get(rows[i])));
        numbers.push_back(drafter_of(draft, indices, none));
        numbers.push_back(num_drafts(draft));
        confidence.push_back(numbers_of(names().confidence.get(draft)));
    }
    return nb::make_tuple(table(numbers, 3, confidence.size()), padded(confidence));
}

Returned<double, 2> confidence_array(const nb::list& drafts) {
    std::vector<std::vector<double>> confidence;
    for (nb::handle draft : drafts) confidence.push_back(numbers_of(names().confidence.get(draft)));
    return padded(confidence);
}

// The outcome of a step: of the rows that decode (row, drafter, drafts proposed, verified and accepted) [5, n], and confidence
// [n, depth]; and the work of the other rows, which are prefill.
nb::tuple outcome_arrays(const nb::tuple& rows, const nb::tuple& proposed, const nb::tuple& verified, const nb::tuple& verdicts,
                      const nb::dict& indices, int64_t none) {
    const size_t n = nb::len(rows);
    require(nb::len(proposed) == n && nb::len(verified) == n && nb::len(verdicts) == n, "every row has drafts and a verdict");
    std::vector<int64_t> numbers;
    std::vector<std::vector<double>> confidence;
    int64_t tokens = 0, unscored = 0, keys = 0, pairs = 0;
    for (size_t i = 0; i < n; ++i) {
        const nb::handle row = rows[i], draft = proposed[i];
        if (!decodes(row)) {
            const auto known = nb::cast<int64_t>(names().num_known.get(row));
            const int64_t samples = nb::cast<bool>(names().samples.get(row)) ? 1 : 0;
            const int64_t end = std::max(nb::cast<int64_t>(names().chunk_end.get(row)), known);
            tokens += known, unscored += known - samples, keys += end;
            pairs += known * (end - known) + known * (known + 1) / 2;
            continue;
        }
        const int64_t drafted = num_drafts(draft), accepted = nb::cast<int64_t>(names().num_accepted.get(verdicts[i]));
        numbers.push_back(nb::cast<int64_t>(names().row.get(row)));
        numbers.push_back(drafted ? drafter_of(draft, indices, none) : none);
        numbers.push_back(drafted);
        numbers.push_back(num_drafts(verified[i]));
        numbers.push_back(accepted);
        confidence.push_back(drafted ? numbers_of(names().confidence.get(draft)) : std::vector<double>());
    }
    return nb::make_tuple(table(numbers, 5, confidence.size()), padded(confidence), nb::make_tuple(tokens, unscored, keys, pairs));
}

// Of running requests (row, tokens it can have by now, drafts that it may get) [3, n].
Returned<int64_t, 2> draft_bounds(const nb::list& running) {
    const Names& name = names();
    std::vector<int64_t> numbers;
    for (nb::handle one : running) {
        const auto in_flight = nb::cast<int64_t>(name.in_flight.get(one)), more = nb::cast<int64_t>(name.in_flight_tokens.get(one));
        const nb::object request = name.request.get(one), asked = name.speculation.get(request);
        const auto known = static_cast<int64_t>(nb::len(nb::object(name.token_ids.get(one))));
        const auto prompt = static_cast<int64_t>(nb::len(nb::object(name.prompt_ids.get(request))));
        const auto max_tokens = nb::cast<int64_t>(name.max_tokens.get(name.params.get(request)));
        const int64_t left = prompt + max_tokens - known - std::min(in_flight, more) - 1;
        numbers.push_back(nb::cast<int64_t>(name.row.get(one)));
        numbers.push_back(known + more);
        numbers.push_back(asked.is_none() ? left : std::min(left, nb::cast<int64_t>(name.most.get(asked))));
    }
    return table(numbers, 3, numbers.size() / 3);
}

// Accept each row's drafts as far as they are the target's own choices, and add the next choice: see verify/coupled.py.
nb::list accept_coupled(const nb::tuple& drafts, const nb::list& cu_len, const Ids& chosen) {
    require(nb::len(cu_len) == nb::len(drafts) + 1, "every row has its scores");
    nb::list found;
    for (size_t i = 0; i < nb::len(drafts); ++i) {
        const auto start = nb::cast<int64_t>(cu_len[i]), end = nb::cast<int64_t>(cu_len[i + 1]);
        require(0 <= start && start <= end && static_cast<size_t>(end) <= chosen.size(), "scores lie out of bounds");
        nb::list accepted;
        if (start < end) {
            const nb::object token_ids = names().token_ids.get(drafts[i]);
            require(static_cast<int64_t>(nb::len(token_ids)) == end - start - 1, "a scored row has a position for each draft and one more");
            const int64_t* at = chosen.data() + start;
            for (nb::handle guess : token_ids) {
                if (*at != nb::cast<int64_t>(guess)) break;
                accepted.append(*at++);
            }
            accepted.append(*at);
        }
        found.append(accepted);
    }
    return found;
}

}  // namespace

void bind_rounds(nb::module_& m) {
    m.def("draft_arrays", &draft_arrays, "rows"_a, "drafts"_a, "indices"_a, "none"_a);
    m.def("confidence_array", &confidence_array, "drafts"_a);
    m.def("accept_coupled", &accept_coupled, "drafts"_a, "cu_len"_a, "chosen"_a);
    m.def("outcome_arrays", &outcome_arrays, "rows"_a, "proposed"_a, "verified"_a, "verdicts"_a, "indices"_a, "none"_a);
    m.def("draft_bounds", &draft_bounds, "running"_a);
}

}  // namespace paceline
