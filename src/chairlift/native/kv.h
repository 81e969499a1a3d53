// The KV cache of all layers: one allocation, touched at start, that never grows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "pool.h"

namespace chairlift {

// Zeroed pages, mapped and touched by the pool's threads, so that no step meets a page fault later.
// Throws std::runtime_error that names the size when the system refuses.
class Memory {
public:
    Memory(size_t bytes, Pool& pool);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }

private:
    size_t bytes_;
    uint8_t* data_;
};

// Throws std::invalid_argument unless head_dim is a multiple of 8 in [8, kMaxHeadDim] and num_kv_heads is positive.
KVShape kv_shape(KVType type, int num_kv_heads, int head_dim);

class KVCache {
public:
    // One shape a layer. Throws std::invalid_argument without layers or blocks, or for more slots than 31 bits can number.
    KVCache(std::vector<KVShape> layers, int num_blocks, Pool& pool);

    bool has_layer(int index) const { return index >= 0 && index < static_cast<int>(layers_.size()); }
    const KVShape& shape(int layer) const { return layers_[static_cast<size_t>(layer)]; }
    int num_blocks() const { return num_blocks_; }
    // Bytes of all records: what the Plan counts.
    size_t bytes() const { return starts_.back(); }
    uint8_t* layer(int index) const { return memory_.data() + starts_[static_cast<size_t>(index)]; }

private:
    std::vector<KVShape> layers_;
    int num_blocks_;
    std::vector<size_t> starts_;  // of each layer in the memory, and the end of the last
    Memory memory_;
};

}  // namespace chairlift
