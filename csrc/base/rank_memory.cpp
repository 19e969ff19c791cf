#include "base/rank_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#endif

namespace paceline {
namespace {

constexpr std::chrono::microseconds kSpinning{200};  // spinning before a rank sleeps: others come microseconds later, if they have their cores
using Clock = std::chrono::steady_clock;

#if defined(__linux__)
// `std::atomic::wait` works within one process only, so this calls the system itself.
void sleep_while(std::atomic<uint32_t>& value, uint32_t old) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAIT, old, nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}
#else
void sleep_while(std::atomic<uint32_t>&, uint32_t) { std::this_thread::sleep_for(std::chrono::microseconds(50)); }
void wake_all(std::atomic<uint32_t>&) {}
#endif

}  // namespace

RankMemory::RankMemory(int file, size_t rank, size_t size) : rank_(rank), size_(size) {
    void* const at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "memory of ranks cannot be mapped");
    head_ = static_cast<Head*>(at);
    numbers_ = reinterpret_cast<float*>(static_cast<uint8_t*>(at) + kHead);
}

RankMemory::~RankMemory() { munmap(head_, kBytes); }

void RankMemory::meet() {
    const uint32_t round = head_->rounds.load(std::memory_order_acquire);
    if (head_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
        head_->arrived.store(0, std::memory_order_relaxed);
        head_->rounds.store(round + 1, std::memory_order_release);
        return wake_all(head_->rounds);
    }
    const auto over = [&] { return head_->rounds.load(std::memory_order_acquire) != round; };
    for (const auto end = Clock::now() + kSpinning; !over() && Clock::now() < end;) std::this_thread::yield();
    while (!over()) sleep_while(head_->rounds, round);
}

}  // namespace paceline
