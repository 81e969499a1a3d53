#include "kv.h"

#include <sys/mman.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace chairlift {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kTouchBytes = size_t{4} << 20;  // one chunk of touching: two huge pages

size_t align_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

std::vector<size_t> layer_starts(const std::vector<KVShape>& layers, int num_blocks) {
    if (layers.empty() || num_blocks < 1) throw std::invalid_argument("a KV cache has at least one layer and one block");
    if (num_blocks > std::numeric_limits<int32_t>::max() / kBlockTokens) {
        throw std::invalid_argument("the KV cache has more slots than 31 bits can number");
    }
    std::vector<size_t> starts{0};
    for (const KVShape& shape : layers) starts.push_back(starts.back() + shape.block_bytes * static_cast<size_t>(num_blocks));
    return starts;
}

}  // namespace

Memory::Memory(size_t bytes, Pool& pool) : bytes_(align_up(std::max<size_t>(bytes, 1), kPageBytes)), data_(nullptr) {
    void* const pages = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) {
        throw std::runtime_error("the system refuses to map " + std::to_string(bytes_) + " bytes of memory");
    }
    data_ = static_cast<uint8_t*>(pages);
#ifdef MADV_HUGEPAGE
    madvise(pages, bytes_, MADV_HUGEPAGE);  // a wish: a refusal costs speed only
#endif
    const int chunks = static_cast<int>((bytes_ + kTouchBytes - 1) / kTouchBytes);
    pool.run(chunks, [this](int chunk) {
        const size_t begin = static_cast<size_t>(chunk) * kTouchBytes;
        const size_t end = std::min(bytes_, begin + kTouchBytes);
        for (size_t at = begin; at < end; at += kPageBytes) static_cast<volatile uint8_t*>(data_)[at] = 0;
    });
}

Memory::~Memory() { munmap(data_, bytes_); }

KVShape kv_shape(KVType type, int num_kv_heads, int head_dim) {
    if (num_kv_heads < 1) throw std::invalid_argument("a model has at least one KV head");
    if (head_dim < 8 || head_dim > kMaxHeadDim || head_dim % 8 != 0) {
        throw std::invalid_argument("head_dim is " + std::to_string(head_dim) +
                                    "; the attention kernel needs a multiple of 8 up to " + std::to_string(kMaxHeadDim));
    }
    const size_t plane = static_cast<size_t>(head_dim) * kBlockTokens * (type == KVType::bf16 ? 2 : 1);
    const size_t scales = type == KVType::bf16 ? 0 : 2 * kBlockTokens * sizeof(float);
    const size_t record = 2 * plane + scales;
    return {type, num_kv_heads, head_dim, plane, 2 * plane, record, record * static_cast<size_t>(num_kv_heads)};
}

KVCache::KVCache(std::vector<KVShape> layers, int num_blocks, Pool& pool)
    : layers_(std::move(layers)),
      num_blocks_(num_blocks),
      starts_(layer_starts(layers_, num_blocks)),
      memory_(starts_.back() + kCacheSlackBytes, pool) {}

}  // namespace chairlift
