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
    std::vector<const float*> states;  // [num_taps] of each [.., hidden]
    size_t hidden;
    const int64_t *places, *slots;  // [count] where a token's states lie, and where its feature goes
    size_t count;
};

// store[slots[i]] = the feature of token i, in half precision and bounded by it. Of equal slots the last token counts.
void fuse(Team& team, const Fusing& fusing, const TappedTokens& tokens, uint16_t* store);

}  // namespace paceline
