#include "host/lookup.h"

#include <algorithm>
#include <cmath>

namespace paceline {
namespace {

constexpr int32_t kBorder = -1;
constexpr size_t kMostPlaces = 64;   // the latest are looked at
constexpr size_t kMostSteps = 512;   // through pairs of the same slot, for them
constexpr size_t kMostMatches = 6;   // lengths of match that are followed, the longest

size_t power_of_two(size_t least) {
    size_t size = 16;
    while (size < least) size *= 2;
    return size;
}

}  // namespace

TextIndex::TextIndex(size_t capacity)
    : mask_(power_of_two(capacity) - 1), text_(mask_ + 1), before_(mask_ + 1), latest_(mask_ + 1) {}

size_t TextIndex::slot(int64_t before, int64_t last) const {
    const uint64_t pair = static_cast<uint64_t>(before) << 32 ^ static_cast<uint64_t>(last);
    return pair * 0x9E3779B97F4A7C15ull >> 20 & mask_;
}

// `before_` of a position leads to the last position whose two tokens before it share a slot.
void TextIndex::append(int32_t token) {
    text_[end_ & mask_] = token;
    ++end_;
    const uint64_t next = end_;  // what follows this token will stand here
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

std::vector<TextIndex::Place> TextIndex::places(const int64_t* tail, size_t length, const Wish& wish) const {
    std::vector<Place> found;
    if (length < 2) return found;
    const size_t most = std::min(length, wish.max_match);
    const uint64_t latest = latest_[slot(tail[length - 2], tail[length - 1])];
    if (!latest) return found;
    uint64_t next = latest - 1;
    for (size_t step = 0; step < kMostSteps && found.size() < kMostPlaces && kept(next); ++step) {
        if (next < end_ && at(next) != kBorder) {
            size_t match = 0;
            while (match < most && match < next && kept(next - match - 1) && at(next - match - 1) == tail[length - 1 - match])
                ++match;
            if (match >= wish.min_match) found.push_back({next, match});
        }
        const uint32_t back = before_[next & mask_];
        if (!back) break;
        next -= back;
    }
    return found;
}

// Follow, from places of at least some match, what most of them went on with; on ties what the latest did.
Proposal TextIndex::follow(const std::vector<Place>& all, size_t match, const Wish& wish) const {
    std::vector<uint64_t> path;
    for (const Place& p : all)
        if (p.match >= match) path.push_back(p.next);
    Proposal out;
    out.match = match;
    const double began = static_cast<double>(path.size());
    const auto most = std::min(wish.most, static_cast<size_t>(wish.reach * static_cast<double>(match)));
    for (size_t i = 0; i < most && !path.empty(); ++i) {
        const auto token_of = [&](uint64_t next) {  // behind its own end, the text goes on as proposed
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
        if (best == kBorder || static_cast<double>(votes) < wish.least_share * began) break;
        out.shares.push_back(static_cast<double>(votes) / static_cast<double>(path.size()));
        std::vector<uint64_t> still;
        for (uint64_t next : path)
            if (token_of(next) == best) still.push_back(next);
        path.swap(still);
        out.token_ids.push_back(best);
    }
    return out;
}

Proposal TextIndex::propose(const int64_t* tail, size_t length, const Wish& wish) const {
    const std::vector<Place> found = places(tail, length, wish);
    std::vector<size_t> matches;
    for (const Place& p : found) matches.push_back(p.match);
    std::sort(matches.rbegin(), matches.rend());
    matches.erase(std::unique(matches.begin(), matches.end()), matches.end());
    Proposal best;
    double most = 0.0;
    for (size_t i = 0; i < std::min(matches.size(), kMostMatches); ++i) {
        Proposal one = follow(found, matches[i], wish);
        double expected = 0.0, path = 1.0;
        for (double share : one.shares) expected += path *= share;
        if (expected > most) most = expected, best = std::move(one);
    }
    return best;
}

Proposal TextIndex::go_on(const Wish& wish) const {
    std::vector<int64_t> tail;
    for (uint64_t p = end_; p > 0 && tail.size() < wish.max_match && kept(p - 1) && at(p - 1) != kBorder; --p) tail.push_back(at(p - 1));
    std::reverse(tail.begin(), tail.end());
    return propose(tail.data(), tail.size(), wish);
}

size_t Recycled::slot(int64_t before, int64_t last) {
    const uint64_t pair = static_cast<uint64_t>(before) * 0x9E3779B97F4A7C15u ^ static_cast<uint64_t>(last);
    return static_cast<size_t>(pair * 0xD1B54A32D192ED03u >> 32) % kEntries;
}

void Recycled::learn(int64_t before, int64_t last, int64_t next, int64_t place) {
    for (int64_t known : {before, kAny}) entries_[slot(known, last)] = {known, last, next, place};
}

const Recycled::Entry* Recycled::find(int64_t before, int64_t last) const {
    const Entry& entry = entries_[slot(before, last)];
    return entry.before == before && entry.last == last ? &entry : nullptr;
}

std::optional<Pointed> Recycled::look(int64_t before, int64_t last, int64_t place, const RecycledGains& gains) const {
    const auto near = [&](const Entry& entry) { return std::abs(entry.place - place) <= kNear; };
    if (const Entry* entry = find(before, last))
        return Pointed{entry->next, static_cast<float>(near(*entry) ? gains.pair : gains.far_pair)};
    const Entry* entry = find(kAny, last);
    if (!entry || !near(*entry)) return {};
    return Pointed{entry->next, static_cast<float>(gains.token)};
}

std::optional<Pointed> Pointer::repeated(const std::vector<int64_t>& tail) const {
    if (gain_ == 0.0) return {};
    const Proposal found = text_.propose(tail.data(), tail.size(), wish_);
    if (found.token_ids.empty()) return {};
    return Pointed{found.token_ids[0], static_cast<float>(gain_ * std::log(static_cast<double>(found.match)))};
}

std::optional<Pointed> Pointer::look(const int64_t* guesses, size_t count) const {
    std::vector<int64_t> tail = tail_;
    tail.insert(tail.end(), guesses, guesses + count);
    const std::optional<Pointed> found = repeated(tail);
    if (!recycled_ || tail.size() < 2) return found;
    const auto place = length_ + static_cast<int64_t>(count);
    const std::optional<Pointed> said = recycled_->look(tail.end()[-2], tail.end()[-1], place, gains_);
    if (!said) return found;
    if (found && found->token_id == said->token_id) return Pointed{said->token_id, found->add + said->add};
    return found && found->add >= said->add ? found : said;
}

}  // namespace paceline
