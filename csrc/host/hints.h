// Tokens that a drafter should favour: tokens that followed the same text before, and the target's choices behind dropped drafts.
#pragma once

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "host/text_index.h"

namespace paceline {

// A favoured token, and what is added to its logit.
struct Hint {
    int64_t token_id;
    float add;
};

// Logits for recycled tokens, see draft/hints.py.
struct RecycledGains {
    double pair;      // logits of a token seen behind the same two tokens, at most `kNear` tokens from here
    double far_pair;  // seen behind the same two tokens, anywhere else
    double token;     // seen behind the same one token, at most `kNear` tokens from here
};

// What a target chose behind drafts that were dropped, by the one or two tokens before it; of colliding entries the newest is kept.
class RecycledTokens {
  public:
    // `next` was chosen at a position of the text. No token is negative.
    void learn(int64_t before, int64_t last, int64_t next, int64_t position);

    // The token chosen behind these two tokens, or behind the last alone, with its logits at this position.
    std::optional<Hint> find(int64_t before, int64_t last, int64_t position, const RecycledGains& gains) const;

  private:
    struct Entry {
        int64_t before = -1, last = -1, next = -1, position = 0;
    };

    static constexpr size_t kEntries = 512;  // entries of one request; a pass adds at most one per draft
    static constexpr int64_t kNear = 3;
    static constexpr int64_t kAny = -2;  // stands for any `before`, where only the last token counts

    static size_t slot(int64_t before, int64_t last);
    const Entry* entry(int64_t before, int64_t last) const;

    std::array<Entry, kEntries> entries_{};
};

// The hints for a row's next drafts, see draft/hints.py.
class TokenHints {
  public:
    // tail: the text's newest tokens. gain: logits for a match that is e times as long.
    TokenHints(const TextIndex& text, std::vector<int64_t> tail, double gain, size_t min_match, size_t max_match)
        : text_(text), tail_(std::move(tail)), gain_(gain), limits_{1, min_match, max_match, 1.0, 0.0} {}

    // Also use recycled tokens. length: tokens of the text.
    void add_recycled(const RecycledTokens& recycled, const RecycledGains& gains, int64_t length) {
        recycled_ = &recycled, gains_ = gains, length_ = length;
    }

    // The hint for the token after these guesses. If both sources name the same token their logits add up, otherwise the larger counts.
    std::optional<Hint> next(const int64_t* guesses, size_t count) const;

  private:
    std::optional<Hint> repeated(const std::vector<int64_t>& tail) const;

    const TextIndex& text_;
    std::vector<int64_t> tail_;
    double gain_;
    LookupLimits limits_;
    const RecycledTokens* recycled_ = nullptr;
    RecycledGains gains_{};
    int64_t length_ = 0;
};

}  // namespace paceline
