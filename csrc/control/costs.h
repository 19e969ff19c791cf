// What steps cost: measured prices, corrected by every real step. The fast twin of control/online.py, control/host.py and
// control/reckoning.py, which say why.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline {

// What passes of each size took beyond what was expected.
struct Corrections {
    double* own;           // [sizes] log of what is a size's own
    int64_t* seen;         // [sizes] passes of each without prompts
    size_t sizes;
    const int64_t* size;   // [tokens] of a pass with so many token rows
    const double* measured_s;
    double* pass_s;        // [tokens] corrected
    size_t tokens;
};

struct PassWork {
    int64_t tokens, unscored, kv_tokens, pairs;

    PassWork operator+(const PassWork& o) const {
        return {tokens + o.tokens, unscored + o.unscored, kv_tokens + o.kv_tokens, pairs + o.pairs};
    }
};

// Seconds against a count, see `Curve` in control/cost.py.
struct PriceCurve {
    const double *counts, *seconds;
    size_t size;
    bool stepped;

    double operator()(double count) const;
};

struct CostRates {
    double hour, rare, most_surprise, least, first, rows_of_a_step, noise, drift, telling;
};

// Rows of a step, as it was planned or as it went.
struct StepRows {
    const int64_t *ks, *drafters;  // [n]
    size_t n;
};

// A step that is over.
struct StepDone {
    const int64_t *lengths, *num_verified, *num_accepted;  // [n]
    StepRows drafted;
    PassWork prefill;
    double draft_s, target_s, host_s;
    bool settled;      // the step before was of its kind
    bool tells_of_host;  // also where it had no drafts
};

struct Reckoned {
    double measured_s, predicted_s, plain_s;
};

// Arrays are the caller's, and change as it learns.
struct Costs {
    Corrections passes;
    int64_t *last, *steps;  // the last pass of each size, [sizes]; passes so far, [1]
    double* hour;           // [1]
    PriceCurve by_tokens;
    double pair_s, unscored_s;
    double* keys;  // [2] seconds of reading a key; how little is known of them, a variance in units of `key_s` squared
    double key_s;  // of a key and its first query, as measured
    const double *added, *deepening, *whole;  // [drafters, most_rows + 1, width], see `DraftTables`
    double* factors;                          // [drafters]
    int64_t* drafted;                         // [drafters]
    size_t drafters, most_rows, width;
    double* host;        // [2] seconds of the host for a row, in steps without drafts and with some
    int64_t* host_seen;  // [2]
    CostRates rates;

    double table_s(size_t tokens) const;  // corrected, but for the hour
    double besides_s(const PassWork& work) const;
    double pass_s(const PassWork& work) const;
    double host_s(size_t rows, bool drafts) const;
    double fee_s(size_t rows) const;
    std::vector<double> drafting_s(const StepRows& rows) const;  // [drafters]

    // Steps in which all of n rows draft 0, 1, ... tokens with one of the drafters, of which some pay for theirs: for
    // drafting for themselves alone, and for their part of what all drafts add to the pass. out: [drafters, depth + 1]
    void prices(const PassWork& base, size_t n, int64_t sum_of_lengths, size_t paying, size_t num_drafters, size_t depth,
                double* out) const;

    Reckoned learn(const StepDone& step) const;

  private:
    double rate_after(int64_t seen) const;
    void observe_pass(const PassWork& work, double seconds, bool prefills) const;
    double learn_keys(const PassWork& work, double surprise) const;
    void observe_drafting(size_t drafter, double predicted_s, double seconds) const;
    void observe_host(size_t rows, double seconds, bool drafts) const;
};

}  // namespace paceline
