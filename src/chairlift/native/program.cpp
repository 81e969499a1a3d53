// Recording; replay.cpp runs what is recorded here.
#include "program.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

namespace chairlift {
namespace {

constexpr size_t kAlign = 64;
constexpr int kAlignLanes = kAlign / sizeof(float);

int pad_lanes(int width) { return (width + kAlignLanes - 1) / kAlignLanes * kAlignLanes; }

size_t pad_bytes(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

void need(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(std::string("cannot record: ") + what);
}

// What the rows of a product must be.
bool takes(const PackedMatrix& weights, DType dtype) {
    if (takes_levels(weights.layout())) return dtype == DType::int8 || dtype == DType::int16;
    return dtype == (weights.layout() == Layout::bf16 ? DType::bf16 : DType::f32);
}

StepLimits limits_of(const KVCache* cache, int max_rows, int vocab) {
    need(cache != nullptr, "no KV cache");
    need(max_rows > 0 && vocab > 0, "max_rows and vocab must be positive");
    return {max_rows, cache->num_blocks(), vocab};
}

}  // namespace

DType dtype_from_name(std::string_view name) {
    constexpr std::string_view names[] = {"f32", "bf16", "int8", "int16"};
    const auto* const found = std::find(std::begin(names), std::end(names), name);
    need(found != std::end(names), "lanes are f32, bf16, int8 or int16");
    return static_cast<DType>(found - names);
}

Program::Program(Isa isa, std::shared_ptr<Pool> pool, std::shared_ptr<KVCache> cache, int max_rows, int vocab)
    : kernels_(kernels(isa)),
      pool_(std::move(pool)),
      cache_(std::move(cache)),
      max_rows_(max_rows),
      vocab_(vocab),
      checker_(limits_of(cache_.get(), max_rows, vocab)) {
    need(pool_ != nullptr, "no pool");
}

int Program::add_buffer(int width, DType dtype) { return new_buffer(width, dtype, max_rows_); }

int Program::new_buffer(int width, DType dtype, int rows) {
    need(arena_ == nullptr, "the program is finished");
    need(width > 0 && rows > 0, "a buffer has at least one lane and one row");
    const Buffer buffer{width, dtype, rows};
    need(!buffer.has_levels() || width % kBlock == 0, "a buffer of levels holds whole blocks of 32 lanes");
    buffers_.push_back(buffer);
    return static_cast<int>(buffers_.size()) - 1;
}

int Program::add_matrix(std::shared_ptr<const PackedMatrix> matrix) {
    need(matrix != nullptr, "no matrix");
    matrices_.push_back(std::move(matrix));
    return static_cast<int>(matrices_.size()) - 1;
}

int Program::add_vector(std::vector<float> values) {
    need(!values.empty(), "an empty vector");
    vectors_.push_back(std::move(values));
    return static_cast<int>(vectors_.size()) - 1;
}

int Program::add_rope(std::vector<double> frequencies, bool interleaved) {
    need(!frequencies.empty(), "a rope without pairs");
    need(2 * frequencies.size() <= static_cast<size_t>(cache_->shape().head_dim), "a rope wider than a head");
    const size_t angles = frequencies.size() * static_cast<size_t>(max_rows_);
    ropes_.push_back({std::move(frequencies), interleaved, std::vector<float>(angles), std::vector<float>(angles)});
    return static_cast<int>(ropes_.size()) - 1;
}

const Program::Buffer& Program::check_lanes(Lanes lanes) const {
    need(lanes.buffer >= 0 && lanes.buffer < static_cast<int>(buffers_.size()), "there is no such buffer");
    const Buffer& buffer = buffers_[static_cast<size_t>(lanes.buffer)];
    need(lanes.offset >= 0 && lanes.width > 0 && lanes.width <= buffer.width - lanes.offset, "lanes beyond the buffer");
    need(buffer.dtype == DType::f32 || lanes.width == buffer.width, "a part of a rounded buffer");
    return buffer;
}

void Program::check_f32(Lanes lanes, int width) const {
    need(check_lanes(lanes).dtype == DType::f32, "f32 lanes are needed");
    need(lanes.width == width, "the widths differ");
}

void Program::check_out(Lanes out, int width) const {
    check_lanes(out);
    need(out.width == width, "the widths differ");
}

void Program::check_vector(int vector) const {
    need(vector >= 0 && vector < static_cast<int>(vectors_.size()), "there is no such vector");
}

void Program::check_layer(int layer) const {
    need(layer >= 0 && layer < cache_->num_layers(), "there is no such layer in the KV cache");
}

void Program::push(const Op& op) {
    need(arena_ == nullptr, "the program is finished");
    need(ops_.empty() || ops_.back().kind != Kind::logits, "the logits are the last op");
    ops_.push_back(op);
}

void Program::embed(int matrix, Lanes out) {
    need(matrix >= 0 && matrix < static_cast<int>(matrices_.size()), "there is no such matrix");
    const PackedMatrix& table = *matrices_[static_cast<size_t>(matrix)];
    need(table.rows() >= vocab_, "the embedding has fewer rows than the vocabulary");
    check_f32(out, static_cast<int>(table.cols()));
    push({.kind = Kind::embed, .a = {}, .b = {}, .out = out, .matrix = matrix});
}

void Program::rms_norm(Lanes x, int vector, float eps, Lanes out) {
    check_vector(vector);
    check_f32(x, x.width);
    check_out(out, x.width);
    const int group = static_cast<int>(vectors_[static_cast<size_t>(vector)].size());
    need(x.width % group == 0, "the norm's weight does not divide the row");
    need(x.width == group || check_lanes(out).dtype == DType::f32, "a norm of heads cannot be rounded at once");
    push({.kind = Kind::rms_norm, .a = x, .b = {}, .out = out, .vector = vector, .eps = eps});
}

void Program::quantise(Lanes x, Lanes out) {
    check_f32(x, x.width);
    check_out(out, x.width);
    need(check_lanes(out).dtype != DType::f32, "the output is not rounded");
    push({.kind = Kind::quantise, .a = x, .b = {}, .out = out});
}

void Program::matmul(Lanes x, int matrix, int bias, Lanes residual, Lanes out) {
    need(matrix >= 0 && matrix < static_cast<int>(matrices_.size()), "there is no such matrix");
    const PackedMatrix& weights = *matrices_[static_cast<size_t>(matrix)];
    check_out(x, static_cast<int>(weights.cols()));
    need(takes(weights, check_lanes(x).dtype), "the matrix takes the other kind of activations");
    const int rows = static_cast<int>(weights.rows());
    check_f32(out, rows);
    if (residual.buffer >= 0) check_f32(residual, rows);
    if (bias >= 0) {
        check_vector(bias);
        need(vectors_[static_cast<size_t>(bias)].size() == static_cast<size_t>(rows), "the bias has another length");
    }
    push({.kind = Kind::matmul, .a = x, .b = residual, .out = out, .matrix = matrix, .vector = bias});
}

void Program::rope(Lanes x, int rope, Lanes out) {
    need(rope >= 0 && rope < static_cast<int>(ropes_.size()), "there is no such rope");
    check_f32(x, x.width);
    check_f32(out, x.width);
    need(x.width % cache_->shape().head_dim == 0, "the row is not whole heads");
    push({.kind = Kind::rope, .a = x, .b = {}, .out = out, .index = rope});
}

void Program::write_kv(Lanes keys, Lanes values, int layer) {
    const int width = cache_->shape().num_kv_heads * cache_->shape().head_dim;
    check_f32(keys, width);
    check_f32(values, width);
    check_layer(layer);
    push({.kind = Kind::write_kv, .a = keys, .b = values, .out = {}, .index = layer});
}

void Program::attend(Lanes queries, int layer, Lanes out) {
    const int group_width = cache_->shape().num_kv_heads * cache_->shape().head_dim;
    check_f32(queries, queries.width);
    check_f32(out, queries.width);
    need(queries.width % group_width == 0, "query heads do not divide among the KV heads");
    check_layer(layer);
    push({.kind = Kind::attend, .a = queries, .b = {}, .out = out, .index = layer});
}

void Program::swiglu(Lanes gate, Lanes up, Lanes out) {
    check_f32(gate, gate.width);
    check_f32(up, gate.width);
    check_out(out, gate.width);
    push({.kind = Kind::swiglu, .a = gate, .b = up, .out = out});
}

void Program::add(Lanes a, Lanes b, Lanes out) {
    check_f32(a, a.width);
    check_f32(b, a.width);
    check_f32(out, a.width);
    push({.kind = Kind::add, .a = a, .b = b, .out = out});
}

void Program::logits(Lanes x, int vector, float eps, int matrix, DType dtype) {
    need(matrix >= 0 && matrix < static_cast<int>(matrices_.size()), "there is no such matrix");
    const PackedMatrix& head = *matrices_[static_cast<size_t>(matrix)];
    check_f32(x, static_cast<int>(head.cols()));
    need(head.rows() == vocab_, "the head's rows are not the vocabulary");
    if (vector >= 0) {
        check_vector(vector);
        need(vectors_[static_cast<size_t>(vector)].size() == static_cast<size_t>(x.width), "the norm has another width");
    }
    const int rows = std::min(kLogitTile, max_rows_);
    need(takes(head, dtype), "the head takes the other kind of activations");
    head_in_ = {new_buffer(x.width, dtype, rows), 0, x.width};
    head_out_ = {new_buffer(vocab_, DType::f32, rows), 0, vocab_};
    scratch_ = {new_buffer(2 * vocab_, DType::f32, pool_->threads()), 0, 2 * vocab_};
    push({.kind = Kind::logits, .a = x, .b = {}, .out = {}, .matrix = matrix, .vector = vector, .eps = eps});
}

void Program::finish() {
    need(!ops_.empty() && ops_.back().kind == Kind::logits, "a program ends with its logits");
    need(arena_ == nullptr, "the program is finished");
    size_t bytes = 0;
    for (Buffer& buffer : buffers_) {
        buffer.offset = bytes;
        const size_t rows = static_cast<size_t>(buffer.rows);
        const size_t blocks = static_cast<size_t>(buffer.width / kBlock);
        // Scales, offsets, sums, half sums.
        const size_t planes = 3 * pad_bytes(rows * blocks * 4) + pad_bytes(rows * blocks * 8);
        bytes += buffer.has_levels() ? pad_bytes(rows * static_cast<size_t>(buffer.level_bytes() * buffer.width)) + planes
                                     : rows * static_cast<size_t>(pad_lanes(buffer.width)) * sizeof(float);
    }
    arena_ = std::make_unique<Memory>(bytes, *pool_);
    reserve_parts();
    find_tail();
}

void Program::find_tail() {
    const auto needs_its_row = [](const Op& op) {
        return op.kind == Kind::embed || op.kind == Kind::rope || op.kind == Kind::write_kv || op.kind == Kind::attend;
    };
    tail_ = ops_.size();
    while (tail_ > 0 && !needs_its_row(ops_[tail_ - 1])) --tail_;
    std::set<int> read;
    std::set<int> written;
    for (size_t at = tail_; at < ops_.size(); ++at) {
        for (const int buffer : {ops_[at].a.buffer, ops_[at].b.buffer}) {
            if (buffer < 0 || written.contains(buffer)) continue;
            need(buffers_[static_cast<size_t>(buffer)].dtype == DType::f32, "rounded lanes are read before they are written");
            read.insert(buffer);
        }
        const Lanes out = ops_[at].out;
        if (out.buffer >= 0 && out.width == buffers_[static_cast<size_t>(out.buffer)].width) written.insert(out.buffer);
    }
    tail_buffers_.assign(read.begin(), read.end());
}

size_t Program::weight_bytes() const {
    size_t bytes = 0;
    for (const auto& matrix : matrices_) bytes += matrix->bytes();
    for (const auto& vector : vectors_) bytes += vector.size() * sizeof(float);
    return bytes;
}

float* Program::f32(Lanes lanes, int row) const {
    const Buffer& buffer = buffers_[static_cast<size_t>(lanes.buffer)];
    return reinterpret_cast<float*>(arena_->data() + buffer.offset) + row * stride(lanes) + lanes.offset;
}

int64_t Program::stride(Lanes lanes) const { return pad_lanes(buffers_[static_cast<size_t>(lanes.buffer)].width); }

// The planes of a buffer of levels, from lane `first` of all its rows on; whole blocks.
RoundedLanes Program::levels(const Buffer& buffer, int64_t first) const {
    uint8_t* const q = arena_->data() + buffer.offset;
    const size_t rows = static_cast<size_t>(buffer.rows);
    uint8_t* const scales = q + pad_bytes(rows * static_cast<size_t>(buffer.level_bytes() * buffer.width));
    const size_t plane = pad_bytes(rows * static_cast<size_t>(buffer.width / kBlock) * sizeof(float));
    const int64_t block = first / kBlock;
    return {reinterpret_cast<int8_t*>(q) + buffer.level_bytes() * first, reinterpret_cast<float*>(scales) + block,
            reinterpret_cast<int16_t*>(scales + plane) + 2 * block, reinterpret_cast<int32_t*>(scales + 2 * plane) + block,
            reinterpret_cast<int32_t*>(scales + 3 * plane) + 2 * block};
}

// From a row on.
Activations Program::activations(Lanes lanes, int row) const {
    const Buffer& buffer = buffers_[static_cast<size_t>(lanes.buffer)];
    if (!buffer.has_levels()) return {.values = f32(lanes, row), .stride = stride(lanes)};
    const RoundedLanes rows = levels(buffer, int64_t{row} * buffer.width);
    return {.bytes = buffer.level_bytes(),
            .q = rows.q,
            .scale = rows.scales,
            .offset = rows.offsets,
            .sum = rows.sums,
            .half_sum = rows.half_sums};
}

}  // namespace chairlift
