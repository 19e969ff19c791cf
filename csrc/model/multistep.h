// Passes in turn: each reads the tokens that the one before chose. What a drafter does, without going back to Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "model/decoder.h"
#include "host/lookup.h"

namespace paceline {

struct Turns {
    std::vector<int64_t> depths;  // [num_rows] passes that each row takes part in, at least 1
    const double* stops;          // [sum of depths, 3] where a row leaves before, see `Stop` in core/nouns.py; or null
    std::vector<Choose> chooses;  // [sum of depths] a row's one after another; none wants logits back
    std::vector<const Pointer*> pointers;  // [num_rows] to what choices without edits are given besides, or null
    size_t num_ids;               // what pointers give lies below it
    int64_t* chosen = nullptr;    // [sum of depths] out, as `Pass::chosen`; behind a row's last they are left alone
    float* margins = nullptr;     // [sum of depths] out, as `Pass::margins`
};

// Run `first`, whose wanted tokens are the last of its rows, and then passes over one token of each row. A row's pages
// reach as far as its passes do. A decoder that reads features takes what a pass made of a token for its feature.
void run_in_turn(Decoder& decoder, const Pass& first, const Turns& turns, const KVStore& kv);

// Run `first`, whose wanted tokens are the places of each row's guesses, and choose these one after another, each told of
// those before it: of a decoder with a relay.
void run_relayed(Decoder& decoder, const Pass& first, const Turns& turns, const KVStore& kv);

}  // namespace paceline
