#include "model/sampling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "isa/kernels.h"

namespace paceline {
namespace {

constexpr double kMinTemperature = 1e-5;  // as core/sampling.py
// Distances below the largest logit, in nats, within which likely tokens are searched: the first that finds enough tokens is used.
constexpr double kCuts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 20, 24, 32, 64};
constexpr size_t kFewCandidates = 128;  // at most this number get their noise one by one

// Passes over a vocabulary: vectorised in float32, plain in float64, which only the reference backend uses.

void scale(const float* x, size_t blocks, float inverse, float* z, float* maxima) {
    kernels().vocabulary.scale(x, blocks, inverse, z, maxima);
}

void scale(const double* x, size_t blocks, double inverse, double* z, double* maxima) {
    for (size_t b = 0; b < blocks; ++b) {
        maxima[b] = -std::numeric_limits<double>::infinity();
        for (size_t i = b * kBlock; i < (b + 1) * kBlock; ++i) {
            z[i] = x[i] * inverse;
            maxima[b] = z[i] > maxima[b] ? z[i] : maxima[b];
        }
    }
}

float maximum(const float* z, size_t n) { return kernels().vocabulary.maximum(z, n); }

double maximum(const double* z, size_t n) {
    double top = -std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < n; ++i) top = z[i] > top ? z[i] : top;
    return top;
}

double mass(const float* z, size_t blocks, float top) { return kernels().vocabulary.mass(z, blocks, top); }

double mass(const double* z, size_t blocks, double top) {
    double total = 0.0;
    for (size_t i = 0; i < blocks * kBlock; ++i) total += std::exp(z[i] - top);
    return total;
}

void bound(const float* z, size_t blocks, Key key, float* bounds, float* out) {
    kernels().vocabulary.bound(z, blocks, key.k0, key.k1, 0, bounds, out);
}

void bound(const double* z, size_t blocks, Key key, double* bounds, double* out) {
    for (size_t b = 0; b < blocks; ++b) {
        out[b] = -std::numeric_limits<double>::infinity();
        for (size_t i = b * kBlock; i < (b + 1) * kBlock; ++i) {
            // 2**32 / h1 is an upper bound of 1 / v; log2 of it from above is all that is needed.
            const double ceiling = 1e-9 - std::log(leading_bits(key, static_cast<uint32_t>(i)) * 0x1p-32);
            bounds[i] = z[i] + std::min(ceiling, 45.0);
            out[b] = std::max(out[b], bounds[i]);
        }
    }
}

}  // namespace

template <class T>
void Sampler<T>::load(const T* logits, size_t vocab, double temperature, const Edits& edits, const uint32_t* allowed) {
    vocab_ = vocab;
    const size_t whole = vocab / kBlock;
    z_.resize(blocks() * kBlock);
    values_ = z_.data();
    maxima_.assign(round_up(blocks(), kBlock), -limit());
    const T inverse = temperature > 0.0 ? static_cast<T>(1.0 / std::max(temperature, kMinTemperature)) : static_cast<T>(1);
    scale(logits, whole, inverse, z_.data(), maxima_.data());
    for (size_t i = whole * kBlock; i < z_.size(); ++i) z_[i] = i < vocab ? logits[i] * inverse : -limit();
    for (size_t i = 0; i < edits.count; ++i) z_[edits.ids[i]] = edited(logits[edits.ids[i]], edits, i) * inverse;
    const auto renew = [this](size_t block) { maxima_[block] = maximum(&z_[block * kBlock], kBlock); };
    for (size_t i = 0; i < edits.count; ++i) renew(static_cast<size_t>(edits.ids[i]) / kBlock);
    if (whole < blocks()) renew(whole);
    few_ = false;
    if (allowed) forbid(allowed);
    top_ = maximum(maxima_.data(), maxima_.size());
}

// Most words of a mask are all ones or all zeros: inside a string nearly every token is allowed, elsewhere few are.
template <class T>
void Sampler<T>::forbid(const uint32_t* allowed) {
    constexpr size_t kWord = 32;
    size_t count = 0;
    for (size_t b = 0; b < blocks(); ++b) {
        bool changed = false;
        for (size_t start = b * kBlock; start < std::min((b + 1) * kBlock, vocab_); start += kWord) {
            const uint32_t bits = allowed[start / kWord];
            count += static_cast<size_t>(std::popcount(bits));
            if (bits == ~uint32_t{0}) continue;
            changed = true;
            if (!bits) std::fill_n(z_.begin() + static_cast<ptrdiff_t>(start), kWord, -limit());
            else
                for (size_t i = 0; i < kWord; ++i) z_[start + i] = bits >> i & 1 ? z_[start + i] : -limit();
        }
        if (changed) maxima_[b] = maximum(&z_[b * kBlock], kBlock);
    }
    few_ = count <= kFewCandidates;
}

template <class T>
void Sampler<T>::view(const T* logits, size_t vocab) {
    if (vocab % kBlock) return load(logits, vocab, 0.0, {});  // `load` pads the row
    vocab_ = vocab, values_ = logits;
    maxima_.assign(round_up(blocks(), kBlock), -limit());
    for (size_t b = 0; b < blocks(); ++b) maxima_[b] = maximum(logits + b * kBlock, kBlock);
    top_ = maximum(maxima_.data(), maxima_.size());
}

template <class T>
int64_t Sampler<T>::argmax() const {
    if (broken()) return kBroken;
    const size_t block = std::find(maxima_.begin(), maxima_.end(), top_) - maxima_.begin();
    return std::find(values_ + block * kBlock, values_ + vocab_, top_) - values_;
}

template <class T>
double Sampler<T>::lead() {
    const auto& two = leaders(2);
    if (two.size() < 2) return std::numeric_limits<double>::infinity();
    return static_cast<double>(two[0].value) - static_cast<double>(two[1].value);
}

template <class T>
int64_t Sampler<T>::choose(const Filters& filters, Key key, double* ahead) {
    if (broken()) return kBroken;
    if (!filters.active() && !few_) return noisy_argmax(key, ahead);
    if (filters.active()) filter(filters);
    else gather(std::numeric_limits<T>::lowest());
    if (kept_.size() > kFewCandidates) {  // a pass over all tokens is faster than so many logarithms
        std::fill(z_.begin(), z_.end(), -limit());
        for (const auto& c : kept_) z_[c.id] = c.value;
        return noisy_argmax(key, ahead);
    }
    double best = -std::numeric_limits<double>::infinity(), second = best;
    uint32_t choice = 0;
    for (const auto& c : kept_) {
        const double score = c.value + gumbel(key, c.id);
        second = std::max(second, std::min(score, best));
        if (score > best || (score == best && c.id < choice)) best = score, choice = c.id;
    }
    if (ahead) *ahead = best - second;
    return choice;
}

// Every candidate is hashed, but only those whose bound can still win get a logarithm.
template <class T>
int64_t Sampler<T>::noisy_argmax(Key key, double* ahead) {
    bounds_.resize(z_.size());
    bound_maxima_.resize(blocks());
    bound(z_.data(), blocks(), key, bounds_.data(), bound_maxima_.data());
    const size_t first_block = std::max_element(bound_maxima_.begin(), bound_maxima_.end()) - bound_maxima_.begin();
    const auto* start = bounds_.data() + first_block * kBlock;
    const size_t first = std::max_element(start, start + kBlock) - bounds_.data();
    const double floor = z_[first] + gumbel_floor(leading_bits(key, static_cast<uint32_t>(first)));
    double best = -std::numeric_limits<double>::infinity(), second = best;
    int64_t choice = static_cast<int64_t>(first);
    // Rounding is monotone: a score of at least `floor` has a bound of at least `floor` rounded to T.
    T min_bound = ahead ? -limit() : static_cast<T>(floor);
    for (size_t b = 0; b < blocks(); ++b) {
        if (bound_maxima_[b] < min_bound) continue;
        for (size_t i = b * kBlock; i < (b + 1) * kBlock; ++i) {
            if (bounds_[i] < min_bound || !(z_[i] > -limit())) continue;
            const double score = z_[i] + gumbel(key, static_cast<uint32_t>(i));
            second = std::max(second, std::min(score, best));
            if (score > best) best = score, choice = static_cast<int64_t>(i);
            if (ahead) min_bound = static_cast<T>(second);
        }
    }
    if (ahead) *ahead = best - second;
    return choice;
}

// Collect all candidates of at least this value, in ascending order of ids.
template <class T>
void Sampler<T>::gather(T min_value) {
    kept_.clear();
    for (size_t b = 0; b < blocks(); ++b) {
        if (!(maxima_[b] >= min_value)) continue;
        const size_t end = std::min((b + 1) * kBlock, vocab_);
        for (size_t i = b * kBlock; i < end; ++i)
            if (values_[i] >= min_value) kept_.push_back({values_[i], static_cast<uint32_t>(i)});
    }
}

template <class T>
void Sampler<T>::keep_largest(size_t count) {
    for (double cut : kCuts) {
        gather(static_cast<T>(top_ - cut));
        if (kept_.size() >= count) break;
    }
    if (kept_.size() < count) gather(-limit());
    count = std::min(count, kept_.size());
    std::partial_sort(kept_.begin(), kept_.begin() + count, kept_.end());
    kept_.resize(count);
}

template <class T>
void Sampler<T>::keep_nucleus(double top_p) {
    const double wanted = top_p * mass(values_, blocks(), top_);
    bool enough = false;
    for (double cut : kCuts) {
        gather(static_cast<T>(top_ - cut));
        double sum = 0.0;
        for (const auto& c : kept_) sum += weight(c);
        enough = sum > wanted * (1 + 1e-9);
        if (enough) break;
    }
    if (!enough) gather(-limit());
    std::sort(kept_.begin(), kept_.end());
    keep_mass(wanted);
}

// Keep the fewest of the sorted candidates whose mass reaches `wanted`.
template <class T>
void Sampler<T>::keep_mass(double wanted) {
    double sum = 0.0;
    size_t count = 0;
    while (count < kept_.size() && sum < wanted) sum += weight(kept_[count++]);
    kept_.resize(std::max<size_t>(count, 1));
}

template <class T>
const std::vector<Candidate<T>>& Sampler<T>::filter(const Filters& filters) {
    kept_.clear();
    if (broken()) return kept_;
    const double log_min_p = filters.min_p > 0.0 ? std::min(0.0, std::log(filters.min_p)) : -std::numeric_limits<double>::infinity();
    if (filters.top_k > 0 && static_cast<size_t>(filters.top_k) < vocab_) {
        keep_largest(static_cast<size_t>(filters.top_k));
        if (filters.top_p < 1.0) {
            double total = 0.0;
            for (const auto& c : kept_) total += weight(c);
            keep_mass(filters.top_p * total);
        }
    } else if (filters.top_p < 1.0) {
        keep_nucleus(filters.top_p);
    } else {
        gather(static_cast<T>(top_ + log_min_p));
        std::sort(kept_.begin(), kept_.end());
    }
    while (kept_.size() > 1 && !(kept_.back().value >= static_cast<T>(top_ + log_min_p))) kept_.pop_back();
    return kept_;
}

template <class T>
const std::vector<Candidate<T>>& Sampler<T>::leaders(size_t count) {
    kept_.clear();
    if (!broken()) keep_largest(std::min(count, vocab_));
    return kept_;
}

template <class T>
double Sampler<T>::log_total() {
    return static_cast<double>(top_) + std::log(mass(values_, blocks(), top_));
}

template class Sampler<float>;
template class Sampler<double>;

}  // namespace paceline
