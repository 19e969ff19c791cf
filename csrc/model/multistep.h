// Multi-step drafting: passes of a drafter, each over the tokens that the last one chose, without going back to Python.
#pragma once

#include <vector>

#include "host/hints.h"
#include "model/decoder.h"

namespace paceline {

// A row's steps lie one after another in arrays of [sum of depths].
struct DraftSteps {
    std::vector<int64_t> depths;           // [num_rows] passes that each row takes part in, at least 1
    const double* stops;                   // [sum of depths, 3] where a row stops early, see `Stop` in core/nouns.py; or null
    std::vector<SamplingSpec> specs;       // [sum of depths] none returns logits
    std::vector<const TokenHints*> hints;  // [num_rows] edits for specs that have none, or null
    size_t num_ids;                        // hinted token ids from here on are ignored
    int64_t* chosen = nullptr;             // [sum of depths] out, as `Pass::chosen`; not written behind a row's last step
    float* margins = nullptr;              // [sum of depths] out, as `Pass::margins`
    int64_t* second_ids = nullptr;            // [sum of depths] out, as `Pass::second_ids`; null: unwanted
};

// Run `first`, whose wanted tokens are the last of its rows, and then passes over one token of each row. A row's pages must
// reach as far as its passes. A decoder that reads features reads those that the last pass made of the token before.
void run_steps(Decoder& decoder, const Pass& first, const DraftSteps& steps, const KVStore& kv);

// Run `first` of a block head, a block of each row. Its wanted tokens are the queries of each row's guesses, which are then chosen one
// after another: each is corrected by the one before, the first by the block's first token.
void run_block_steps(Decoder& decoder, const Pass& first, const DraftSteps& steps, const KVStore& kv);

}  // namespace paceline
