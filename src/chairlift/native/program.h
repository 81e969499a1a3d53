// A recorded forward pass: a flat list of ops over one arena of activations, replayed once a step.
//
// Owns the arena and the order of the ops; the recorder (kernels/native.py) decides what is fused and which buffers are
// shared. What one op wrote the next reads: of all rows before an attention begins, of a thread's own rows elsewhere.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "isa.h"
#include "kv.h"
#include "matmul.h"
#include "pack.h"
#include "pool.h"
#include "step.h"

namespace chairlift {

inline constexpr int kLogitTile = 32;  // logit rows that are multiplied and sampled together

// What the lanes of a buffer are: floats, floats rounded to bf16, or levels with a scale and a sum per 32 lanes.
enum class DType : uint8_t { f32, bf16, int8, int16 };

// From its name ("bf16"); throws std::invalid_argument when there is none of it.
DType dtype_from_name(std::string_view name);

// Lanes [offset, offset + width) of every row of a buffer.
struct Lanes {
    int buffer = -1;
    int offset = 0;
    int width = 0;
};

class Program {
public:
    // Throws std::invalid_argument when the level is not available here or a size is not positive.
    Program(Isa isa, std::shared_ptr<Pool> pool, std::shared_ptr<KVCache> cache, int max_rows, int vocab);

    // Recording. All throw std::invalid_argument on operands that do not fit together.

    // A buffer of `width` lanes a row.
    int add_buffer(int width, DType dtype);
    int add_matrix(std::shared_ptr<const PackedMatrix> matrix);
    int add_vector(std::vector<float> values);
    // Pair i turns by position * frequencies[i].
    int add_rope(std::vector<double> frequencies, bool interleaved);

    void embed(int matrix, Lanes out);
    // Norm of each group of as many lanes as the vector has; out may be x, or rounded (one group only).
    void rms_norm(Lanes x, int vector, float eps, Lanes out);
    // Rounds to what the lanes of `out` are.
    void quantise(Lanes x, Lanes out);
    // out = x @ matrix.T (+ bias) (+ residual); bias -1 and residual.buffer -1 stand for none. out may be residual.
    void matmul(Lanes x, int matrix, int bias, Lanes residual, Lanes out);
    void rope(Lanes x, int rope, Lanes out);
    void write_kv(Lanes keys, Lanes values, int layer);
    void attend(Lanes queries, int layer, Lanes out);
    void swiglu(Lanes gate, Lanes up, Lanes out);
    void add(Lanes a, Lanes b, Lanes out);
    // Norm (vector -1: none), head product of rows rounded to `dtype`, and sampling, for the step's logit rows only. Once,
    // at the end.
    void logits(Lanes x, int vector, float eps, int matrix, DType dtype);
    // Allocates the arena; nothing can be recorded after.
    void finish();

    // Replaying. Throws std::invalid_argument when the step is malformed; one step at a time.
    void run(const Step& step, const StepResult& result);

    int num_ops() const { return static_cast<int>(ops_.size()); }
    size_t weight_bytes() const;
    size_t activation_bytes() const { return arena_ ? arena_->bytes() : 0; }

private:
    enum class Kind { embed, rms_norm, quantise, matmul, rope, write_kv, attend, swiglu, add, logits };

    struct Op {
        Kind kind;
        Lanes a;
        Lanes b;
        Lanes out;
        int matrix = -1;
        int vector = -1;
        int index = -1;  // rope or layer
        float eps = 0.0F;
    };

    // Rows [first, first + count) of the step.
    struct Rows {
        int first;
        int count;
    };

    struct Buffer {
        int width;
        DType dtype;
        int rows;
        size_t offset = 0;  // into the arena

        bool has_levels() const { return dtype == DType::int8 || dtype == DType::int16; }
        int level_bytes() const { return dtype == DType::int8 ? 1 : 2; }
    };

    struct Rope {
        std::vector<double> frequencies;
        bool interleaved;
        std::vector<float> cosines;  // (max_rows, pairs), of the step being run
        std::vector<float> sines;
    };

    // Rows of one sequence and query heads of one KV group that attention takes together; for every KV head alike.
    struct Tile {
        int row;
        int num_rows;
        int first_head;
        int num_heads;
        int table_start = 0;
        int num_splits = 0;
        int64_t work = 0;  // multiply-adds
    };

    // What one thread does at a time: a tile against one KV head, or one split of that.
    struct Unit {
        int tile;
        int kv_head;
        int split = -1;  // -1: all of them
        int cut = -1;    // which of the tiles that were cut into splits
    };

    // A tile and KV head cut into splits, which are joined by whoever computes the last of them.
    struct Cut {
        std::atomic<int> num_left;
        float* parts;
    };

    int new_buffer(int width, DType dtype, int rows);
    const Buffer& check_lanes(Lanes lanes) const;
    void check_f32(Lanes lanes, int width) const;
    void check_out(Lanes out, int width) const;
    void check_vector(int vector) const;
    void check_layer(int layer) const;
    void push(const Op& op);

    // Rows of buffers.
    float* f32(Lanes lanes, int row) const;
    int64_t stride(Lanes lanes) const;
    RoundedLanes levels(const Buffer& buffer, int64_t first) const;
    Activations activations(Lanes lanes, int row) const;
    template <class Fill>
    void fill_row(Lanes out, int row, Fill fill) const;
    void norm_row(const float* x, int width, const Op& op, Lanes out, int row) const;

    // Sharing out.
    template <class Fn>
    void share(int64_t units, int64_t work_per_unit, Fn fn);
    template <class Fn>
    void share_rows(int rows, int64_t work_per_row, Fn fn);

    void prepare(const Step& step);
    void find_tail();
    void gather_tail(const Step& step);
    void run_ops(const Op* begin, const Op* end, int rows, const Step& step);
    void run_rows(const Op* begin, const Op* end, Rows rows, const Step& step);
    static int64_t row_work(const Op& op);
    void run_op(const Op& op, Rows rows, const Step& step);
    void run_matmul(const Op& op, Rows rows, bool shared);
    void run_rope(const Op& op, Rows rows);
    void run_write_kv(const Op& op, Rows rows, const Step& step);
    void reserve_parts();
    void plan_attention(const Step& step, int group);
    void cut_tiles(const Step& step, int group);
    bool cut_splits(const Tile& tile, Unit unit, size_t& num_floats);
    void run_attend(const Op& op, const Step& step);
    AttendTask attend_task(const Op& op, const Step& step, const Unit& unit) const;
    void run_unit(const AttendTask& task, const Unit& unit);
    void run_logits(const Op& op, const Step& step, const StepResult& result);
    void norm_logit_rows(const Op& op, int first, int count);
    void multiply(const MatmulArgs& args, bool shared);
    void reduce(const Step& step, const StepResult& result, int first, int count);

    const Kernels& kernels_;
    std::shared_ptr<Pool> pool_;
    std::shared_ptr<KVCache> cache_;
    int max_rows_;
    int vocab_;
    StepChecker checker_;
    std::vector<Buffer> buffers_;
    std::vector<std::shared_ptr<const PackedMatrix>> matrices_;
    std::vector<std::vector<float>> vectors_;
    std::vector<Rope> ropes_;
    std::vector<Op> ops_;
    // The first op beyond the last attention: from there on only logit rows are needed, and an op looks at one row at a time.
    size_t tail_ = 0;
    std::vector<int> tail_buffers_;  // that these ops read as they find them
    std::unique_ptr<Memory> arena_;
    Lanes head_in_;   // (kLogitTile, width): the gathered rows, as the head takes them
    Lanes head_out_;  // (kLogitTile, vocab)
    Lanes scratch_;   // (threads, 2 * vocab) for sampling
    // How this step's attention is shared out; the same for all layers.
    std::vector<Tile> tiles_;
    std::vector<Unit> units_;
    int planned_group_ = 0;  // query heads a KV head that it is made for; 0: not made yet
    int64_t attend_work_ = 0;
    std::unique_ptr<Cut[]> cuts_;
    int num_cuts_ = 0;
    std::unique_ptr<Memory> parts_;  // what splits leave until they are joined
    std::mutex running_;
};

}  // namespace chairlift
