// Threads that run one function together, in phases. Threads claim the tiles of a phase, and the phase ends when all its tiles are
// done, by any thread: a thread that the system suspends delays the tile that it holds, not the step. The bits of a tile do not depend on
// the thread that computes it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

class ThreadPool {
  public:
    explicit ThreadPool(size_t num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    size_t size() const { return num_threads_; }

    // Run `work(thread)` on the caller, as thread 0, and on every other thread that arrives in time. Returns when all that arrived
    // have left. Runs do not overlap.
    void run(const std::function<void(size_t)>& work);

    // Start a run on the other threads and return. The next caller, of `finish` or of another run, joins them as thread 0 and stays
    // until the run is over.
    void begin(std::function<void(size_t)> work);
    void finish();

    // One phase; inside `run`, in the same order on every thread. Calls `tile(index)` once for each index below `count`, and returns
    // when all are done. A thread starts with its own range, so that it reads memory in order, and then helps the others. It claims
    // an eighth of the remaining tiles at a time, as a claim waits for earlier writes. A late thread skips finished phases.
    template <class Tile>
    void each(size_t count, const Tile& tile) {
        each_run(count, [&](size_t first, size_t end) { for (; first < end; ++first) tile(first); }, 8);
    }

    // The same with `tiles(first, end)`, for tiles that take equally long: a thread claims one in `share` of the remaining tiles, as
    // every claim costs time.
    template <class Tiles>
    void each_run(size_t count, const Tiles& tiles, size_t share = 2) {
        if (count == 0) return;
        const uint32_t phase = next_phase_++;
        if (phase_.load(std::memory_order_acquire) != phase) return;
        size_t mine = 0;
        for (size_t i = 0; i < num_threads_; ++i) {
            const size_t owner = self_ + i < num_threads_ ? self_ + i : self_ + i - num_threads_;
            const size_t first = count * owner / num_threads_, length = count * (owner + 1) / num_threads_ - first;
            for (size_t begin, end; claim(owner, phase, length, share, begin, end); mine += end - begin)
                tiles(first + begin, first + end);
        }
        if (mine && done_.fetch_add(mine, std::memory_order_acq_rel) + mine == count) return finish(phase);
        wait_for_end(phase);
    }

  private:
    void stop();

    struct alignas(64) Range {
        std::atomic<uint64_t> ticket{0};  // high half: the last phase in which tiles of this range were claimed; low half: their number
    };

    bool claim(size_t owner, uint32_t phase, size_t length, size_t share, size_t& begin, size_t& end);
    void finish(uint32_t phase);
    void wait_for_end(uint32_t phase);
    void launch(std::function<void(size_t)> work);
    void join();
    bool enter();
    void leave();
    void serve(size_t thread);

    static thread_local size_t self_;          // this thread's index in the pool whose `run` it is in
    static thread_local uint32_t next_phase_;  // the next phase of this thread

    const size_t num_threads_;
    std::unique_ptr<Range[]> ranges_;
    std::mutex one_at_a_time_;
    std::function<void(size_t)> work_;
    bool begun_ = false;        // true: a run was begun, and no caller has joined it yet
    uint32_t first_phase_ = 0;  // first phase of this run
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<size_t> done_{0};      // tiles of this phase that are done
    alignas(64) std::atomic<uint32_t> phase_{0};   // finished phases
    alignas(64) std::atomic<uint32_t> launch_{0};  // runs started
    alignas(64) std::atomic<int32_t> inside_;      // other threads in `work`; far below 0: none may enter
    std::vector<std::thread> workers_;
};

}  // namespace paceline
