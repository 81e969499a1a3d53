#include <atomic>
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
