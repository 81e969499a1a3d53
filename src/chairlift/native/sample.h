// From one row of logits to a token and its log-probabilities: the compiled twin of kernels/sampling.py.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace chairlift {

static constexpr int kMaxTop = 20;

// One record per logit row: ops.SAMPLE_DTYPE byte for byte.
struct SampleParams {
    float temperature;
    float top_p;
    float min_p;
    float repetition_penalty;
    float presence_penalty;
    float frequency_penalty;
    int32_t top_k;
    int32_t num_top;  // alternatives wanted: -1 none and no logprob, 0 the chosen only, up to kMaxTop
    int32_t target;   // -1: sample; else report this token's logprob and sample nothing
    uint32_t choice;
    uint32_t index;
    uint32_t reserved;
    uint64_t seed;
};
static_assert(sizeof(SampleParams) == 56 && offsetof(SampleParams, seed) == 48);

// Tokens whose logits change before sampling. Ids lie in [0, vocab); those of `seen` are distinct.
struct Adjustments {
    const int32_t* bias_ids;
    const float* bias_values;
    int32_t num_bias;
    const int32_t* seen_ids;
    const int32_t* seen_counts;  // times in the output; 0: in the prompt only
    int32_t num_seen;
};

struct SampleResult {
    int32_t token;
    float logprob;
    int32_t top_ids[kMaxTop];  // most likely first, ties by lower id; -1 beyond num_top
    float top_logprobs[kMaxTop];
    bool finite;  // false: a raw logit was NaN or infinite, or none can be chosen; nothing else is meaningful
};

// Scans over n values that are worth vector code.
struct SampleKernels {
    // The largest value; *finite tells whether all are.
    float (*max)(const float* x, int64_t n, bool* finite);
    // Sum of exp((x[i] - max) / temperature); writes the terms to `out` unless null.
    double (*sum_exp)(const float* x, int64_t n, float max, float temperature, float* out);
    // The first i >= begin with x[i] >= threshold, or n.
    int64_t (*find)(const float* x, int64_t begin, int64_t n, float threshold);
};

#ifdef CHAIRLIFT_ISA_NS
namespace CHAIRLIFT_ISA_NS {
extern const SampleKernels sample_kernels;
}
#endif

// `scratch`: 2 * vocab floats that this call overwrites.
SampleResult reduce_logits(const SampleKernels& kernels, const float* logits, int64_t vocab, const SampleParams& params,
                                                      const Adjustments& adjustments, float* scratch);

// The random number of one output, in [0, 1): Philox4x32-10 (Salmon et al. 2011), key = seed, counter = (index, choice, 0, 0).
float uniform(uint64_t seed, uint32_t choice, uint32_t index);

}  // namespace chairlift
