// What the bindings of csrc/control share.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "bind/arrays.h"
#include "control/acceptance.h"

namespace paceline {

using State = OutArray<double>;  // state that changes as it learns
using Numbers = Array<double>;

inline constexpr size_t kMaxDepth = 1024;

inline bool within(const Ids& ids, size_t end) {
    return std::all_of(ids.data(), ids.data() + ids.size(), [&](int64_t id) { return 0 <= id && static_cast<size_t>(id) < end; });
}

inline Returned<int64_t, 1> copied(const std::vector<int64_t>& numbers) {
    auto copy = new_array<int64_t>(numbers.size());
    std::copy(numbers.begin(), numbers.end(), copy.get());
    return returned(std::move(copy), numbers.size());
}

// Estimates for one drafter, in arrays that Python keeps: see control/acceptance.py.
class Estimates {
  public:
    Estimates(const State& depth_logit, const State& depth_var, const State& usual_confidence, const State& num_usual,
              const State& row_logit, const State& row_var, const State& spread)
        : depth_logit_(depth_logit), depth_var_(depth_var), usual_confidence_(usual_confidence), num_usual_(num_usual),
          row_logit_(row_logit), row_var_(row_var), spread_(spread) {
        const size_t depth = depth_logit.size();
        require(depth_var.size() == depth && usual_confidence.size() == depth && num_usual.size() == depth, "tables of depths differ in size");
        require(row_logit.size() == row_var.size(), "tables of rows differ in size");
        require(spread.size() == 3, "the spread is three numbers: variance between rows, weight of confidence, variance of that");
    }

    LogitTables tables() const {
        return {depth_logit_.data(), depth_var_.data(), usual_confidence_.data(), num_usual_.data(), depth_logit_.size(),
                row_logit_.data(), row_var_.data(), row_logit_.size()};
    }
    double confidence_weight() const { return spread_.data()[1]; }

    void observe(const FilterRates& rates, const Confidence& confidence, const DraftOutcomes& outcomes) const {
        double* s = spread_.data();
        const Spread found = paceline::observe(tables(), {s[0], s[1], s[2]}, rates, confidence, outcomes);
        s[0] = found.row_var, s[1] = found.confidence_weight, s[2] = found.confidence_weight_var;
    }

  private:
    State depth_logit_, depth_var_, usual_confidence_, num_usual_, row_logit_, row_var_, spread_;
};

using AllEstimates = std::vector<const Estimates*>;  // by drafter; null: it may not draft

inline void require_rows(const Ids& rows, const AllEstimates& all) {
    for (const Estimates* one : all) require(!one || within(rows, one->tables().num_rows), "a row lies outside its table");
}

inline Confidence checked_confidence(const std::optional<Table<double>>& confidence, size_t n) {
    if (!confidence) return {nullptr, 0};
    require(confidence->shape(0) == n, "confidence needs a line for each row");
    return {confidence->data(), confidence->shape(1)};
}

}  // namespace paceline
