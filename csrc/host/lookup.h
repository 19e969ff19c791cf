// A text with an index of where its pairs of tokens stand, and what followed the places that look like its end.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace paceline {

// The fast twin of draft/lookup/suffix.py, which says what is proposed and why.
struct Wish {
    size_t most;        // tokens
    size_t min_match;   // shortest match that counts
    size_t max_match;   // longest that is told apart
    double reach;       // tokens proposed per token matched
    double least_share; // a path stops when so few of the places it began at are still on it
};

struct Proposal {
    std::vector<int32_t> token_ids;
    std::vector<double> shares;  // of the places still on the path that went on with each token
    size_t match = 0;
};

class TextIndex {
  public:
    // Keeps the last `capacity` tokens at least.
    explicit TextIndex(size_t capacity);

    // Append tokens, none negative.
    void extend(const int64_t* token_ids, size_t count);

    uint64_t size() const { return end_; }  // tokens and borders that were appended

    // Mark a border: no match goes across it.
    void end_text();

    // What followed the places where the text before looks like the end of `tail`, which may be this text's own.
    Proposal propose(const int64_t* tail, size_t length, const Wish& wish) const;

    // The same for the text's own end.
    Proposal go_on(const Wish& wish) const;

  private:
    struct Place {
        uint64_t next;  // position of what follows
        size_t match;   // tokens before it that equal the tail's last ones
    };

    int32_t at(uint64_t position) const { return text_[position & mask_]; }
    bool kept(uint64_t position) const { return position + text_.size() > end_; }
    size_t slot(int64_t before, int64_t last) const;
    void append(int32_t token);
    std::vector<Place> places(const int64_t* tail, size_t length, const Wish& wish) const;
    Proposal follow(const std::vector<Place>& places, size_t match, const Wish& wish) const;

    uint64_t end_ = 0;
    size_t mask_;
    std::vector<int32_t> text_;     // ring
    std::vector<uint32_t> before_;  // ring: distance to the position before with the same slot, 0: none
    std::vector<uint64_t> latest_;  // by slot: 1 + the last position behind such a pair of tokens, 0: none
};

// A token that a text went on with, and the logits that drafters give it for that.
struct Pointed {
    int64_t token_id;
    float add;
};

// Logits for what a target said behind drafts that it did not keep, see draft/hints.py.
struct RecycledGains {
    double pair;      // behind the same two tokens, at most `kNear` places from here
    double far_pair;  // and anywhere else
    double token;     // behind the same token, at most `kNear` places from here
};

// What a target said behind drafts that it did not keep, by the token or two before it; the newest of what collides.
class Recycled {
  public:
    // `next` was said at this place of the text, counted in tokens. No token is negative.
    void learn(int64_t before, int64_t last, int64_t next, int64_t place);

    // What it said behind these two tokens, or the last of them, and the logits for that here.
    std::optional<Pointed> look(int64_t before, int64_t last, int64_t place, const RecycledGains& gains) const;

  private:
    struct Entry {
        int64_t before = -1, last = -1, next = -1, place = 0;
    };

    static constexpr size_t kEntries = 512;  // of one request; a pass that keeps nothing brings as many as it had drafts
    static constexpr int64_t kNear = 3;
    static constexpr int64_t kAny = -2;  // stands for the token before, where the last alone counts

    static size_t slot(int64_t before, int64_t last);
    const Entry* find(int64_t before, int64_t last) const;

    std::array<Entry, kEntries> entries_{};
};

// Points drafters of a row to what its text went on with and to what its target said, see draft/hints.py.
class Pointer {
  public:
    // tail: the text's newest tokens. gain: logits for a match that is e times as long.
    Pointer(const TextIndex& text, std::vector<int64_t> tail, double gain, size_t min_match, size_t max_match)
        : text_(text), tail_(std::move(tail)), gain_(gain), wish_{1, min_match, max_match, 1.0, 0.0} {}

    // Tell of what the target said, too. length: tokens of the text.
    // What both name gets what both give, else it is the one that gives more.
    void recycle(const Recycled& recycled, const RecycledGains& gains, int64_t length) {
        recycled_ = &recycled, gains_ = gains, length_ = length;
    }

    // What comes after these guesses, if anything like it occurred.
    std::optional<Pointed> look(const int64_t* guesses, size_t count) const;

  private:
    std::optional<Pointed> repeated(const std::vector<int64_t>& tail) const;

    const TextIndex& text_;
    std::vector<int64_t> tail_;
    double gain_;
    Wish wish_;
    const Recycled* recycled_ = nullptr;
    RecycledGains gains_{};
    int64_t length_ = 0;
};

}  // namespace paceline
