// One step as the core sees it: views of the caller's arrays, checked before anything is computed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sample.h"

namespace chairlift {

using Ints = std::span<const int32_t>;

// The twin of ops.StepArrays, which says what each array means. Ragged arrays are (starts, values).
struct Step {
    Ints tokens;
    Ints positions;
    Ints slots;
    Ints seq_starts;
    Ints table_starts;
    Ints block_tables;
    Ints logit_rows;
    std::span<const SampleParams> sample;
    Ints bias_starts;
    Ints bias_ids;
    std::span<const float> bias_values;
    Ints seen_starts;
    Ints seen_ids;
    Ints seen_counts;

    int num_rows() const { return static_cast<int>(tokens.size()); }
    int num_sequences() const { return static_cast<int>(seq_starts.size()) - 1; }
    int num_logit_rows() const { return static_cast<int>(logit_rows.size()); }
};

// Where the results of the logit rows go: the twin of ops.LogitResult.
struct StepResult {
    std::span<int32_t> tokens;
    std::span<float> logprobs;
    std::span<int32_t> top_ids;       // (L, kMaxTop)
    std::span<float> top_logprobs;    // (L, kMaxTop)
    std::span<bool> finite;
    std::span<float> logits;          // (L, vocab), or empty when not wanted
};

struct StepLimits {
    int max_rows;
    int num_blocks;
    int vocab;
};

// Refuses malformed steps. Keeps a mark per slot, so that two rows never write the same one.
class StepChecker {
public:
    explicit StepChecker(const StepLimits& limits);

    // Throws std::invalid_argument that names the array and the place; then nothing was computed.
    void check(const Step& step, const StepResult& result);

private:
    void check_rows(const Step& step);
    void check_sequence(const Step& step, int sequence);
    void check_logit_rows(const Step& step) const;
    void check_result(const Step& step, const StepResult& result) const;

    StepLimits limits_;
    std::vector<uint32_t> written_in_;  // per slot: the last step that wrote it
    uint32_t step_number_ = 0;
};

}  // namespace chairlift
