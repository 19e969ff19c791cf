// Memory in which the ranks of a decoder, which are processes of one machine, exchange rows of numbers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace paceline {

class RankMemory {
  public:
    static constexpr size_t kRoom = size_t{1} << 21;  // most numbers of one exchange
    static constexpr size_t kHead = 4096;             // bytes before the numbers
    static constexpr size_t kBytes = kHead + 2 * kRoom * sizeof(float);

    // Map a file of `kBytes`, zeros at first. Throws std::system_error.
    RankMemory(int file, size_t rank, size_t size);
    ~RankMemory();
    RankMemory(const RankMemory&) = delete;
    RankMemory& operator=(const RankMemory&) = delete;

    size_t rank() const { return rank_; }
    size_t size() const { return size_; }

    // Wait until every rank is here. After it all ranks read from `last()` what each wrote to `next()` before it. Two areas take turns:
    // a rank that writes to an area again has met the others since they read it.
    void meet();
    float* next() const { return area(head_->rounds.load(std::memory_order_acquire)); }
    const float* last() const { return area(head_->rounds.load(std::memory_order_acquire) - 1); }

  private:
    struct Head {
        alignas(64) std::atomic<uint32_t> arrived;
        alignas(64) std::atomic<uint32_t> rounds;  // meetings that are over
    };
    static_assert(sizeof(Head) <= kHead && std::atomic<uint32_t>::is_always_lock_free);

    float* area(uint32_t round) const { return numbers_ + round % 2 * kRoom; }

    size_t rank_, size_;
    Head* head_;
    float* numbers_;
};

}  // namespace paceline
