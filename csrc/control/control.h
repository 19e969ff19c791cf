// The arithmetic of a step's choice: how likely drafts are to be kept, and how many of them are worth their time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline {

// The fast twin of control/survival.py, which says why. Arrays are the caller's.
struct Habits {
    double* habit;       // [depth] logits
    double* habit_var;   // [depth]
    double* usual;       // [depth] mean logit of the confidence
    double* num_usual;   // [depth]
    size_t depth;
    double* ease;        // [rows]
    double* ease_var;    // [rows]
    size_t num_rows;
};

struct Spread {
    double rows, sureness, sureness_var;
};

struct Rates {
    double habit_drift, row_drift, spread, least_spread, most_spread, sureness_drift, most_usual, largest_logit;
};

struct Said {
    const double* confidence;  // [n, depth], NaN where nothing was said; may be null
    size_t depth;
};

struct Kept {
    const int64_t *rows, *num_verified, *num_accepted;  // [n]
    const int64_t* drafters;                            // [n]
    int64_t own;                                        // those of this drafter count
    size_t n;
};

// How likely each depth is reached alive.
struct Question {
    size_t depth;
    double optimism;
    bool usual;  // where nothing is said the habit holds; else there is no draft
};

// confidence: [said_depth] of the row's drafts, NaN where nothing was said; null: they are not known. out: [depth]
void alive(const Habits& habits, double sureness, double largest_logit, size_t row, const double* confidence, size_t said_depth,
           const Question& question, double* out);

Spread observe(const Habits& habits, Spread spread, const Rates& rates, const Said& said, const Kept& kept);

// Where drafting ends for a row: where the next draft is kept with a chance below `bar`. odds, least: [habits.depth].
// Returns how far it can come: behind a depth where even certainty is too little there is nothing.
size_t stops(const Habits& habits, double sureness, size_t row, double bar, double* odds, double* least);

}  // namespace paceline
