#include "park.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#endif

namespace chairlift {

#if defined(__linux__)

static_assert(sizeof(std::atomic<std::uint32_t>) == 4, "a futex is a plain word");

void Signal::park(std::uint32_t seen) {
    num_parked_.fetch_add(1);
    syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    num_parked_.fetch_sub(1);
}

void Signal::wake() {
    if (num_parked_.load() != 0) syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

#else

void Signal::park(std::uint32_t seen) { value.wait(seen); }

void Signal::wake() { value.notify_all(); }

#endif

}  // namespace chairlift
