// x @ W.T on one thread, or shared out by outputs.
#pragma once

#include <algorithm>

#include "isa.h"
#include "matmul.h"
#include "pool.h"
#include "share.h"

namespace chairlift {

inline int64_t num_panels(const MatrixView& weights) { return (weights.rows + kPanelRows - 1) / kPanelRows; }

inline void multiply(const MatmulArgs& args, const Kernels& kernels) {
    kernels.product(args.weights.layout)(args, 0, num_panels(args.weights));
}

// In pairs of panels: the kernels take two at a time.
inline void multiply_shared(const MatmulArgs& args, const Kernels& kernels, Pool& pool) {
    const int64_t work = int64_t{args.num_rows} * 2 * kPanelRows * args.weights.cols;
    const int64_t panels = num_panels(args.weights);
    const MatmulFn run = kernels.product(args.weights.layout);
    share(pool, (panels + 1) / 2, work,
          [&](int64_t begin, int64_t end) { run(args, 2 * begin, std::min(2 * end, panels)); });
}

}  // namespace chairlift
