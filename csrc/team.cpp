#include "team.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {
namespace {

// A phase takes microseconds, so a thread that waits looks again for a while before it lets the system put it to sleep.
constexpr int kSpins = 4000;

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void wait_while(std::atomic<uint32_t>& value, uint32_t old) {
    for (int i = 0; i < kSpins; ++i) {
        if (value.load(std::memory_order_acquire) != old) return;
        pause();
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

}  // namespace

Team::Team(size_t num_threads) {
    for (size_t thread = 1; thread < num_threads; ++thread) workers_.emplace_back([this, thread] { serve(thread); });
}

Team::~Team() {
    stopping_ = true;
    launch_.fetch_add(1, std::memory_order_release);
    launch_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Team::run(const std::function<void(size_t)>& work) {
    const std::lock_guard<std::mutex> alone(one_at_a_time_);
    if (!workers_.empty()) {
        work_ = &work;
        launch_.fetch_add(1, std::memory_order_release);
        launch_.notify_all();
    }
    work(0);
    if (!workers_.empty()) barrier();  // nobody may still read `work`
}

void Team::serve(size_t thread) {
    for (uint32_t seen = 0;;) {
        wait_while(launch_, seen);
        seen = launch_.load(std::memory_order_acquire);
        if (stopping_) return;
        (*work_)(thread);
        barrier();
    }
}

void Team::barrier() {
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size()) {
        next_.store(0, std::memory_order_relaxed);
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        phase_.notify_all();
    } else {
        wait_while(phase_, phase);
    }
}

}  // namespace paceline
