#include "control/costs.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace paceline {
namespace {

constexpr double kMinSeconds = 1e-6;

int64_t pairs_of(int64_t k, int64_t length) { return k * length + k * (k + 1) / 2; }

// Remove the mean of all sizes' corrections and return it: it is the machine's drift.
double remove_mean(const Corrections& table) {
    double total = 0;
    size_t count = 0;
    for (size_t i = 0; i < table.sizes; ++i)
        if (table.seen[i]) total += table.own[i], ++count;
    const double common = total / static_cast<double>(count);
    for (size_t i = 0; i < table.sizes; ++i)
        if (table.seen[i]) table.own[i] -= common;
    return common;
}

void renew(const Corrections& table) {
    std::vector<double> factors(table.sizes);
    for (size_t i = 0; i < table.sizes; ++i) factors[i] = std::exp(table.own[i]);
    for (size_t i = 0; i < table.tokens; ++i) table.pass_s[i] = table.measured_s[i] * factors[static_cast<size_t>(table.size[i])];
}

}  // namespace

double PriceCurve::operator()(double count) const {
    const double last = counts[size - 1];
    const auto above = static_cast<size_t>(std::lower_bound(counts, counts + size, count) - counts);
    double inside = seconds[std::min(above, size - 1)];
    if (!stepped && above > 0 && above < size) {
        const double slope = (seconds[above] - seconds[above - 1]) / (counts[above] - counts[above - 1]);
        inside = seconds[above - 1] + slope * (count - counts[above - 1]);
    }
    const double slope = size > 1 ? (seconds[size - 1] - seconds[size - 2]) / (last - counts[size - 2]) : seconds[0] / counts[0];
    return inside + slope * std::max(count - last, 0.0);
}

double Costs::table_s(size_t tokens) const {
    if (tokens < passes.tokens) return passes.pass_s[tokens];
    return by_tokens(static_cast<double>(tokens)) * std::exp(passes.own[passes.size[passes.tokens - 1]]);
}

double Costs::besides_s(const PassWork& work) const {
    return keys[0] * static_cast<double>(work.kv_tokens) + pair_s * static_cast<double>(work.pairs) -
           unscored_s * static_cast<double>(work.unscored);
}

double Costs::pass_s(const PassWork& work) const {
    return std::max(table_s(static_cast<size_t>(work.tokens)) + besides_s(work), 0.0) * std::exp(*drift);
}

double Costs::host_s(size_t rows, bool drafts) const { return host[drafts] * (rates.rows_of_a_step + static_cast<double>(rows)); }

double Costs::draft_host_s(size_t rows) const { return std::max(host_s(rows, true) - host_s(rows, false), 0.0); }

std::vector<double> Costs::drafting_s(const StepRows& rows) const {
    std::vector<size_t> num_rows(drafters * width);  // [drafters, width] rows that a drafter drafts to each depth
    for (size_t i = 0; i < rows.n; ++i) {
        const int64_t k = std::min<int64_t>(rows.ks[i], static_cast<int64_t>(width) - 1);
        for (int64_t depth = 1; depth <= k; ++depth) ++num_rows[rows.drafters[i] * width + depth];
    }
    std::vector<double> found(drafters);
    for (size_t d = 0; d < drafters; ++d) {
        for (size_t depth = 1; depth < width; ++depth)
            if (const size_t count = num_rows[d * width + depth])
                found[d] += deepening[(d * (max_rows + 1) + std::min(count, max_rows)) * width + depth];
        found[d] *= factors[d] * std::exp(*drift);
    }
    return found;
}

void Costs::prices(const PassWork& base, size_t n, int64_t sum_of_lengths, size_t paying, size_t num_drafters, size_t depth,
                   double* out) const {
    const double part = n ? static_cast<double>(paying) / static_cast<double>(n) : 1.0;
    const double scale = std::exp(*drift), plain_host_s = host_s(n, false), drafts_host_s = draft_host_s(n) * part, besides = besides_s(base);
    const double plain_s = table_s(static_cast<size_t>(base.tokens)) + besides;
    for (size_t k = 0; k <= depth; ++k) {
        const auto drafts = static_cast<int64_t>(k), rows = static_cast<int64_t>(n);
        const auto pairs = static_cast<double>(drafts * sum_of_lengths + rows * (drafts * (drafts + 1) / 2));
        const double all_s = table_s(static_cast<size_t>(base.tokens) + n * k) + pair_s * pairs + besides;
        const double verify_s = plain_s + (all_s - plain_s) * part;
        for (size_t d = 0; d < num_drafters; ++d) {
            const double drafting = whole[(d * (max_rows + 1) + std::min(paying, max_rows)) * width + std::min(k, width - 1)];
            out[d * (depth + 1) + k] = (drafting * factors[d] + verify_s) * scale + plain_host_s + (k ? drafts_host_s : 0.0);
        }
    }
}

StepAccount Costs::learn(const StepDone& step) const {
    const size_t n = step.drafted.n;
    PassWork plain{static_cast<int64_t>(n), 0, 0, 0};
    int64_t verified = 0, accepted = 0, pairs = 0;
    for (size_t i = 0; i < n; ++i) {
        plain.kv_tokens += step.lengths[i];
        pairs += pairs_of(step.num_verified[i], step.lengths[i]);
        verified += step.num_verified[i];
        accepted += step.num_accepted[i];
    }
    plain.pairs = plain.kv_tokens;
    const PassWork done = plain + PassWork{verified, 0, 0, pairs} + step.prefill;
    const bool prefills = step.prefill.tokens > 0;
    const std::vector<double> drafting = drafting_s(step.drafted);
    const double all_drafting_s = std::accumulate(drafting.begin(), drafting.end(), 0.0);
    const double plain_pass_s = pass_s(plain), prefill_s = prefills ? std::max(pass_s(plain + step.prefill) - plain_pass_s, 0.0) : 0.0;
    const bool drafts = all_drafting_s > 0 || verified > 0;
    const double plain_s = plain_pass_s + host_s(n, false);
    const double predicted_s = std::max(all_drafting_s + pass_s(done) + host_s(n, drafts), 1e-9);
    const double measured_s = step.draft_s + step.target_s + step.host_s;
    const double gained = 1 + static_cast<double>(accepted) / static_cast<double>(std::max<size_t>(n, 1));
    const double share = std::min((prefill_s + gained * plain_s) / predicted_s, gained);
    const auto has_drafted = [](double seconds) { return seconds > 0; };
    if (!prefills && std::count_if(drafting.begin(), drafting.end(), has_drafted) == 1) {
        const auto drafter = static_cast<size_t>(std::find_if(drafting.begin(), drafting.end(), has_drafted) - drafting.begin());
        observe_drafting(drafter, drafting[drafter], step.draft_s);
    }
    if (step.settled) observe_pass(done, step.target_s, prefills);
    if (!prefills && (drafts || step.observes_host)) observe_host(n, step.host_s, drafts);
    return {measured_s, predicted_s, measured_s * share};
}

double Costs::rate_after(int64_t seen) const { return std::max(rates.min_rate, 1 / (1 / rates.first_rate + static_cast<double>(seen))); }

void Costs::observe_pass(const PassWork& work, double seconds, bool prefills) const {
    const auto size = static_cast<size_t>(passes.size[std::min(static_cast<size_t>(work.tokens), passes.tokens - 1)]);
    const int64_t gap = ++*num_passes - last[size];
    if (prefills && (passes.seen[size] || static_cast<double>(work.tokens) <= by_tokens.counts[by_tokens.size - 1])) return;
    const double off = std::log(std::max(seconds, kMinSeconds) / std::max(pass_s(work), kMinSeconds));
    double surprise = std::clamp(off, -rates.max_surprise, rates.max_surprise);
    last[size] = *num_passes;
    const double rare_rate = std::min(rates.first_rate, rates.min_rate * (1 + static_cast<double>(gap) / rates.rare));
    const double rate = std::max(rate_after(passes.seen[size]), rare_rate);
    if (!prefills) {
        ++passes.seen[size];
        surprise = learn_keys(work, surprise);
        *drift += rates.drift * surprise;
    }
    passes.own[size] += rate * surprise;
    if (!prefills) *drift += remove_mean(passes);
    renew(passes);
}

double Costs::learn_keys(const PassWork& work, double surprise) const {
    const double share = static_cast<double>(work.kv_tokens) * key_s / std::max(pass_s(work) / std::exp(*drift), kMinSeconds);
    if (share < rates.min_key_share) return surprise;
    const double gain = keys[1] * share / (keys[1] * share * share + rates.key_noise);
    keys[0] = std::max(keys[0] + gain * surprise * key_s, 0.0);
    keys[1] = keys[1] * (1 - gain * share) + rates.key_drift;
    return surprise * (1 - gain * share);
}

void Costs::observe_drafting(size_t drafter, double predicted_s, double seconds) const {
    const double off = std::log(std::max(seconds, kMinSeconds) / predicted_s);
    factors[drafter] *= std::exp(rate_after(drafted[drafter]++) * std::clamp(off, -rates.max_surprise, rates.max_surprise));
}

void Costs::observe_host(size_t rows, double seconds, bool drafts) const {
    const double known = host_s(rows, drafts), rate = rate_after(host_seen[drafts]++);
    host[drafts] += rate * (std::min(seconds, 2 * known + 1e-3) - known) / (rates.rows_of_a_step + static_cast<double>(rows));
    if (!host_seen[true]) host[true] = host[false];
}

}  // namespace paceline
