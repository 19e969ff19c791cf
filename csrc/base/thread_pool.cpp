#include "base/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "isa/kernels.h"

namespace paceline {
namespace {

// A waiting thread spins before it sleeps: a phase takes microseconds, the host's work between two runs tenths of a millisecond, and
// waking up takes as long as a small product. Spinning is limited by the clock, as a pause takes 20 ns on one processor and 60 on another.
constexpr std::chrono::milliseconds kSpinning{1};
constexpr int kPausesPerClock = 64;  // pauses between two readings of the clock
using Clock = std::chrono::steady_clock;
constexpr int32_t kClosed = -(1 << 30);

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

template <class T>
void wait_while(const std::atomic<T>& value, T old) {
    const auto changes = [&] {
        for (int i = 0; i < kPausesPerClock; ++i, pause())
            if (value.load(std::memory_order_acquire) != old) return true;
        return false;
    };
    if (changes()) return;
    for (const auto end = Clock::now() + kSpinning; Clock::now() < end;)
        if (changes()) return;
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

}  // namespace

thread_local size_t ThreadPool::self_ = 0;
thread_local uint32_t ThreadPool::next_phase_ = 0;

ThreadPool::ThreadPool(size_t num_threads) : num_threads_(num_threads), ranges_(new Range[num_threads]), inside_(kClosed) {
    try {
        for (size_t thread = 1; thread < num_threads; ++thread) workers_.emplace_back([this, thread] { serve(thread); });
    } catch (...) {  // no thread or memory left: threads that run already must end before their objects go
        stop();
        throw;
    }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
    stopping_ = true;
    launch_.fetch_add(1, std::memory_order_release);
    launch_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(const std::function<void(size_t)>& work) {
    const std::lock_guard<std::mutex> alone(one_at_a_time_);
    launch(work);
    join();
}

void ThreadPool::begin(std::function<void(size_t)> work) {
    const std::lock_guard<std::mutex> alone(one_at_a_time_);
    launch(std::move(work));
}

void ThreadPool::finish() {
    const std::lock_guard<std::mutex> alone(one_at_a_time_);
    if (begun_) join();
}

void ThreadPool::launch(std::function<void(size_t)> work) {
    if (begun_) join();
    work_ = std::move(work);
    begun_ = true;
    first_phase_ = phase_.load(std::memory_order_relaxed);
    inside_.store(0, std::memory_order_release);
    launch_.fetch_add(1, std::memory_order_release);
    launch_.notify_all();
}

void ThreadPool::join() {
    next_phase_ = first_phase_;
    self_ = 0;
    work_(0);
    kernels().gemm.leave();
    for (int32_t left = inside_.fetch_add(kClosed) + kClosed; left != kClosed; left = inside_.load()) wait_while(inside_, left);
    begun_ = false;
}

void ThreadPool::serve(size_t thread) {
    self_ = thread;
    for (uint32_t seen = 0;;) {
        wait_while(launch_, seen);
        seen = launch_.load(std::memory_order_acquire);
        if (stopping_) return;
        if (!enter()) continue;
        next_phase_ = first_phase_;
        work_(thread);
        kernels().gemm.leave();
        leave();
    }
}

bool ThreadPool::enter() {
    int32_t inside = inside_.load(std::memory_order_acquire);
    while (inside >= 0)
        if (inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel)) return true;
    return false;
}

void ThreadPool::leave() {
    inside_.fetch_sub(1, std::memory_order_acq_rel);
    inside_.notify_all();
}

bool ThreadPool::claim(size_t owner, uint32_t phase, size_t length, size_t share, size_t& begin, size_t& end) {
    std::atomic<uint64_t>& ticket = ranges_[owner].ticket;
    uint64_t seen = ticket.load(std::memory_order_acquire);
    for (;;) {
        if (phase_.load(std::memory_order_acquire) != phase) return false;  // finished
        begin = seen >> 32 == phase ? seen & 0xFFFFFFFFu : 0;               // otherwise no thread has claimed a tile of this phase yet
        if (begin >= length) return false;
        end = begin + std::max<size_t>((length - begin) / share, 1);
        if (ticket.compare_exchange_weak(seen, uint64_t{phase} << 32 | end, std::memory_order_acquire)) return true;
    }
}

void ThreadPool::finish(uint32_t phase) {
    done_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    phase_.notify_all();
}

void ThreadPool::wait_for_end(uint32_t phase) { wait_while(phase_, phase); }

}  // namespace paceline
