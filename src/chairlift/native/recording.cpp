#include "recording.h"

#include <utility>

namespace chairlift {
namespace {

StepLimits limits_of(const KVCache* cache, int max_rows, int vocab) {
    need(cache != nullptr, "no KV cache");
    need(max_rows > 0 && vocab > 0, "max_rows and vocab must be positive");
    return {max_rows, cache->num_blocks(), vocab};
}

template <class T>
const T& at(const std::vector<T>& values, int index, const char* what) {
    need(index >= 0 && index < static_cast<int>(values.size()), what);
    return values[static_cast<size_t>(index)];
}

}  // namespace

Recording::Recording(Isa isa, std::shared_ptr<Pool> pool, std::shared_ptr<KVCache> cache, int max_rows, int vocab)
    : kernels_(chairlift::kernels(isa)),
      pool_(std::move(pool)),
      cache_(std::move(cache)),
      max_rows_(max_rows),
      vocab_(vocab),
      arena_(std::make_unique<Arena>()) {
    need(pool_ != nullptr, "no pool");
    limits_of(cache_.get(), max_rows, vocab);
}

int Recording::add_buffer(int width, DType dtype) {
    need(arena_ != nullptr, "the recording is finished");
    return arena_->add_buffer(width, dtype, max_rows_);
}

int Recording::add_matrix(std::shared_ptr<const PackedMatrix> matrix) {
    need(matrix != nullptr, "no matrix");
    matrices_.push_back(std::move(matrix));
    return static_cast<int>(matrices_.size()) - 1;
}

int Recording::add_vector(std::vector<float> values) {
    need(!values.empty(), "an empty vector");
    vectors_.push_back(std::make_shared<const std::vector<float>>(std::move(values)));
    return static_cast<int>(vectors_.size()) - 1;
}

std::shared_ptr<const PackedMatrix> Recording::matrix(int index) const {
    return at(matrices_, index, "there is no such matrix");
}

std::shared_ptr<const std::vector<float>> Recording::vector(int index) const {
    return at(vectors_, index, "there is no such vector");
}

void Recording::record(std::string_view op, std::map<std::string, Operands::Value> values) {
    need(arena_ != nullptr, "the recording is finished");
    need(ops_.empty() || !ops_.back()->ends_step(), "the logits are the last op");
    const MakeOp make = op_by_name(op);
    Operands operands(op, std::move(values));
    std::unique_ptr<Op> made = make(operands, *this);
    operands.check_all_taken();
    made->check(*this);
    ops_.push_back(std::move(made));
}

std::unique_ptr<Program> Recording::finish() {
    need(arena_ != nullptr, "the recording is finished");
    need(!ops_.empty() && ops_.back()->ends_step(), "a program ends with its logits");
    arena_->allocate(*pool_);
    for (const std::shared_ptr<StepState>& state : states_) state->allocate(*pool_);
    size_t weight_bytes = 0;
    for (const auto& matrix : matrices_) weight_bytes += matrix->bytes();
    for (const auto& vector : vectors_) weight_bytes += vector->size() * sizeof(float);
    return std::make_unique<Program>(Program::Parts{
        .kernels = kernels_,
        .pool = pool_,
        .limits = limits_of(cache_.get(), max_rows_, vocab_),
        .arena = std::move(arena_),
        .ops = std::move(ops_),
        .states = std::move(states_),
        .weight_bytes = weight_bytes,
    });
}

bool takes(const PackedMatrix& weights, DType dtype) {
    if (takes_levels(weights.layout())) return dtype == DType::int8 || dtype == DType::int16;
    return dtype == (weights.layout() == Layout::bf16 ? DType::bf16 : DType::f32);
}

}  // namespace chairlift
