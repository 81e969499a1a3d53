#include "step.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "attention.h"

namespace chairlift {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("malformed step: " + what); }

void check_size(const char* name, size_t size, size_t expected) {
    if (size == expected) return;
    refuse(std::string(name) + " has " + std::to_string(size) + " entries, not " + std::to_string(expected));
}

// From 0 to num_values, every entry at least `least` values long.
void check_starts(const char* name, Ints starts, size_t num_values, int least) {
    for (size_t i = 1; i < starts.size(); ++i) {
        if (int64_t{starts[i]} - starts[i - 1] >= least) continue;
        refuse(std::string(name) + " has an entry of fewer than " + std::to_string(least) + " values");
    }
    if (starts.front() != 0 || static_cast<size_t>(starts.back()) != num_values) {
        refuse(std::string(name) + " does not run from 0 to " + std::to_string(num_values));
    }
}

void check_range(const char* name, Ints values, int64_t low, int64_t high) {
    for (size_t i = 0; i < values.size(); ++i) {
        if (values[i] >= low && values[i] < high) continue;
        refuse(std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(values[i]) + ", not in [" +
               std::to_string(low) + ", " + std::to_string(high) + ")");
    }
}

}  // namespace

StepChecker::StepChecker(const StepLimits& limits)
    : limits_(limits), written_in_(static_cast<size_t>(limits.num_blocks) * kBlockTokens, 0) {}

void StepChecker::check(const Step& step, const StepResult& result) {
    check_rows(step);
    ++step_number_;
    if (step_number_ == 0) {
        std::fill(written_in_.begin(), written_in_.end(), 0U);
        step_number_ = 1;
    }
    for (int sequence = 0; sequence < step.num_sequences(); ++sequence) check_sequence(step, sequence);
    check_logit_rows(step);
    check_result(step, result);
}

void StepChecker::check_rows(const Step& step) {
    const size_t rows = step.tokens.size();
    if (rows == 0) refuse("it has no rows");
    if (rows > static_cast<size_t>(limits_.max_rows)) {
        refuse(std::to_string(rows) + " rows; the program was made for " + std::to_string(limits_.max_rows));
    }
    check_size("positions", step.positions.size(), rows);
    check_size("slots", step.slots.size(), rows);
    if (step.seq_starts.size() < 2) refuse("it has no sequences");
    check_size("table_starts", step.table_starts.size(), step.seq_starts.size());
    check_starts("seq_starts", step.seq_starts, rows, 1);
    check_starts("table_starts", step.table_starts, step.block_tables.size(), 1);
    check_range("tokens", step.tokens, 0, limits_.vocab);
    check_range("slots", step.slots, 0, int64_t{limits_.num_blocks} * kBlockTokens);
    check_range("block_tables", step.block_tables, 0, limits_.num_blocks);
}

// Rows of a sequence are consecutive positions, and each row's slot is where its block table says.
void StepChecker::check_sequence(const Step& step, int sequence) {
    const Ints table = step.block_tables.subspan(
        static_cast<size_t>(step.table_starts[sequence]),
        static_cast<size_t>(step.table_starts[sequence + 1] - step.table_starts[sequence]));
    const int begin = step.seq_starts[sequence];
    for (int row = begin; row < step.seq_starts[sequence + 1]; ++row) {
        const int32_t position = step.positions[row];
        const auto wrong = [&](const char* what) {
            refuse("row " + std::to_string(row) + " of sequence " + std::to_string(sequence) + what);
        };
        if (position < 0) wrong(" stands at a negative position");
        if (row > begin && position != step.positions[row - 1] + 1) wrong(" does not follow the row before it");
        const size_t block = static_cast<size_t>(position / kBlockTokens);
        if (block >= table.size()) wrong(" stands beyond its block table");
        const int32_t slot = table[block] * kBlockTokens + position % kBlockTokens;
        if (step.slots[row] != slot) wrong(" does not write where its block table says");
        uint32_t& mark = written_in_[static_cast<size_t>(slot)];
        if (mark == step_number_) wrong(" writes a slot that another row writes");
        mark = step_number_;
    }
}

void StepChecker::check_logit_rows(const Step& step) const {
    const size_t rows = step.logit_rows.size();
    check_range("logit_rows", step.logit_rows, 0, step.num_rows());
    for (size_t i = 1; i < rows; ++i) {
        if (step.logit_rows[i] <= step.logit_rows[i - 1]) refuse("logit_rows is not ascending");
    }
    check_size("sample", step.sample.size(), rows);
    check_size("bias_starts", step.bias_starts.size(), rows + 1);
    check_starts("bias_starts", step.bias_starts, step.bias_ids.size(), 0);
    check_size("bias_values", step.bias_values.size(), step.bias_ids.size());
    check_range("bias_ids", step.bias_ids, 0, limits_.vocab);
    check_size("seen_starts", step.seen_starts.size(), rows + 1);
    check_starts("seen_starts", step.seen_starts, step.seen_ids.size(), 0);
    check_size("seen_counts", step.seen_counts.size(), step.seen_ids.size());
    check_range("seen_ids", step.seen_ids, 0, limits_.vocab);
    for (const SampleParams& params : step.sample) {
        if (params.num_top < -1 || params.num_top > kMaxTop) refuse("num_top is out of range");
        if (params.target < -1 || params.target >= limits_.vocab) refuse("target is out of range");
        const bool usable = params.temperature >= 0.0F && std::isfinite(params.temperature);
        if (!usable) refuse("a temperature is not a number >= 0");
    }
}

void StepChecker::check_result(const Step& step, const StepResult& result) const {
    const size_t rows = step.logit_rows.size();
    check_size("result tokens", result.tokens.size(), rows);
    check_size("result logprobs", result.logprobs.size(), rows);
    check_size("result top_ids", result.top_ids.size(), rows * kMaxTop);
    check_size("result top_logprobs", result.top_logprobs.size(), rows * kMaxTop);
    check_size("result finite", result.finite.size(), rows);
    if (!result.logits.empty()) check_size("result logits", result.logits.size(), rows * static_cast<size_t>(limits_.vocab));
}

}  // namespace chairlift
