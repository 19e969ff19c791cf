// The controller's arithmetic, as Python sees it. Everything that comes in is checked here.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <vector>

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
using Prices = Array<const double, 3>;
using State = Array<double, 1>;
using Counts = Handed<int64_t, 1>;

constexpr size_t kMostDepth = 1024;

bool within(const Ids& ids, size_t end) {
    return std::all_of(ids.data(), ids.data() + ids.size(), [&](int64_t id) { return 0 <= id && static_cast<size_t>(id) < end; });
}

Counts copied(const std::vector<int64_t>& numbers) {
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

void require_rows(const Ids& rows, const All& all) {
    for (const Estimates* one : all) require(!one || within(rows, one->habits().num_rows), "a row lies outside its table");
}

Said said(const std::optional<Table>& confidence, size_t n) {
    if (!confidence) return {nullptr, 0};
    require(confidence->shape(0) == n, "confidence needs a line for each row");
    return {confidence->data(), confidence->shape(1)};
}

const double* line(const Said& said, size_t index) { return said.confidence ? said.confidence + index * said.depth : nullptr; }

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

nb::tuple stops_of(const Estimates& estimates, const Ids& rows, double bar) {
    require_rows(rows, {&estimates});
    const Habits habits = estimates.habits();
    nb::list found, furthest;
    std::vector<double> odds(habits.depth), least(habits.depth);
    for (size_t i = 0; i < rows.size(); ++i) {
        furthest.append(stops(habits, estimates.sureness(), rows.data()[i], bar, odds.data(), least.data()));
        found.append(nb::make_tuple(odds, least));
    }
    return nb::make_tuple(found, furthest);
}

double correct_passes(const State& own, const Array<int64_t, 1>& seen, const Ids& sizes, const Numbers& measured_s,
                      const State& pass_s, size_t size, double rate, double surprise) {
    const size_t tokens = sizes.size();
    require(seen.size() == own.size() && measured_s.size() == tokens && pass_s.size() == tokens, "tables differ in size");
    require(size < own.size(), "no such size");
    require(within(sizes, own.size()), "a size lies outside its table");
    return correct({own.data(), seen.data(), own.size(), sizes.data(), measured_s.data(), pass_s.data(), tokens}, size, rate, surprise);
}

// What steps cost, see `Ladder`; the arrays are Python's, held as long as this.
class Steps {
  public:
    Steps(const Numbers& pass_s, size_t first, double pair_s, double besides_s, const std::optional<Prices>& added,
          const Numbers& factors, double scale, double host_s, double fee_s)
        : pass_s_(pass_s), added_(added), factors_(factors),
          ladder_{pass_s.data(), pass_s.size(), first, pair_s, besides_s, nullptr, factors.data(), 0, 0, 0, scale, host_s, fee_s} {
        require(pass_s.size() > 0, "no pass has a price");
        if (!added || !added->shape(0)) return;
        ladder_.added = added->data();
        ladder_.drafters = added->shape(0);
        ladder_.most_rows = added->shape(1) - 1;
        ladder_.width = added->shape(2);
        require(factors.size() == ladder_.drafters && added->shape(1) > 1 && ladder_.width > 0, "prices of drafting do not fit");
    }

    Best best(const Candidates& c) const {
        for (size_t i = 0; ladder_.added && i < c.n; ++i)
            require(c.most[i] <= 0 || (0 <= c.drafters[i] && static_cast<size_t>(c.drafters[i]) < ladder_.drafters),
                    "a row's drafter has no price");
        return best_drafts(ladder_, c);
    }

  private:
    Numbers pass_s_;
    std::optional<Prices> added_;
    Numbers factors_;
    Ladder ladder_;
};

nb::tuple choose_drafts(const Steps& steps, const Table& alive, const Ids& most, const Ids& lengths, const Ids& drafters,
                        double plain_tokens, double unpaid_s) {
    const size_t n = alive.shape(0), depth = alive.shape(1);
    require(most.size() == n && lengths.size() == n && drafters.size() == n, "a number for each row");
    const Best best = steps.best({alive.data(), most.data(), lengths.data(), drafters.data(), n, depth, plain_tokens, unpaid_s});
    return nb::make_tuple(copied(best.ks), best.tokens, best.seconds, best.plain_seconds);
}

// What drafters offer.
struct Offers {
    std::vector<Said> of;  // [num_drafters]
    std::vector<bool> there;
    std::vector<Table> kept;  // which `of` points into

    Offers(const nb::tuple& offers, size_t n) : of(nb::len(offers)), there(nb::len(offers)) {
        for (size_t d = 0; d < of.size(); ++d) {
            there[d] = !offers[d].is_none();
            if (!there[d]) continue;
            kept.push_back(nb::cast<Table>(offers[d]));
            of[d] = said(kept.back(), n);
        }
    }
};

// How many tokens drafts of a row are worth: the most that any number of them brings, its time priced at `per_s`.
double worth(const double* alive, const double* prices, size_t depth, double per_s) {
    double most = 0, tokens = 0;
    for (size_t d = 0; d < depth; ++d) {
        tokens += alive[d];
        most = std::max(most, tokens - prices[d] * per_s);
    }
    return most;
}

nb::tuple plan_drafts(const Steps& steps, const All& all, double largest_logit, const nb::tuple& offers, const Table& prices,
                      double per_s, const Ids& rows, const Ids& lengths, const Ids& most, const Ids& own, double unpaid_s) {
    const size_t n = rows.size(), depth = prices.shape(1);
    require(nb::len(offers) == all.size() && prices.shape(0) == all.size(), "every drafter has its offer and its prices");
    require(lengths.size() == n && most.size() == n && own.size() == n, "a number for each row");
    require(within(own, all.size()), "a row's drafter is none");
    require_rows(rows, all);
    const Offers offered(offers, n);
    std::vector<double> chosen(n * depth), other(depth);
    std::vector<int64_t> drafters(own.data(), own.data() + n);
    const auto ask = [&](size_t drafter, size_t i, double* out) {
        if (!all[drafter]) return 0.0;
        const Said& known = offered.of[drafter];
        alive(all[drafter]->habits(), all[drafter]->sureness(), largest_logit, rows.data()[i],
              offered.there[drafter] ? line(known, i) : nullptr, known.depth, {depth, 0.0, false}, out);
        return worth(out, prices.data() + drafter * depth, depth, per_s);
    };
    for (size_t i = 0; i < n; ++i) {
        double* mine = chosen.data() + i * depth;
        double most_worth = ask(drafters[i], i, mine);
        for (size_t d = 0; d < all.size(); ++d) {
            if (!offered.there[d] || !all[d]) continue;
            const double found = ask(d, i, other.data());
            if (found <= most_worth) continue;
            most_worth = found, drafters[i] = static_cast<int64_t>(d);
            std::copy(other.begin(), other.end(), mine);
        }
    }
    const auto plain_tokens = static_cast<double>(n);
    const Best best = steps.best({chosen.data(), most.data(), lengths.data(), drafters.data(), n, depth, plain_tokens, unpaid_s});
    return nb::make_tuple(copied(drafters), copied(best.ks), best.tokens, best.seconds, best.plain_seconds);
}

Counts trim_drafts(const Steps& steps, const All& all, double largest_logit, const Ids& known_rows, const Ids& known_lengths,
                   const Ids& rows, const Ids& drafters, const Ids& ks, const Table& confidence, double unpaid_s, int64_t left_alone) {
    const size_t n = rows.size();
    require(drafters.size() == n && ks.size() == n && known_rows.size() == known_lengths.size(), "a number for each row");
    require_rows(rows, all);
    const Said known = said(confidence, n);
    const int64_t deepest = std::accumulate(ks.data(), ks.data() + n, int64_t{0}, [](int64_t a, int64_t b) { return std::max(a, b); });
    require(deepest <= static_cast<int64_t>(kMostDepth), "too deep");
    const auto depth = static_cast<size_t>(deepest);
    std::vector<double> chances(n * depth);
    std::vector<int64_t> lengths(n);
    for (size_t i = 0; i < n; ++i) {
        const int64_t* end = known_rows.data() + known_rows.size();
        const int64_t* at = std::find(known_rows.data(), end, rows.data()[i]);
        if (at != end) lengths[i] = known_lengths.data()[at - known_rows.data()];
        const int64_t d = drafters.data()[i];
        require(d < static_cast<int64_t>(all.size()), "a row's drafter is none");
        if (d >= 0 && all[d])
            alive(all[d]->habits(), all[d]->sureness(), largest_logit, rows.data()[i], line(known, i), depth, {depth, 0.0, true},
                  chances.data() + i * depth);
    }
    Best best = steps.best({chances.data(), ks.data(), lengths.data(), drafters.data(), n, depth, static_cast<double>(n), unpaid_s});
    for (size_t i = 0; i < n; ++i)
        if (rows.data()[i] == left_alone) best.ks[i] = ks.data()[i];
    return copied(best.ks);
}

std::vector<double> drafting_of(const Prices& deepening, const Numbers& factors, double scale, const Ids& ks, const Ids& drafters) {
    const size_t all = deepening.shape(0), most = deepening.shape(1) - 1, width = deepening.shape(2);
    require(factors.size() == all && drafters.size() == ks.size() && deepening.shape(1) > 0 && width > 0, "prices of drafting do not fit");
    std::vector<size_t> going(all * width);  // rows that go so deep with a drafter
    for (size_t i = 0; i < ks.size(); ++i) {
        const int64_t drafter = drafters.data()[i], k = std::min<int64_t>(ks.data()[i], static_cast<int64_t>(width) - 1);
        require(k <= 0 || (0 <= drafter && static_cast<size_t>(drafter) < all), "a row's drafter has no price");
        for (int64_t depth = 1; depth <= k; ++depth) ++going[drafter * width + depth];
    }
    std::vector<double> found(all);
    for (size_t d = 0; d < all; ++d) {
        const double* prices = deepening.data() + d * (most + 1) * width;
        for (size_t depth = 1; depth < width; ++depth)
            if (const size_t rows = going[d * width + depth]) found[d] += prices[std::min(rows, most) * width + depth];
        found[d] *= factors.data()[d] * scale;
    }
    return found;
}

}  // namespace

void bind_control(nb::module_& m) {
    nb::class_<Estimates>(m, "Estimates")
        .def(nb::init<const State&, const State&, const State&, const State&, const State&, const State&, const State&>(),
             "habit"_a.noconvert(), "habit_var"_a.noconvert(), "usual"_a.noconvert(), "num_usual"_a.noconvert(),
             "ease"_a.noconvert(), "ease_var"_a.noconvert(), "spread"_a.noconvert());
    nb::class_<Steps>(m, "Steps")
        .def(nb::init<const Numbers&, size_t, double, double, const std::optional<Prices>&, const Numbers&, double, double, double>(),
             "pass_s"_a, "first"_a, "pair_s"_a, "besides_s"_a, "added"_a.none(), "factors"_a, "scale"_a, "host_s"_a, "fee_s"_a);
    m.def("alive_of", &alive_of, "estimates"_a, "largest_logit"_a, "rows"_a, "depth"_a, "confidence"_a.none(), "usual"_a,
          "optimism"_a);
    m.def("observe_drafts", &observe_drafts, "estimates"_a, "rates"_a, "rows"_a, "num_verified"_a, "num_accepted"_a,
          "drafters"_a, "own"_a, "confidence"_a.none());
    m.def("stops_of", &stops_of, "estimates"_a, "rows"_a, "bar"_a);
    m.def("correct_passes", &correct_passes, "own"_a.noconvert(), "seen"_a.noconvert(), "sizes"_a, "measured_s"_a,
          "pass_s"_a.noconvert(), "size"_a, "rate"_a, "surprise"_a);
    m.def("choose_drafts", &choose_drafts, "steps"_a, "alive"_a, "most"_a, "lengths"_a, "drafters"_a, "plain_tokens"_a, "unpaid_s"_a);
    m.def("plan_drafts", &plan_drafts, "steps"_a, "estimates"_a, "largest_logit"_a, "offers"_a, "prices"_a, "per_s"_a, "rows"_a,
          "lengths"_a, "most"_a, "own"_a, "unpaid_s"_a);
    m.def("trim_drafts", &trim_drafts, "steps"_a, "estimates"_a, "largest_logit"_a, "known_rows"_a, "known_lengths"_a, "rows"_a,
          "drafters"_a, "ks"_a, "confidence"_a, "unpaid_s"_a, "left_alone"_a);
    m.def("drafting_of", &drafting_of, "deepening"_a, "factors"_a, "scale"_a, "ks"_a, "drafters"_a);
}

}  // namespace paceline
