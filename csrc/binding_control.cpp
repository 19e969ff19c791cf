// The controller's arithmetic, as Python sees it. Everything that comes in is checked here.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "binding.h"
#include "control.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

template <class T, size_t dims>
using Array = nb::ndarray<T, nb::ndim<dims>, nb::c_contig, nb::device::cpu>;
using Ids = Array<const int64_t, 1>;
using Numbers = Array<const double, 1>;
using Table = Array<const double, 2>;
using State = Array<double, 1>;
using Result = nb::ndarray<nb::numpy, double, nb::ndim<2>>;
using Counts = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>;

constexpr size_t kMostDepth = 1024;

void require_rows(const Ids& rows, size_t num_rows) {
    const auto* end = rows.data() + rows.size();
    require(std::all_of(rows.data(), end, [&](int64_t row) { return 0 <= row && static_cast<size_t>(row) < num_rows; }),
            "a row lies outside its table");
}

template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> owned(std::unique_ptr<T[]> numbers, size_t n) {
    T* raw = numbers.release();
    nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return {raw, {n}, owner};
}

Habits habits(const State& habit, const State& habit_var, const State& usual, const State& num_usual, const State& ease,
              const State& ease_var) {
    const size_t depth = habit.size();
    require(habit_var.size() == depth && usual.size() == depth && num_usual.size() == depth, "tables of depths differ in size");
    require(ease.size() == ease_var.size(), "tables of rows differ in size");
    return {habit.data(), habit_var.data(), usual.data(), num_usual.data(), depth, ease.data(), ease_var.data(), ease.size()};
}

Said said(const std::optional<Table>& confidence, size_t n) {
    if (!confidence) return {nullptr, 0};
    require(confidence->shape(0) == n, "confidence needs a line for each row");
    return {confidence->data(), confidence->shape(1)};
}

Result alive_of(const State& habit, const State& habit_var, const State& usual, const State& num_usual, const State& ease,
                const State& ease_var, double sureness, double largest_logit, const Ids& rows, size_t depth,
                const std::optional<Table>& confidence, bool fill, double optimism) {
    const Habits own = habits(habit, habit_var, usual, num_usual, ease, ease_var);
    require_rows(rows, own.num_rows);
    require(depth <= kMostDepth, "too deep");
    const size_t n = rows.size();
    auto out = std::make_unique<double[]>(std::max<size_t>(n * depth, 1));
    alive(own, {0, sureness, 0}, largest_logit, said(confidence, n), {rows.data(), n, depth, optimism, fill}, out.get());
    double* raw = out.release();
    nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<double*>(p); });
    return {raw, {n, depth}, owner};
}

std::tuple<double, double, double> observe_drafts(
    const State& habit, const State& habit_var, const State& usual, const State& num_usual, const State& ease,
    const State& ease_var, std::tuple<double, double, double> spread, const Numbers& rates, const Ids& rows,
    const Ids& num_verified, const Ids& num_accepted, const Ids& drafters, int64_t own,
    const std::optional<Table>& confidence) {
    const Habits table = habits(habit, habit_var, usual, num_usual, ease, ease_var);
    const size_t n = rows.size();
    require(rates.size() == 8, "eight rates");
    require(num_verified.size() == n && num_accepted.size() == n && drafters.size() == n, "outcomes differ in number");
    require_rows(rows, table.num_rows);
    const double* r = rates.data();
    const Spread found = observe(table, {std::get<0>(spread), std::get<1>(spread), std::get<2>(spread)},
                                 {r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7]}, said(confidence, n),
                                 {rows.data(), num_verified.data(), num_accepted.data(), drafters.data(), own, n});
    return {found.rows, found.sureness, found.sureness_var};
}

double correct_passes(const State& own, const Array<int64_t, 1>& seen, const Ids& sizes, const Numbers& measured_s,
                      const State& pass_s, size_t size, double rate, double surprise) {
    const size_t tokens = sizes.size();
    require(seen.size() == own.size() && measured_s.size() == tokens && pass_s.size() == tokens, "tables differ in size");
    require(size < own.size(), "no such size");
    require_rows(sizes, own.size());
    return correct({own.data(), seen.data(), own.size(), sizes.data(), measured_s.data(), pass_s.data(), tokens}, size, rate, surprise);
}

std::tuple<Counts, double, double, double> choose_drafts(const Table& alive, const Ids& most, const Ids& lengths,
                                                         const Ids& drafters, double plain_tokens, double unpaid_s,
                                                         const Numbers& pass_s, size_t first, double pair_s, double besides_s,
                                                         const std::optional<Array<const double, 3>>& added,
                                                         const Numbers& factors, double scale, double host_s, double fee_s) {
    const size_t n = alive.shape(0), depth = alive.shape(1);
    require(most.size() == n && lengths.size() == n && drafters.size() == n, "a number for each row");
    require(pass_s.size() > 0, "no pass has a price");
    Ladder ladder{pass_s.data(), pass_s.size(), first, pair_s, besides_s, nullptr, factors.data(), 0, 0, 0, scale, host_s, fee_s};
    if (added && added->shape(0)) {
        ladder.added = added->data();
        ladder.drafters = added->shape(0);
        ladder.most_rows = added->shape(1) - 1;
        ladder.width = added->shape(2);
        require(factors.size() == ladder.drafters && added->shape(1) > 1 && ladder.width > 0, "prices of drafting do not fit");
        for (size_t i = 0; i < n; ++i)
            require(most.data()[i] <= 0 || (0 <= drafters.data()[i] && static_cast<size_t>(drafters.data()[i]) < ladder.drafters),
                    "a row's drafter has no price");
    }
    const Best best = best_drafts(ladder, {alive.data(), most.data(), lengths.data(), drafters.data(), n, depth, plain_tokens, unpaid_s});
    auto ks = std::make_unique<int64_t[]>(std::max<size_t>(n, 1));
    std::copy(best.ks.begin(), best.ks.end(), ks.get());
    return {owned(std::move(ks), n), best.tokens, best.seconds, best.plain_seconds};
}

}  // namespace

void bind_control(nb::module_& m) {
    m.def("alive_of", &alive_of, "habit"_a, "habit_var"_a, "usual"_a, "num_usual"_a, "ease"_a, "ease_var"_a, "sureness"_a,
          "largest_logit"_a, "rows"_a, "depth"_a, "confidence"_a.none(), "fill"_a, "optimism"_a);
    m.def("observe_drafts", &observe_drafts, "habit"_a, "habit_var"_a, "usual"_a, "num_usual"_a, "ease"_a, "ease_var"_a,
          "spread"_a, "rates"_a, "rows"_a, "num_verified"_a, "num_accepted"_a, "drafters"_a, "own"_a, "confidence"_a.none());
    m.def("correct_passes", &correct_passes, "own"_a.noconvert(), "seen"_a.noconvert(), "sizes"_a, "measured_s"_a,
          "pass_s"_a.noconvert(), "size"_a, "rate"_a, "surprise"_a);
    m.def("choose_drafts", &choose_drafts, "alive"_a, "most"_a, "lengths"_a, "drafters"_a, "plain_tokens"_a, "unpaid_s"_a,
          "pass_s"_a, "first"_a, "pair_s"_a, "besides_s"_a, "added"_a.none(), "factors"_a, "scale"_a, "host_s"_a, "fee_s"_a);
}

}  // namespace paceline
