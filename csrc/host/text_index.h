// A text with an index of its pairs of tokens: finds what followed the places that look like its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline {

// Limits of a proposal. draft/lookup/suffix.py says what is proposed and why.
struct LookupLimits {
    size_t max_tokens;        // most tokens of a proposal
    size_t min_match;         // tokens; shorter matches do not count
    size_t max_match;         // tokens; longer matches are cut
    double tokens_per_match;  // tokens proposed per token matched
    double min_share;         // a path stops when a smaller share of its first occurrences is still on it
};

struct Proposal {
    std::vector<int32_t> token_ids;
    std::vector<double> shares;  // for each token, the share of the occurrences on the path that continue with it
    size_t match = 0;
};

class TextIndex {
  public:
    // Keeps at least the last `capacity` tokens.
    explicit TextIndex(size_t capacity);

    // Append tokens, none negative.
    void extend(const int64_t* token_ids, size_t count);

    // Append a border, which no match crosses.
    void end_text();

    uint64_t size() const { return end_; }  // tokens and borders appended so far

    // What followed the places where the text before looks like the end of `tail`, which may be this text's own.
    Proposal propose(const int64_t* tail, size_t length, const LookupLimits& limits) const;

    // The same for the text's own end.
    Proposal propose_continuation(const LookupLimits& limits) const;

  private:
    struct Occurrence {
        uint64_t next;  // position of what follows
        size_t match;   // tokens before it that equal the tail's last ones
    };

    int32_t at(uint64_t position) const { return text_[position & mask_]; }
    bool kept(uint64_t position) const { return position + text_.size() >= end_; }
    size_t slot(int64_t before, int64_t last) const;
    void append(int32_t token);
    std::vector<Occurrence> find(const int64_t* tail, size_t length, const LookupLimits& limits) const;
    Proposal follow(const std::vector<Occurrence>& found, size_t match, const LookupLimits& limits) const;

    uint64_t end_ = 0;
    size_t mask_;
    std::vector<int32_t> text_;     // ring
    std::vector<uint32_t> before_;  // ring: distance back to the last position of the same slot, 0: none
    std::vector<uint64_t> latest_;  // by slot: 1 + the last position behind such a pair of tokens, 0: none
};

}  // namespace paceline
