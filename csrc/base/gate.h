// A gate that threads wait at until another opens it, once.
#pragma once

#include <atomic>

namespace paceline {

class Gate {
  public:
    void open() {
        open_.store(true, std::memory_order_release);
        open_.notify_all();
    }

    void wait() const { open_.wait(false, std::memory_order_acquire); }

  private:
    std::atomic<bool> open_{false};
};

}  // namespace paceline
