#include "host/hints.h"

#include <cmath>
#include <cstdlib>

namespace paceline {

size_t RecycledTokens::slot(int64_t before, int64_t last) {
    const uint64_t pair = static_cast<uint64_t>(before) * 0x9E3779B97F4A7C15u ^ static_cast<uint64_t>(last);
    return static_cast<size_t>(pair * 0xD1B54A32D192ED03u >> 32) % kEntries;
}

void RecycledTokens::learn(int64_t before, int64_t last, int64_t next, int64_t position) {
    for (int64_t known : {before, kAny}) entries_[slot(known, last)] = {known, last, next, position};
}

const RecycledTokens::Entry* RecycledTokens::entry(int64_t before, int64_t last) const {
    const Entry& found = entries_[slot(before, last)];
    return found.before == before && found.last == last ? &found : nullptr;
}

std::optional<Hint> RecycledTokens::find(int64_t before, int64_t last, int64_t position, const RecycledGains& gains) const {
    const auto near = [&](const Entry& entry) { return std::abs(entry.position - position) <= kNear; };
    if (const Entry* pair = entry(before, last)) return Hint{pair->next, static_cast<float>(near(*pair) ? gains.pair : gains.far_pair)};
    const Entry* single = entry(kAny, last);
    if (!single || !near(*single)) return {};
    return Hint{single->next, static_cast<float>(gains.token)};
}

std::optional<Hint> TokenHints::repeated(const std::vector<int64_t>& tail) const {
    if (gain_ == 0.0) return {};
    const Proposal found = text_.propose(tail.data(), tail.size(), limits_);
    if (found.token_ids.empty()) return {};
    return Hint{found.token_ids[0], static_cast<float>(gain_ * std::log(static_cast<double>(found.match)))};
}

std::optional<Hint> TokenHints::next(const int64_t* guesses, size_t count) const {
    std::vector<int64_t> tail = tail_;
    tail.insert(tail.end(), guesses, guesses + count);
    const std::optional<Hint> text = repeated(tail);
    if (!recycled_ || tail.size() < 2) return text;
    const auto position = length_ + static_cast<int64_t>(count);
    const std::optional<Hint> recycled = recycled_->find(tail.end()[-2], tail.end()[-1], position, gains_);
    if (!recycled) return text;
    if (text && text->token_id == recycled->token_id) return Hint{recycled->token_id, text->add + recycled->add};
    return text && text->add >= recycled->add ? text : recycled;
}

}  // namespace paceline
