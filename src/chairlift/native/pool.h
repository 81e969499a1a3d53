// A fixed set of threads that share out numbered chunks of one job at a time.
//
// Owns the threads and the hand-out of chunks; knows nothing of what a chunk does. A thread takes the next chunk when it is
// free, so one that lost its core to a neighbour delays only the chunk it holds. Waiting is a brief spin, then a park.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "park.h"

namespace chairlift {

class Pool {
public:
    // `threads` counts the calling thread; 1 starts none. Throws std::invalid_argument below 1 or above 1024.
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls fn(chunk) once for each chunk in [0, num_chunks), on this thread and the pool's, and returns when all are done.
    // The first exception is rethrown here once every chunk has been handed out (chunks not begun by then are skipped).
    // A call from inside a chunk runs on its own thread alone; calls from several threads take turns.
    template <class Fn>
    void run(int num_chunks, Fn&& fn) {
        using Callable = std::remove_reference_t<Fn>;
        run_job(num_chunks, [](void* context, int chunk) { (*static_cast<Callable*>(context))(chunk); },
                const_cast<void*>(static_cast<const void*>(std::addressof(fn))));
    }

private:
    using Call = void (*)(void* context, int chunk);

    void run_job(int num_chunks, Call call, void* context);
    void run_shared(int first_chunk, int num_chunks, Call call, void* context);
    bool take_chunk(std::uint64_t& ticket, int& chunk);
    void work(std::uint64_t ticket);
    void serve();
    void stop_workers();
    void keep_first_error();

    // The job on offer: generation << 32 | number of chunks << 16 | next chunk. One word, so that a thread which looks at an
    // old job can never take a chunk of a new one: its compare-and-swap fails.
    alignas(64) std::atomic<std::uint64_t> ticket_{0};
    std::atomic<Call> call_{nullptr};
    std::atomic<void*> context_{nullptr};
    std::atomic<int> first_chunk_{0};
    alignas(64) Signal unfinished_;  // chunks of the job not finished; the caller waits for 0
    alignas(64) Signal bell_;        // rung once per job, and to stop; parked threads wait on it
    std::atomic<bool> stop_{false};
    std::atomic<bool> failed_{false};
    std::exception_ptr error_;  // written by the thread that set failed_, read by the caller after unfinished_ fell to 0
    std::mutex turn_;           // one job at a time
    std::vector<std::thread> workers_;
};

}  // namespace chairlift
