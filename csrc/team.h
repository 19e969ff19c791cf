// A team of threads that run one function together, in phases. Work of a phase is claimed tile by tile, so a thread that
// the system takes away delays one tile; who computes a tile never changes its bits.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

class Team {
  public:
    explicit Team(size_t num_threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    size_t size() const { return workers_.size() + 1; }

    // Run `work(thread)` on every thread and wait for all; the caller is thread 0. One call at a time.
    void run(const std::function<void(size_t)>& work);

    // Inside `run`, on every thread alike: call `tile(index)` once for each index below `count`, on whichever thread
    // comes first, and go on when all are done.
    template <class Tile>
    void each(size_t count, const Tile& tile) {
        if (count == 0) return;
        if (size() == 1) {
            for (size_t i = 0; i < count; ++i) tile(i);
            return;
        }
        for (size_t i = next_.fetch_add(1, std::memory_order_relaxed); i < count;
             i = next_.fetch_add(1, std::memory_order_relaxed))
            tile(i);
        barrier();
    }

  private:
    void barrier();
    void serve(size_t thread);

    std::vector<std::thread> workers_;
    std::mutex one_at_a_time_;
    const std::function<void(size_t)>* work_ = nullptr;
    bool stopping_ = false;
    alignas(64) std::atomic<size_t> next_{0};
    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};   // barriers passed
    alignas(64) std::atomic<uint32_t> launch_{0};  // runs begun
};

}  // namespace paceline
