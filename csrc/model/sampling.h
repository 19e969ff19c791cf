// From a row of raw logits to the target's own choice. core/sampling.py defines the same transforms.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "isa/kernels.h"
#include "model/noise.h"

namespace paceline {

// Changes to the logits of some token ids.
struct Edits {
    const int64_t* ids = nullptr;
    const float* scale = nullptr;
    const float* add = nullptr;
    size_t count = 0;
};

// The edited logit, before the temperature.
template <class T>
T edited(T logit, const Edits& edits, size_t index) {
    return (logit > 0 ? logit / edits.scale[index] : logit * edits.scale[index]) + edits.add[index];
}

// 1 / temperature, for temperatures above 0; those below 1e-5 act as 1e-5, as core/sampling.py says.
inline float inverse_temperature(double temperature) {
    return static_cast<float>(1.0 / (temperature > 1e-5 ? temperature : 1e-5));
}

// The lead of a noisy score in logits, the unit in which a drafter and its target differ.
inline double margin(double ahead, double temperature) {
    return ahead * (temperature <= 0.0 ? 1.0 : temperature > 1e-5 ? temperature : 1e-5);
}

struct Filters {
    int64_t top_k = 0;   // 0 keeps all
    double top_p = 1.0;  // 1 keeps all
    double min_p = 0.0;  // 0 keeps all

    bool active() const { return top_k > 0 || top_p < 1.0 || min_p > 0.0; }
};

template <class T>
struct Candidate {
    T value;
    uint32_t id;

    // The order of likelihood: larger values first, the lower id on ties.
    bool operator<(const Candidate& other) const {
        return value > other.value || (value == other.value && id < other.id);
    }
};

constexpr int64_t kBroken = -2;  // as core/nouns.py: no logit is finite, so there is nothing to choose

// A row of logits with its scratch memory. vocab: token ids lie below it.
template <class T>
class Sampler {
  public:
    // Load logits / temperature, edited before the division. temperature 0: no division.
    // allowed: a bit for each token, the lowest first, that may be chosen; null allows all.
    void load(const T* logits, size_t vocab, double temperature, const Edits& edits, const uint32_t* allowed = nullptr);

    // Use logits as they are, without a copy: they must outlive the calls that follow.
    void view(const T* logits, size_t vocab);

    // The id of the largest logit, the lowest id on ties.
    int64_t argmax() const;

    // The difference between the largest logit and the second; infinite if there is no second.
    double lead();

    // A sample of softmax(z) among what the filters keep. ahead: out, its noisy score less the second.
    int64_t choose(const Filters& filters, Key key, double* ahead = nullptr);

    // The candidates that top_k, then top_p, then min_p leave, most likely first. Empty for a broken row.
    const std::vector<Candidate<T>>& filter(const Filters& filters);

    // The `count` most likely tokens, most likely first.
    const std::vector<Candidate<T>>& leaders(size_t count);

    // log(sum(exp(z))).
    double log_total();

    bool broken() const { return !(top_ > -limit()) || !(top_ < limit()); }

  private:
    static constexpr T limit() { return std::numeric_limits<T>::infinity(); }
    size_t blocks() const { return (vocab_ + kBlock - 1) / kBlock; }
    void gather(T min_value);
    void forbid(const uint32_t* allowed);
    double weight(const Candidate<T>& c) const { return std::exp(static_cast<double>(c.value) - static_cast<double>(top_)); }
    void keep_largest(size_t count);
    void keep_nucleus(double top_p);
    void keep_mass(double wanted);
    int64_t noisy_argmax(Key key, double* ahead);

    size_t vocab_ = 0;
    bool few_ = false;                      // a mask leaves so few tokens that each gets its noise by itself
    T top_ = 0;
    const T* values_ = nullptr;             // z_, or the logits in view
    std::vector<T> z_, bounds_;             // [blocks * 64], z padded with -inf
    std::vector<T> maxima_, bound_maxima_;  // [blocks], the first padded to whole blocks with -inf
    std::vector<Candidate<T>> kept_;
};

}  // namespace paceline
