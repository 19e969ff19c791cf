// A pool of threads that run one function together, in phases. Work of a phase is claimed tile by tile, and a phase is over
// when its tiles are done, whoever did them: a thread that the system takes away delays the tile it holds, not the step.
// Who computes a tile never changes its bits.
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

    // Run `work(thread)` on the caller, as thread 0, and on every other thread that comes in time; return when all that
    // came have left. One call at a time.
    void run(const std::function<void(size_t)>& work);

    // Begin a run on the other threads and return. Who comes next, to `finish` or to run something else, joins them as
    // thread 0 and stays until it is over.
    void begin(std::function<void(size_t)> work);
    void finish();

    // Inside `run`, in the same order on every thread: call `tile(index)` once for each index below `count`, and go on
    // when all are done. A thread begins with a range of its own, so that it reads memory in order, and then helps the
    // others; it claims an eighth of what is left at a time, as a claim waits for what was written before. A late thread
    // finds phases that are over and passes them by.
    template <class Tile>
    void each(size_t count, const Tile& tile) {
        each_run(count, [&](size_t first, size_t end) { for (; first < end; ++first) tile(first); }, 8);
    }

    // The same with `tiles(first, end)`, for tiles that take alike: a thread claims half of what is left of a range, or one
    // in `share`, as every claim costs.
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
    struct alignas(64) Range {
        std::atomic<uint64_t> ticket{0};  // the last phase that took tiles of this thread's range, and below it how many
    };

    bool claim(size_t owner, uint32_t phase, size_t length, size_t share, size_t& begin, size_t& end);
    void finish(uint32_t phase);
    void wait_for_end(uint32_t phase);
    void launch(std::function<void(size_t)> work);
    void join();
    bool enter();
    void leave();
    void serve(size_t thread);

    static thread_local size_t self_;          // this thread's number in the pool whose `run` it is in
    static thread_local uint32_t next_phase_;  // the next one it comes to

    const size_t num_threads_;
    std::unique_ptr<Range[]> ranges_;
    std::mutex one_at_a_time_;
    std::function<void(size_t)> work_;
    bool begun_ = false;        // and not joined
    uint32_t first_phase_ = 0;  // of this run
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<size_t> done_{0};      // tiles of this phase
    alignas(64) std::atomic<uint32_t> phase_{0};   // phases that are over
    alignas(64) std::atomic<uint32_t> launch_{0};  // runs begun
    alignas(64) std::atomic<int32_t> inside_;      // other threads in `work`; far below 0 while none may enter
    std::vector<std::thread> workers_;
};

}  // namespace paceline
