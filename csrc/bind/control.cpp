// The controller's estimates, as Python sees them. Everything that comes in is checked here.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>

#include "bind/control.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

Handed<double, 2> alive_of(const Estimates& estimates, double largest_logit, const Ids& rows, size_t depth,
                const std::optional<Table>& confidence, bool usual, double optimism) {
    require_rows(rows, {&estimates});
    require(depth <= kMostDepth, "too deep");
    const size_t n = rows.size();
    const Said known = said(confidence, n);
    auto out = room_for<double>(n * depth);
    for (size_t i = 0; i < n; ++i)
        alive(estimates.habits(), estimates.sureness(), largest_logit, rows.data()[i], line(known, i), known.depth,
              {depth, optimism, usual}, out.get() + i * depth);
    return handed(std::move(out), n, depth);
}

void observe_drafts(const All& all, const Numbers& rates, const Ids& rows, const Ids& num_verified, const Ids& num_accepted,
                    const Ids& drafters, const std::vector<int64_t>& own, const std::optional<Table>& confidence) {
    const size_t n = rows.size();
    require(rates.size() == 8, "eight rates");
    require(own.size() == all.size(), "estimates are of drafters");
    require(num_verified.size() == n && num_accepted.size() == n && drafters.size() == n, "outcomes differ in number");
    require_rows(rows, all);
    const double* r = rates.data();
    const Said known = said(confidence, n);
    for (size_t d = 0; d < all.size(); ++d)
        if (all[d])
            all[d]->observe({r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7]}, known,
                            {rows.data(), num_verified.data(), num_accepted.data(), drafters.data(), own[d], n});
}

// How dear one draft more of a row is, where rows have about `k`, 1 or more, and half of them go on: see control/stopping.py.
double one_more_s(const double* of_half, size_t depth, size_t k, size_t half) {
    const auto price = [&](size_t drafts) { return drafts ? of_half[drafts - 1] : 0.0; };
    const size_t high = std::min(k + 1, depth), low = std::max(std::min(k - 1, high - 1), std::min<size_t>(1, high - 1));
    return (price(high) - price(low)) / static_cast<double>(high - low) / static_cast<double>(half);
}

// How far rows go whose drafters mind stops, the drafter of each, none where it drafts nothing, and their stops.
// of_half: seconds of 1, 2, ... drafts of half of the rows.
nb::tuple stop_drafts(const All& minding, const Table& of_half, size_t half, double per_s, const Ids& rows, const Ids& most, const Ids& ks,
                      const Ids& drafters, int64_t left_alone) {
    const size_t n = rows.size(), depth = of_half.shape(1);
    require(most.size() == n && ks.size() == n && drafters.size() == n, "a number for each row");
    require(of_half.shape(0) == minding.size() && depth > 0 && half > 0, "every drafter has its prices");
    require_rows(rows, minding);
    const auto minds = [&](size_t i) {
        const int64_t d = drafters.data()[i];
        require(d < static_cast<int64_t>(minding.size()), "a row's drafter is none");
        return ks.data()[i] > 0 && d >= 0 && minding[d];
    };
    std::vector<double> planned(minding.size()), count(minding.size());
    for (size_t i = 0; i < n; ++i)
        if (minds(i)) planned[drafters.data()[i]] += static_cast<double>(ks.data()[i]), ++count[drafters.data()[i]];
    std::vector<int64_t> deeper(ks.data(), ks.data() + n), whose(n, -1);
    nb::list stopping;
    for (size_t i = 0; i < n; ++i) {
        const int64_t d = drafters.data()[i];
        if (minds(i) && rows.data()[i] != left_alone) {
            const Habits habits = minding[d]->habits();
            const auto mean = static_cast<size_t>(std::nearbyint(planned[d] / count[d]));
            std::vector<double> odds(habits.depth), least(habits.depth);
            const size_t furthest = stops(habits, minding[d]->sureness(), rows.data()[i],
                                          one_more_s(of_half.data() + d * depth, depth, mean, half) * per_s, odds.data(), least.data());
            deeper[i] = std::min(most.data()[i], static_cast<int64_t>(furthest));
            stopping.append(nb::make_tuple(rows.data()[i], odds, minding[d]->sureness(), least));
        }
        if (deeper[i] > 0) whose[i] = d;
    }
    return nb::make_tuple(copied(deeper), copied(whose), stopping);
}

}  // namespace

void bind_control(nb::module_& m) {
    nb::class_<Estimates>(m, "Estimates")
        .def(nb::init<const State&, const State&, const State&, const State&, const State&, const State&, const State&>(),
             "habit"_a.noconvert(), "habit_var"_a.noconvert(), "usual"_a.noconvert(), "num_usual"_a.noconvert(),
             "ease"_a.noconvert(), "ease_var"_a.noconvert(), "spread"_a.noconvert());
    m.def("alive_of", &alive_of, "estimates"_a, "largest_logit"_a, "rows"_a, "depth"_a, "confidence"_a.none(), "usual"_a,
          "optimism"_a);
    m.def("observe_drafts", &observe_drafts, "estimates"_a, "rates"_a, "rows"_a, "num_verified"_a, "num_accepted"_a,
          "drafters"_a, "own"_a, "confidence"_a.none());
    m.def("stop_drafts", &stop_drafts, "minding"_a, "of_half"_a, "half"_a, "per_s"_a, "rows"_a, "most"_a, "ks"_a, "drafters"_a,
          "left_alone"_a);
}

}  // namespace paceline
