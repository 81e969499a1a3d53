// What all products share: which rows meet which panels, and what becomes of their sums.
#pragma once

#include "matmul.h"
#include "matmul_group.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

static constexpr int kLine = 64;  // bytes that are fetched at once

// So many bytes of activations stay in L2 while the panels stream by.
static constexpr int64_t kRowsBytes = 256 * 1024;

// Adds bias and residual to a vector of one row's outputs, and stores those that exist.
CHAIRLIFT_INLINE void finish(const MatmulArgs& args, int64_t row, int64_t column, Vec value) {
    const int64_t left = args.weights.rows - column;
    if (left <= 0) return;
    const int n = left < kLanes ? static_cast<int>(left) : kLanes;
    if (args.bias != nullptr) value = value + load(args.bias + column, n);
    if (args.residual != nullptr) value = value + load(args.residual + row * args.residual_stride + column, n);
    store(args.out + row * args.out_stride + column, value, n);
}

// Some rows against some panels, in registers from the first input to the last; and what to fetch meanwhile.
struct Pass {
    int64_t panel;
    int64_t row;
    const uint8_t* next;  // the panels after these, or null when another pass fetches them
};

// Asks for `Bytes` bytes at `p`. The hardware follows a stream only while it is read: rows that meet the same panel again
// would find the next one in DRAM.
template <int Bytes>
CHAIRLIFT_INLINE void fetch(const uint8_t* p) {
    for (int i = 0; i < Bytes; i += kLine) __builtin_prefetch(p + i);
}

using PassFn = void (*)(const MatmulArgs& args, const Pass& pass);

static constexpr int kMostPanels = 2;
static constexpr int kMostRows = 8;

// run[p - 1][r - 1] computes r rows of p panels.
struct Passes {
    PassFn run[kMostPanels][kMostRows];
    int panels;  // the most a pass takes
    PassRows rows;
};

CHAIRLIFT_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
CHAIRLIFT_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// How many rows' activations to go through before the next panel.
CHAIRLIFT_INLINE int64_t rows_at_once(int64_t row_bytes, int pass_rows) {
    return most(1, kRowsBytes / (row_bytes * pass_rows)) * pass_rows;
}

// Rows [first, last) against the same panels, in passes as even as they can be: six rows are one pass, seven four and three.
static void run_rows(const Passes& kernels, const MatmulArgs& args, int64_t first, int64_t last, const Pass& at, int64_t panels) {
    const int64_t spare = kernels.rows.most - kernels.rows.usual;
    int64_t passes = most(1, (last - first - spare + kernels.rows.usual - 1) / kernels.rows.usual);
    for (int64_t row = first; passes > 0; --passes) {
        const int64_t rows = (last - row + passes - 1) / passes;
        kernels.run[panels - 1][rows - 1](args, {at.panel, row, passes == 1 ? at.next : nullptr});
        row += rows;
    }
}

// Panels [begin, end) of all rows, each of which has so many bytes of activations.
static void run_passes(const Passes& kernels, const MatmulArgs& args, int64_t row_bytes, int64_t begin, int64_t end) {
    const int64_t step = rows_at_once(row_bytes, kernels.rows.usual);
    // One row waits for memory: panels in one stream. More rows wait for loads of activations: each loaded for all panels.
    const int64_t at_once = args.num_rows == 1 ? 1 : kernels.panels;
    for (int64_t first = 0; first < args.num_rows; first += step) {
        const int64_t last = least(first + step, args.num_rows);
        for (int64_t panel = begin; panel < end; panel += at_once) {
            const int64_t panels = least(end - panel, at_once);
            const bool is_last = panel + panels == end;
            const uint8_t* next = is_last ? nullptr : args.weights.data + (panel + panels) * args.weights.panel_bytes;
            run_rows(kernels, args, first, last, {panel, 0, next}, panels);
        }
    }
}

}  // namespace chairlift::CHAIRLIFT_ISA_NS
