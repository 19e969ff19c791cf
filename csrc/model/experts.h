// Mixture of experts: each token's router sends it to a few of many feed-forward networks. The rows of a pass are grouped by expert,
// so that each expert's weights are read once for all of its rows; a token's sum is in the order of its own experts, best first,
// whatever other tokens are in the pass.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "model/matrix.h"

namespace paceline {

constexpr size_t kMaxExperts = 512;
constexpr size_t kMaxExpertsPerToken = 32;

struct Expert {
    std::shared_ptr<const Matrix> gate, up, down;  // [size, hidden] twice, [hidden, size]
    std::vector<float> gate_bias, up_bias, down_bias;  // or empty
};

// How a token's experts are chosen and weighed.
struct Routing {
    bool normed = true;    // the shares of a token's experts sum to 1; otherwise the shares of all experts do, or sigmoids stay as they are
    bool sigmoid = false;  // shares are sigmoids of the router's scores; else a softmax
    float scale = 1.0f;    // multiplies all shares
};

struct Mixture {
    size_t per_token;
    Routing routing;
    std::shared_ptr<const Matrix> router;          // [num_experts, hidden], of floats
    std::vector<float> router_bias;                // or empty
    std::vector<float> correction;                 // added to sigmoids where experts are chosen, not where they are weighed; or empty
    std::shared_ptr<const Matrix> shared_gate;     // [1, hidden], of floats, where one more expert serves every token; or null
    std::vector<Expert> experts;                   // all of one shape and type

    size_t size() const { return experts[0].gate->out(); }  // outputs of an expert's gate
    size_t bytes() const;
};

// The memory that passes reuse. A slot is a token's place among the rows of one of its experts.
struct ExpertScratch {
    AlignedVector<float> normed;          // [num_tokens, hidden to 64] what router and experts read
    Activations routed;                   // of `normed`, in floats
    AlignedVector<float> scores, shared;  // [num_tokens, num_experts to 32] of the router, [num_tokens, 32] of the shared gate
    std::vector<uint16_t> chosen;         // [num_tokens, per_token] experts, best first
    std::vector<float> shares;            // [num_tokens, per_token]
    std::vector<uint32_t> slot_of;        // [num_tokens, per_token]
    std::vector<uint32_t> token_of;       // [slots]
    std::vector<uint32_t> first;          // [num_experts + 1] first slot of each expert
    std::vector<uint16_t> touched;        // experts with slots, ascending
    std::atomic<size_t> num_touched{0};   // a late thread may look while others are ahead
    Activations inputs, middle;           // [slots]
    AlignedVector<float> gate, up;        // [slots, size to 64]
    AlignedVector<float> out;             // [slots, hidden to 32]
    std::vector<uint64_t> masks;          // [num_tokens] set of experts of each token, while experts are counted
    size_t num_counted = 0;               // layers in the counts
    std::vector<double> counts;           // see `Decoder::touched_experts`
};

}  // namespace paceline
