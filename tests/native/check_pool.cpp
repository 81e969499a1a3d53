#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "pool.h"

namespace chairlift {

namespace {

// Every chunk once, none after run() returned; plain writes must be visible to the caller.
void each_chunk_once(Pool& pool, Random& random, int jobs) {
    for (int job = 0; job < jobs; ++job) {
        std::vector<int> hits(static_cast<size_t>(random.below(40)));
        pool.run(static_cast<int>(hits.size()), [&](int chunk) { ++hits[static_cast<size_t>(chunk)]; });
        for (const int hit : hits) CHECK(hit == 1);
    }
}

void keep_busy(std::chrono::microseconds time) {
    const auto end = std::chrono::steady_clock::now() + time;
    while (std::chrono::steady_clock::now() < end) continue;
}

// Every thread must come, also from its sleep: a chunk ends only when each of them has one. With the pauses most threads
// have parked before the bell, and the caller before the last chunk ends; nothing depends on that.
void parked_threads_wake(Pool& pool) {
    const std::thread::id caller = std::this_thread::get_id();
    for (int job = 0; job < 100; ++job) {
        keep_busy(std::chrono::microseconds(job % 2 * 100));
        std::atomic<int> arrived{0};
        pool.run(pool.threads(), [&](int) {
            ++arrived;
            while (arrived < pool.threads()) std::this_thread::yield();
            if (std::this_thread::get_id() != caller) keep_busy(std::chrono::microseconds(job % 3 * 50));
        });
        CHECK(arrived == pool.threads());
    }
}

void errors_reach_the_caller(Pool& pool) {
    for (int job = 0; job < 200; ++job) {
        bool caught = false;
        try {
            pool.run(16, [&](int chunk) {
                if (chunk == job % 16) throw std::runtime_error("chunk");
            });
        } catch (const std::runtime_error&) {
            caught = true;
        }
        CHECK(caught);
    }
}

void nested_calls_run(Pool& pool) {
    std::atomic<int> inner{0};
    pool.run(8, [&](int) { pool.run(5, [&](int) { ++inner; }); });
    CHECK(inner == 40);
}

void callers_take_turns(Pool& pool) {
    std::vector<std::thread> callers;
    for (uint64_t seed = 0; seed < 3; ++seed) {
        callers.emplace_back([&pool, seed] {
            Random random(seed);
            each_chunk_once(pool, random, 300);
        });
    }
    for (std::thread& caller : callers) caller.join();
}

}  // namespace

void check_pool() {
    Random random(1);
    for (const int threads : {1, 2, 4}) {
        Pool pool(threads);
        each_chunk_once(pool, random, 2000);
        parked_threads_wake(pool);
        errors_reach_the_caller(pool);
        nested_calls_run(pool);
        callers_take_turns(pool);
    }
    for (int i = 0; i < 50; ++i) {  // stopping while workers spin, park or have not begun
        Pool pool(3);
        if (i % 2 == 0) each_chunk_once(pool, random, i % 5);
    }
}

}  // namespace chairlift
