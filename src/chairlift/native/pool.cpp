#include "pool.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace chairlift {
namespace {

// Long enough to bridge the gap between two ops of a step, short enough to give an idle core back at once.
constexpr auto kSpin = std::chrono::microseconds(40);
constexpr int kPausesPerLook = 32;
constexpr int kMaxChunks = 0xffff;

thread_local bool inside_chunk = false;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spins until done() or the time is up; says whether it was done.
template <class Done>
bool spin_until(Done done) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < kPausesPerLook; ++i) {
            if (done()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    return done();
}

struct InsideChunk {
    InsideChunk() { inside_chunk = true; }
    ~InsideChunk() { inside_chunk = false; }
};

}  // namespace

Pool::Pool(int threads) {
    if (threads < 1 || threads > 1024) throw std::invalid_argument("a pool has 1 to 1024 threads");
    workers_.reserve(static_cast<std::size_t>(threads) - 1);
    try {
        for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { serve(); });
    } catch (...) {
        stop_workers();
        throw;
    }
}

Pool::~Pool() { stop_workers(); }

void Pool::stop_workers() {
    stop_.store(true);
    bell_.value.fetch_add(1);
    bell_.wake();
    for (std::thread& worker : workers_) worker.join();
}

void Pool::run_job(int num_chunks, Call call, void* context) {
    if (num_chunks <= 0) return;
    if (workers_.empty() || num_chunks == 1 || inside_chunk) {
        for (int chunk = 0; chunk < num_chunks; ++chunk) call(context, chunk);
        return;
    }
    const std::lock_guard turn(turn_);
    for (int first = 0; first < num_chunks; first += kMaxChunks) {
        run_shared(first, std::min(kMaxChunks, num_chunks - first), call, context);
    }
}

void Pool::run_shared(int first_chunk, int num_chunks, Call call, void* context) {
    call_.store(call, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    first_chunk_.store(first_chunk, std::memory_order_relaxed);
    failed_.store(false, std::memory_order_relaxed);
    unfinished_.value.store(static_cast<std::uint32_t>(num_chunks), std::memory_order_relaxed);
    const std::uint64_t generation = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    const std::uint64_t ticket = generation << 32 | static_cast<std::uint64_t>(num_chunks) << 16;
    ticket_.store(ticket, std::memory_order_release);
    bell_.value.fetch_add(1);
    bell_.wake();

    work(ticket);
    const auto num_left = [this] { return unfinished_.value.load(std::memory_order_acquire); };
    if (!spin_until([&] { return num_left() == 0; })) {
        for (std::uint32_t left = num_left(); left != 0; left = num_left()) unfinished_.park(left);
    }
    if (failed_.load(std::memory_order_relaxed)) std::rethrow_exception(std::exchange(error_, nullptr));
}

// Takes the next chunk of the job that `ticket` shows; false when none is left. Updates `ticket` to what is on offer.
bool Pool::take_chunk(std::uint64_t& ticket, int& chunk) {
    for (;;) {
        const std::uint64_t next = ticket & 0xffff;
        if (next >= (ticket >> 16 & 0xffff)) return false;
        if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
            chunk = static_cast<int>(next);
            return true;
        }
    }
}

// Works on the job on offer until no chunk is left to take. call_ and context_ are read after a chunk was taken: from then
// until that chunk is finished the job cannot end, so they are this job's.
void Pool::work(std::uint64_t ticket) {
    int chunk = 0;
    while (take_chunk(ticket, chunk)) {
        if (!failed_.load(std::memory_order_relaxed)) {
            const Call call = call_.load(std::memory_order_relaxed);
            void* const context = context_.load(std::memory_order_relaxed);
            const InsideChunk mark;
            try {
                call(context, first_chunk_.load(std::memory_order_relaxed) + chunk);
            } catch (...) {
                keep_first_error();
            }
        }
        if (unfinished_.value.fetch_sub(1) == 1) unfinished_.wake();
        ticket = ticket_.load(std::memory_order_acquire);
    }
}

void Pool::keep_first_error() {
    if (!failed_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
}

void Pool::serve() {
    std::uint32_t heard = 0;
    while (!stop_.load()) {
        work(ticket_.load(std::memory_order_acquire));
        const auto bell = [this] { return bell_.value.load(std::memory_order_acquire); };
        if (!spin_until([&] { return bell() != heard; })) bell_.park(heard);
        heard = bell();
    }
}

}  // namespace chairlift
