#include "host/text_index.h"

#include <algorithm>
#include <bit>

namespace paceline {
namespace {

constexpr int32_t kBorder = -1;
constexpr size_t kMaxOccurrences = 64;  // most occurrences that are looked at: the latest
constexpr size_t kMaxSteps = 512;       // most steps back through pairs of the same slot, to find them
constexpr size_t kMaxMatches = 6;       // most lengths of match that are followed: the longest

}  // namespace

TextIndex::TextIndex(size_t capacity)
    : mask_(std::bit_ceil(std::max<size_t>(capacity, 16)) - 1), text_(mask_ + 1), before_(mask_ + 1), latest_(mask_ + 1) {}

size_t TextIndex::slot(int64_t before, int64_t last) const {
    const uint64_t pair = static_cast<uint64_t>(before) << 32 ^ static_cast<uint64_t>(last);
    return pair * 0x9E3779B97F4A7C15ull >> 20 & mask_;
}

// `before_` of a position is the distance back to the last position whose two tokens before it have the same slot.
void TextIndex::append(int32_t token) {
    text_[end_ & mask_] = token;
    ++end_;
    const uint64_t next = end_;  // position of what will follow this token
    before_[next & mask_] = 0;
    if (end_ < 2 || token == kBorder || at(end_ - 2) == kBorder) return;
    uint64_t& latest = latest_[slot(at(end_ - 2), token)];
    if (latest && next + 1 - latest < text_.size()) before_[next & mask_] = static_cast<uint32_t>(next + 1 - latest);
    latest = next + 1;
}

void TextIndex::extend(const int64_t* token_ids, size_t count) {
    for (size_t i = 0; i < count; ++i) append(static_cast<int32_t>(token_ids[i]));
}

void TextIndex::end_text() {
    if (end_ && at(end_ - 1) != kBorder) append(kBorder);
}

std::vector<TextIndex::Occurrence> TextIndex::find(const int64_t* tail, size_t length, const LookupLimits& limits) const {
    std::vector<Occurrence> found;
    if (length < 2) return found;
    const size_t longest = std::min(length, limits.max_match);
    const uint64_t latest = latest_[slot(tail[length - 2], tail[length - 1])];
    if (!latest) return found;
    uint64_t next = latest - 1;
    for (size_t step = 0; step < kMaxSteps && found.size() < kMaxOccurrences && kept(next); ++step) {
        if (next < end_ && at(next) != kBorder) {
            size_t match = 0;
            while (match < longest && match < next && kept(next - match - 1) && at(next - match - 1) == tail[length - 1 - match])
                ++match;
            if (match >= limits.min_match) found.push_back({next, match});
        }
        const uint32_t back = before_[next & mask_];
        if (!back) break;
        next -= back;
    }
    return found;
}

// Follow the occurrences with at least this match: at each token go with the majority, on ties with the latest.
Proposal TextIndex::follow(const std::vector<Occurrence>& all, size_t match, const LookupLimits& limits) const {
    std::vector<uint64_t> path;
    for (const Occurrence& o : all)
        if (o.match >= match) path.push_back(o.next);
    Proposal out;
    out.match = match;
    const double began = static_cast<double>(path.size());
    const auto max_tokens = std::min(limits.max_tokens, static_cast<size_t>(limits.tokens_per_match * static_cast<double>(match)));
    for (size_t i = 0; i < max_tokens && !path.empty(); ++i) {
        const auto token_of = [&](uint64_t next) {  // behind the end of the text, the proposed tokens
            return next + i < end_ ? at(next + i) : out.token_ids[next + i - end_];
        };
        int32_t best = kBorder;
        size_t votes = 0;
        for (size_t a = 0; a < path.size(); ++a) {
            const int32_t token = token_of(path[a]);
            if (token == kBorder || token == best) continue;
            size_t count = 0;
            for (size_t b = a; b < path.size(); ++b) count += token_of(path[b]) == token;
            if (count > votes) best = token, votes = count;
        }
        if (best == kBorder || static_cast<double>(votes) < limits.min_share * began) break;
        out.shares.push_back(static_cast<double>(votes) / static_cast<double>(path.size()));
        std::vector<uint64_t> still;
        for (uint64_t next : path)
            if (token_of(next) == best) still.push_back(next);
        path.swap(still);
        out.token_ids.push_back(best);
    }
    return out;
}

Proposal TextIndex::propose(const int64_t* tail, size_t length, const LookupLimits& limits) const {
    const std::vector<Occurrence> found = find(tail, length, limits);
    std::vector<size_t> matches;
    for (const Occurrence& o : found) matches.push_back(o.match);
    std::sort(matches.rbegin(), matches.rend());
    matches.erase(std::unique(matches.begin(), matches.end()), matches.end());
    Proposal best;
    double highest = 0.0;
    for (size_t i = 0; i < std::min(matches.size(), kMaxMatches); ++i) {
        Proposal one = follow(found, matches[i], limits);
        double expected = 0.0, path = 1.0;
        for (double share : one.shares) expected += path *= share;
        if (expected > highest) highest = expected, best = std::move(one);
    }
    return best;
}

Proposal TextIndex::propose_continuation(const LookupLimits& limits) const {
    std::vector<int64_t> tail;
    for (uint64_t p = end_; p > 0 && tail.size() < limits.max_match && kept(p - 1) && at(p - 1) != kBorder; --p) tail.push_back(at(p - 1));
    std::reverse(tail.begin(), tail.end());
    return propose(tail.data(), tail.size(), limits);
}

}  // namespace paceline
