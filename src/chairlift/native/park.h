// How a thread of the pool waits when spinning has not helped.
#pragma once

#include <atomic>
#include <cstdint>

namespace chairlift {

// A number that threads can sleep on until it changes. As std::atomic::wait and notify_all, but without the yields that
// libstdc++ puts before the sleep: Linux makes a thread that yields pay for it with its share of a busy core.
class Signal {
public:
    std::atomic<std::uint32_t> value{0};

    // Sleeps while value == seen; may return early.
    void park(std::uint32_t seen);

    // Wakes all that sleep. To be called after a sequentially consistent change of the value.
    void wake();

private:
    std::atomic<std::uint32_t> num_parked_{0};
};

}  // namespace chairlift
