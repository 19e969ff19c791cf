#include "host/measure.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>

#include "isa/kernels.h"

namespace paceline {
namespace {

constexpr size_t kReadTile = size_t{1} << 18;  // bytes claimed at a time
constexpr size_t kDotRounds = 200000;

double seconds_of(const auto& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The highest rate of several runs. work(): returns the amount of work that it did.
double best_rate(int repeats, const auto& work) {
    double best = 0.0;
    for (int repeat = 0; repeat < repeats; ++repeat) {
        size_t done = 0;
        const double took = seconds_of([&] { done = work(); });
        best = std::max(best, static_cast<double>(done) / took);
    }
    return best;
}

}  // namespace

double read_bandwidth(ThreadPool& pool, size_t bytes) {
    const size_t tiles = std::max<size_t>(bytes / kReadTile, 1);
    const Buffer memory(tiles * kReadTile);
    std::vector<uint64_t> sums(pool.size());
    return best_rate(7, [&] {
        pool.run([&](size_t thread) {
            uint64_t sum = 0;
            pool.each(tiles, [&](size_t tile) { sum += kernels().limits.read(memory.data() + tile * kReadTile, kReadTile); });
            sums[thread] = sum;
        });
        return tiles * kReadTile;
    });
}

double dot_peak(ThreadPool& pool) {
    return best_rate(5, [&] {
        std::vector<size_t> products(pool.size());
        pool.run([&](size_t thread) { products[thread] = kernels().limits.dot(kDotRounds); });
        return std::accumulate(products.begin(), products.end(), size_t{0});
    });
}

std::vector<double> time_products(ThreadPool& pool, const std::vector<std::shared_ptr<Matrix>>& matrices, size_t num_tokens,
                                  size_t repeats) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    size_t widest = 0, longest = 0;
    for (const auto& m : matrices) widest = std::max(widest, m->in()), longest = std::max(longest, m->out());
    AlignedVector<float> row(round_up(widest, kInt8Group)), out(num_tokens * round_up(longest, kPanel));
    std::vector<Activations> inputs(matrices.size());
    for (size_t i = 0; i < matrices.size(); ++i) {
        inputs[i].reserve(num_tokens, matrices[i]->in());
        for (size_t token = 0; token < num_tokens; ++token) {
            std::fill(row.begin(), row.end(), 0.0f);
            for (size_t k = 0; k < matrices[i]->in(); ++k) row[k] = normal(random);
            inputs[i].set(token, row.data(), matrices[i]->type(), matrices[i]->in());
        }
    }
    std::vector<double> times;
    for (size_t repeat = 0; repeat < repeats; ++repeat) {
        times.push_back(seconds_of([&] {
            pool.run([&](size_t) {
                for (size_t i = 0; i < matrices.size(); ++i) {
                    const size_t stride = round_up(matrices[i]->out(), kPanel);
                    multiply_all(pool, {{matrices[i].get(), &inputs[i], out.data(), stride, nullptr}}, num_tokens);
                }
            });
        }));
    }
    return times;
}

}  // namespace paceline
