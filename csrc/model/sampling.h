// From a row of raw logits to the target's own choice: the fast twin of core/sampling.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "model/noise.h"

namespace paceline {

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

// 1 / temperature for one above 0; tiny ones act as 1e-5, as core/sampling.py says.
inline float inverse_temperature(double temperature) {
    return static_cast<float>(1.0 / (temperature > 1e-5 ? temperature : 1e-5));
}

// How far a noisy score is ahead of the next, in logits: what a drafter and its target differ by is in these, too.
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

constexpr int64_t kBroken = -2;  // as core/nouns.py: no logit is finite: there is nothing to choose

// A row of logits with its scratch memory. `vocab` is the number of token ids; ids must be below it.
template <class T>
class Sampler {
  public:
    // Take in logits / temperature, with the edits made before the division. temperature 0 keeps them as they are.
    void load(const T* logits, size_t vocab, double temperature, const Edits& edits);

    // Take in logits as they are, which must outlive what is asked then.
    void view(const T* logits, size_t vocab);

    // The largest, the lowest id on ties.
    int64_t argmax() const;

    // How far the largest is ahead of the next; infinite where there is none.
    double lead();

    // A sample of softmax(z) among what the filters keep. ahead: takes how far its noisy score is ahead of the next.
    int64_t choose(const Filters& filters, Key key, double* ahead = nullptr);

    // What top_k, then top_p, then min_p leave over, most likely first. Empty for a broken row.
    const std::vector<Candidate<T>>& filter(const Filters& filters);

    // The `count` most likely, most likely first.
    const std::vector<Candidate<T>>& leaders(size_t count);

    // The log of the sum of exp of all.
    double log_total();

    bool broken() const { return !(top_ > -limit()) || !(top_ < limit()); }

  private:
    static T limit();
    size_t blocks() const;
    void gather(T least);
    double weight(const Candidate<T>& c) const;
    void keep_largest(size_t count);
    void keep_nucleus(double top_p);
    void keep_until(double wanted);
    int64_t noisy_argmax(Key key, double* ahead);

    size_t vocab_ = 0;
    T top_ = 0;
    const T* values_ = nullptr;             // z_, or the logits in view
    std::vector<T> z_, bounds_;             // [blocks * 64], z padded with -inf
    std::vector<T> maxima_, bound_maxima_;  // [blocks], the first padded to whole blocks with -inf
    std::vector<Candidate<T>> kept_;
};

}  // namespace paceline
