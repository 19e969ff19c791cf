// The features that draft heads read: hidden states of a token after several layers, normed, times one matrix.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "matrix.h"
#include "team.h"

namespace paceline {

struct Fusing {
    const Matrix* fc;    // [features, num_taps * hidden]
    const float* norms;  // [num_norms, num_taps * hidden / num_norms], each over its part of the states
    size_t num_norms;    // 0: none is normed
    float eps;
};

struct TappedTokens {
    size_t num_taps, hidden;
    std::vector<const float*> states;  // [count, num_taps] of each [hidden]
    std::vector<int64_t> slots;        // [count] where a token's feature goes

    size_t count() const { return slots.size(); }
};

// store[slots[i]] = the feature of token i, in half precision and bounded by it. Of equal slots the last token counts.
void fuse(Team& team, const Fusing& fusing, const TappedTokens& tokens, uint16_t* store);

}  // namespace paceline
