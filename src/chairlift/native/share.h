// Work of many alike units, cut into chunks for the pool's threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "pool.h"

namespace chairlift {

// Below about this many multiply-adds a chunk costs less than handing it to another thread (a few microseconds).
inline constexpr int64_t kChunkWork = 1 << 16;
// More chunks than threads, so that a thread that lost its core delays little.
inline constexpr int kChunksPerThread = 2;

// Cuts `units` into contiguous ranges and calls fn(begin, end) for each, in parallel when there is enough work.
template <class Fn>
void share(Pool& pool, int64_t units, int64_t work_per_unit, Fn fn) {
    const int64_t most = pool.threads() == 1 ? 1 : int64_t{pool.threads()} * kChunksPerThread;
    const int64_t worth = units * work_per_unit / kChunkWork;
    const int chunks = static_cast<int>(std::clamp<int64_t>(std::min(units, worth), 1, most));
    pool.run(chunks, [&](int chunk) { fn(units * chunk / chunks, units * (chunk + 1) / chunks); });
}

// Calls fn(row) for each of so many rows, in parallel when there is enough work.
template <class Fn>
void share_rows(Pool& pool, int rows, int64_t work_per_row, Fn fn) {
    share(pool, rows, work_per_row, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) fn(static_cast<int>(row));
    });
}

}  // namespace chairlift
