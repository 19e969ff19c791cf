#include "model/fuse.h"

#include <algorithm>

namespace paceline {
namespace {

constexpr size_t kTokensAtOnce = 128;  // with more, tokens get no cheaper and the scratch leaves the cache

// Fill a row [fc in, padded with zeros] with the normed states of a token.
void gather(const float* states, const Fusing& f, float* row) {
    const size_t width = f.fc->in(), part = f.num_norms ? width / f.num_norms : 0;
    std::copy_n(states, width, row);
    for (size_t norm = 0; norm < f.num_norms; ++norm)
        kernels().layer.rms_norm(row + norm * part, f.norms + norm * part, part, f.eps, row + norm * part);
}

}  // namespace

void fuse(ThreadPool& pool, const Fusing& f, const float* states, size_t total, float* features) {
    const size_t max_rows = std::min(total, kTokensAtOnce), padded = round_up(f.fc->in(), kInt8Group);
    const size_t width = f.fc->out(), stride = round_up(width, kPanel);
    Activations rows;
    rows.reserve(max_rows, padded);
    AlignedVector<float> gathered(max_rows * padded), found(max_rows * stride);
    pool.run([&](size_t) {
        for (size_t first = 0; first < total; first += kTokensAtOnce) {
            const size_t count = std::min(kTokensAtOnce, total - first);
            pool.each(count, [&](size_t i) {
                gather(states + (first + i) * f.fc->in(), f, &gathered[i * padded]);
                rows.set(i, &gathered[i * padded], f.fc->type(), f.fc->in());
            });
            multiply_all(pool, {{f.fc, &rows, found.data(), stride, nullptr}}, count);
            pool.each(count, [&](size_t i) { std::copy_n(&found[i * stride], width, features + (first + i) * width); });
        }
    });
}

}  // namespace paceline
