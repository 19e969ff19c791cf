// What steps cost: measured prices, corrected by every real step. control/online_cost.py has the reasons.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline {

// Corrections of measured pass times, by size. A size is a class of token counts.
struct Corrections {
    double* own;           // [sizes] log of the factor by which this size's passes are off
    int64_t* seen;         // [sizes] passes of the size without prefill
    size_t sizes;
    const int64_t* size;   // [tokens] size of a pass with this number of token rows
    const double* measured_s;  // [tokens]
    double* pass_s;        // [tokens] corrected
    size_t tokens;
};

struct PassWork {
    int64_t tokens, unscored, kv_tokens, pairs;

    PassWork operator+(const PassWork& o) const {
        return {tokens + o.tokens, unscored + o.unscored, kv_tokens + o.kv_tokens, pairs + o.pairs};
    }
};

// Seconds as a function of a count, see `Curve` in control/cost.py.
struct PriceCurve {
    const double *counts, *seconds;
    size_t size;
    bool stepped;

    double operator()(double count) const;
};

// Fields in the order in which Python hands them over: `CostRates` in control/online_cost.py.
struct CostRates {
    double drift, rare, max_surprise, min_rate, first_rate, rows_of_a_step, key_noise, key_drift, min_key_share;
};

// Drafts of a step's rows, planned or made.
struct StepRows {
    const int64_t *ks, *drafters;  // [n]
    size_t n;
};

// A finished step.
struct StepDone {
    const int64_t *lengths, *num_verified, *num_accepted;  // [n]
    StepRows drafted;
    PassWork prefill;
    double draft_s, target_s, host_s;
    bool settled;        // the step before was of the same kind
    bool observes_host;  // its host time counts even if it had no drafts
};

struct StepAccount {
    double measured_s, predicted_s, plain_s;
};

// The arrays are the caller's, and change as it learns.
struct Costs {
    Corrections passes;
    int64_t *last, *num_passes;  // [sizes] number of the last pass of each size; [1] passes so far
    double* drift;               // [1] log of how much slower the machine is than when it was measured
    PriceCurve by_tokens;
    double pair_s, unscored_s;
    double* keys;  // [2] seconds of reading a key, and their variance in units of `key_s` squared
    double key_s;  // measured seconds of a key and its first query
    const double *added, *deepening, *whole;  // [drafters, max_rows + 1, width], see `DraftTables`
    double* factors;                          // [drafters] how much slower each is than when it was measured
    int64_t* drafted;                         // [drafters] steps of each
    size_t drafters, max_rows, width;
    double* host;        // [2] host seconds per row, in steps without and with drafts
    int64_t* host_seen;  // [2] steps of each kind
    CostRates rates;

    double table_s(size_t tokens) const;            // seconds of a pass by its token rows alone, before drift
    double besides_s(const PassWork& work) const;   // seconds that keys, pairs and unscored tokens add
    double pass_s(const PassWork& work) const;
    double host_s(size_t rows, bool drafts) const;
    double draft_host_s(size_t rows) const;         // host time that any draft adds to a step
    std::vector<double> drafting_s(const StepRows& rows) const;  // [drafters]

    // Price steps in which all of n rows draft 0, 1, ... tokens with one drafter, as seen by the `paying` rows among them: the price is
    // the drafting of these alone, and their share of what all drafts add to the pass. out: [drafters, depth + 1]
    void prices(const PassWork& base, size_t n, int64_t sum_of_lengths, size_t paying, size_t num_drafters, size_t depth,
                double* out) const;

    StepAccount learn(const StepDone& step) const;

  private:
    double rate_after(int64_t seen) const;
    void observe_pass(const PassWork& work, double seconds, bool prefills) const;
    double learn_keys(const PassWork& work, double surprise) const;
    void observe_drafting(size_t drafter, double predicted_s, double seconds) const;
    void observe_host(size_t rows, double seconds, bool drafts) const;
};

}  // namespace paceline
