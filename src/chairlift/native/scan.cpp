// Scans over a row of logits, for sample.cpp.
#include "sample.h"
#include "simd.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

namespace {

// Terms that one f32 partial sum per lane takes before it goes into the f64 total.
constexpr int64_t kChunk = 64 * kLanes;

float scan_max(const float* x, int64_t n, bool* finite) {
    Vec largest = splat(x[0]);
    Vec doubt = zero();  // stays 0 while all is finite: inf - inf and NaN - NaN are NaN
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const Vec value = load(x + i);
        largest = max(value, largest);
        doubt = doubt + (value - value);
    }
    float result = max_lane(largest);
    float rest = sum(doubt);
    for (; i < n; ++i) {
        result = x[i] > result ? x[i] : result;
        rest += x[i] - x[i];
    }
    *finite = rest == 0.0F;
    return result;
}

double scan_exp(const float* x, int64_t n, float largest, float temperature, float* out) {
    const Vec top = splat(largest);
    const Vec divisor = splat(temperature);
    double total = 0.0;
    for (int64_t start = 0; start < n; start += kChunk) {
        const int64_t stop = start + kChunk < n ? start + kChunk : n;
        Vec partial = zero();
        int64_t i = start;
        for (; i + kLanes <= stop; i += kLanes) {
            const Vec term = exp((load(x + i) - top) / divisor);
            if (out != nullptr) store(out + i, term);
            partial = partial + term;
        }
        if (i < stop) {
            const int left = static_cast<int>(stop - i);
            const Vec term = exp((load(x + i, left) - top) / divisor);
            if (out != nullptr) store(out + i, term, left);
            float tail[kLanes] = {};
            store(tail, term, left);
            partial = partial + load(tail);
        }
        total += static_cast<double>(sum(partial));
    }
    return total;
}

int64_t scan_find(const float* x, int64_t begin, int64_t n, float threshold) {
    const Vec limit = splat(threshold);
    int64_t i = begin;
    for (; i + kLanes <= n; i += kLanes) {
        const unsigned found = at_least(load(x + i), limit);
        if (found != 0) return i + __builtin_ctz(found);
    }
    for (; i < n; ++i) {
        if (x[i] >= threshold) return i;
    }
    return n;
}

}  // namespace

extern const SampleKernels sample_kernels{scan_max, scan_exp, scan_find};

}  // namespace chairlift::CHAIRLIFT_ISA_NS
