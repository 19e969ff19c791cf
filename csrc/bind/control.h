// What the controller's binding files share.
#pragma once

#include <nanobind/ndarray.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "bind/arrays.h"
#include "control/control.h"

namespace paceline {

template <class T, size_t dims>
using Array = nanobind::ndarray<T, nanobind::ndim<dims>, nanobind::c_contig, nanobind::device::cpu>;
using Ids = Array<const int64_t, 1>;
using Numbers = Array<const double, 1>;
using Table = Array<const double, 2>;
using Prices = Array<const double, 3>;
using State = Array<double, 1>;
using Counts = Handed<int64_t, 1>;

inline constexpr size_t kMostDepth = 1024;

inline bool within(const Ids& ids, size_t end) {
    return std::all_of(ids.data(), ids.data() + ids.size(), [&](int64_t id) { return 0 <= id && static_cast<size_t>(id) < end; });
}

inline Counts copied(const std::vector<int64_t>& numbers) {
    auto copy = room_for<int64_t>(numbers.size());
    std::copy(numbers.begin(), numbers.end(), copy.get());
    return handed(std::move(copy), numbers.size());
}

// Estimates for one drafter, in arrays that Python keeps: see control/survival.py.
class Estimates {
  public:
    Estimates(const State& habit, const State& habit_var, const State& usual, const State& num_usual, const State& ease,
              const State& ease_var, const State& spread)
        : habit_(habit), habit_var_(habit_var), usual_(usual), num_usual_(num_usual), ease_(ease), ease_var_(ease_var), spread_(spread) {
        const size_t depth = habit.size();
        require(habit_var.size() == depth && usual.size() == depth && num_usual.size() == depth, "tables of depths differ in size");
        require(ease.size() == ease_var.size(), "tables of rows differ in size");
        require(spread.size() == 3, "three numbers tell how rows differ, and what sureness is worth");
    }

    Habits habits() const {
        return {habit_.data(), habit_var_.data(), usual_.data(), num_usual_.data(), habit_.size(), ease_.data(), ease_var_.data(), ease_.size()};
    }
    double sureness() const { return spread_.data()[1]; }

    void observe(const Rates& rates, const Said& said, const Kept& kept) const {
        double* s = spread_.data();
        const Spread found = paceline::observe(habits(), {s[0], s[1], s[2]}, rates, said, kept);
        s[0] = found.rows, s[1] = found.sureness, s[2] = found.sureness_var;
    }

  private:
    State habit_, habit_var_, usual_, num_usual_, ease_, ease_var_, spread_;
};

using All = std::vector<const Estimates*>;  // by drafter; null: it is given up

inline void require_rows(const Ids& rows, const All& all) {
    for (const Estimates* one : all) require(!one || within(rows, one->habits().num_rows), "a row lies outside its table");
}

inline Said said(const std::optional<Table>& confidence, size_t n) {
    if (!confidence) return {nullptr, 0};
    require(confidence->shape(0) == n, "confidence needs a line for each row");
    return {confidence->data(), confidence->shape(1)};
}

inline const double* line(const Said& said, size_t index) { return said.confidence ? said.confidence + index * said.depth : nullptr; }

}  // namespace paceline
