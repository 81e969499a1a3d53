// What ops of single rows have in common.
#pragma once

#include <vector>

#include "op.h"

namespace chairlift {

template <class Fn>
void each_row(Rows rows, Fn fn) {
    for (int row = rows.first; row < rows.first + rows.count; ++row) fn(row);
}

// Norms each group of weight.size() lanes of x into `out`, which may be x, or rounded where the row is one group.
inline void norm_row(const float* x, const std::vector<float>& weight, float eps, Lanes out, int row, const RunContext& at) {
    const ElementwiseKernels& kernel = at.kernels.elementwise;
    const int group = static_cast<int>(weight.size());
    for (int start = 0; start < out.width; start += group) {
        const float factor = kernel.inverse_rms(x + start, group, eps);
        const Lanes part = group == out.width ? out : Lanes{out.buffer, out.offset + start, group};
        at.arena.fill_row(at.kernels, part, row, [&](int lane, int count, float* to) {
            kernel.scale(x + start + lane, weight.data() + lane, factor, count, to);
        });
    }
}

}  // namespace chairlift
