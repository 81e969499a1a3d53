// Building a program: buffers, weights and ops, each checked as it is recorded.
//
// kernels/emit.py records; it decides what is fused and which buffers are shared.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "arena.h"
#include "isa.h"
#include "kv.h"
#include "op.h"
#include "pack.h"
#include "pool.h"
#include "program.h"

namespace chairlift {

// All members throw std::invalid_argument on what does not fit together, and after finish().
class Recording {
public:
    Recording(Isa isa, std::shared_ptr<Pool> pool, std::shared_ptr<KVCache> cache, int max_rows, int vocab);

    // Each gives the number by which ops name it.
    int add_buffer(int width, DType dtype);
    int add_matrix(std::shared_ptr<const PackedMatrix> matrix);
    int add_vector(std::vector<float> values);
    void record(std::string_view op, std::map<std::string, Operands::Value> operands);
    // Allocates the activations. The recording is spent.
    std::unique_ptr<Program> finish();

    // What ops look up as they are made and checked.
    Arena& arena() { return *arena_; }
    const Arena& arena() const { return *arena_; }
    const std::shared_ptr<KVCache>& cache() const { return cache_; }
    Pool& pool() const { return *pool_; }
    const Kernels& kernels() const { return kernels_; }
    int max_rows() const { return max_rows_; }
    int vocab() const { return vocab_; }
    std::shared_ptr<const PackedMatrix> matrix(int index) const;
    std::shared_ptr<const std::vector<float>> vector(int index) const;

    // The state made for this key, which ops share; made when the first of them asks. State has `is_for(key...)`.
    template <class State, class... Key>
    std::shared_ptr<State> share_state(const Key&... key) {
        for (const std::shared_ptr<StepState>& state : states_) {
            if (auto found = std::dynamic_pointer_cast<State>(state); found && found->is_for(key...)) return found;
        }
        auto made = std::make_shared<State>(*this, key...);
        states_.push_back(made);
        return made;
    }

private:
    const Kernels& kernels_;
    std::shared_ptr<Pool> pool_;
    std::shared_ptr<KVCache> cache_;
    int max_rows_;
    int vocab_;
    std::unique_ptr<Arena> arena_;  // null once finished
    std::vector<std::shared_ptr<const PackedMatrix>> matrices_;
    std::vector<std::shared_ptr<const std::vector<float>>> vectors_;
    std::vector<std::unique_ptr<Op>> ops_;
    std::vector<std::shared_ptr<StepState>> states_;
};

// Whether a product with these weights takes rows of this type.
bool takes(const PackedMatrix& weights, DType dtype);

}  // namespace chairlift
