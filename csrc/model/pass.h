// One forward pass: token rows in, chosen tokens out. Everything is checked at the border to Python.
#pragma once

#include <atomic>
#include <utility>
#include <vector>

#include "model/sampling.h"

namespace paceline {

enum class SamplingKind : uint8_t { argmax = 0, noisy = 1, logits = 2, sampled = 3 };  // the last two return their logits

// How one token is chosen, see `SamplingSpec` in core/nouns.py.
struct SamplingSpec {
    SamplingKind kind;
    double temperature;
    Filters filters;
    Key key;
    Edits edits;  // ids ascending

    bool wants_logits() const { return kind == SamplingKind::logits || kind == SamplingKind::sampled; }
};

// Which tokens a pass may choose, a bit each. The host fills them in beside the pass, which reads them once the gate is open.
struct Masks {
    const std::atomic_flag* gate = nullptr;  // null: no masks
    const uint32_t* words = nullptr;         // [wanted, num_words]
    const uint8_t* masked = nullptr;         // [wanted] 0: every token may be chosen, and the words are not read
    size_t num_words = 0;

    const uint32_t* of(size_t wanted) const { return gate && masked[wanted] ? words + wanted * num_words : nullptr; }
};

constexpr int64_t kUnchosen = -1;  // as core/nouns.py: the law of verification chooses

// The arrays of `Packed` in backend/seam.py, with the rows' choices of tokens.
struct Pass {
    size_t num_tokens, num_rows, max_pages;
    const int64_t *token_ids, *positions, *slots;  // [num_tokens]
    const int64_t* cu_len;                         // [num_rows + 1]
    const int64_t* pages;                          // [num_rows, max_pages]
    const int64_t* first_keys;                     // [num_rows] first position that a row's tokens attend to
    const float* features;                         // [num_tokens, hidden], if `Shape::reads_features`
    std::vector<int64_t> wanted;                   // indices of the tokens whose successor is chosen
    std::vector<SamplingSpec> specs;               // [wanted]
    size_t vocab;                                  // rows of the LM head to choose among, from the first
    size_t num_layers;
    std::vector<std::pair<size_t, float*>> taps;  // (layers run before it, out [num_tokens, hidden])
    int64_t* chosen;                              // [wanted] out: token ids, kBroken, or kUnchosen
    float* logits;                                // [wanted with logits, vocab] out
    float* margins;  // [wanted] out: logits between the chosen token and the second; unknown ones are not written; null: unwanted
    Masks masks = {};
    int64_t* second_ids = nullptr;  // [wanted] out: the second token, where margins say by how much it is behind; null: unwanted
    const int64_t* copies = nullptr;  // [num_copies, 2] (token, slot) where its key and value are written, too, by token; see `Packed`
    size_t num_copies = 0;
    bool branched = false;    // rows of branches read keys and values that other rows write
    bool reads_rows = false;  // as `Shape::reads_rows`

    // The keys that a token sees: those before this position.
    size_t end_of_keys(size_t row, size_t token) const {
        return static_cast<size_t>(positions[reads_rows ? static_cast<size_t>(cu_len[row + 1]) - 1 : token]) + 1;
    }
};

// The next guess of each row of a block head, whose block has been run.
struct BlockStep {
    size_t num_rows;
    const int64_t* previous_ids;             // [num_rows] tokens before the guesses
    const float* previous_state;             // [num_rows, Corrector::state_size]
    std::vector<const float*> states;        // [num_rows] -> [hidden] last hidden state of the query, after `final_norm`
    std::vector<const float*> head_logits;   // [num_rows] -> [vocab] of the LM head alone; empty: to be computed
    float* state;                            // [num_rows, Corrector::state_size] out
    float* log_odds;                         // [num_rows] out: that guesses are kept; instead of `Pass::margins`; or null
};

}  // namespace paceline
