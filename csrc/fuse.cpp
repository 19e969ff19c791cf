#include "fuse.h"

#include <algorithm>

namespace paceline {
namespace {

constexpr size_t kTokensAtOnce = 128;  // a product of more is no cheaper for each, and the scratch stays in the cache
constexpr size_t kSlice = 64;          // features of one tile of the last phase

// Fills `row` [num_taps * hidden, padded with zeros] with the states of a token.
void gather(const TappedTokens& tokens, size_t index, const Fusing& f, float* row) {
    const size_t width = f.fc->in(), part = f.num_norms ? width / f.num_norms : 0;
    for (size_t tap = 0; tap < tokens.num_taps; ++tap)
        std::copy_n(tokens.states[index * tokens.num_taps + tap], tokens.hidden, row + tap * tokens.hidden);
    for (size_t norm = 0; norm < f.num_norms; ++norm)
        kernels().layer.rms_norm(row + norm * part, f.norms + norm * part, part, f.eps, row + norm * part);
}

}  // namespace

void fuse(Team& team, const Fusing& f, const TappedTokens& tokens, uint16_t* store) {
    const size_t most = std::min(tokens.count(), kTokensAtOnce), padded = round_up(f.fc->in(), kInt8Group);
    const size_t width = f.fc->out(), stride = round_up(width, kPanel), num_slices = (width + kSlice - 1) / kSlice;
    Activations rows;
    rows.reserve(most, padded);
    Lines<float> gathered(most * padded), found(most * stride);
    team.run([&](size_t) {
        for (size_t first = 0; first < tokens.count(); first += kTokensAtOnce) {
            const size_t count = std::min(kTokensAtOnce, tokens.count() - first);
            team.each(count, [&](size_t i) {
                gather(tokens, first + i, f, &gathered[i * padded]);
                rows.set(i, &gathered[i * padded], f.fc->type(), f.fc->in());
            });
            multiply_all(team, {{f.fc, &rows, found.data(), stride, nullptr}}, count);
            team.each(num_slices, [&](size_t slice) {  // all tokens in order, as two may share a slot
                const size_t begin = slice * kSlice, size = std::min(kSlice, width - begin);
                for (size_t i = 0; i < count; ++i)
                    kernels().layer.to_halves(&found[i * stride + begin], size, store + tokens.slots[first + i] * width + begin);
            });
        }
    });
}

}  // namespace paceline
