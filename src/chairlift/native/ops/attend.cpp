// write_kv and attend: this step's keys and values into the cache, then attention over each row's own sequence.
#include "attention_schedule.h"
#include "ops/rows.h"
#include "recording.h"

namespace chairlift {
namespace {

class WriteKV final : public Op {
public:
    WriteKV(Operands& operands, Recording& recording)
        : Op({operands.lanes("keys"), operands.lanes("values")}, {}),
          cache_(recording.cache()),
          layer_(operands.integer("layer")) {}

    void check(const Recording& recording) const override {
        need(cache_->has_layer(layer_), "there is no such layer in the KV cache");
        const int width = cache_->shape(layer_).num_kv_heads * cache_->shape(layer_).head_dim;
        recording.arena().check_f32(keys(), width);
        recording.arena().check_f32(values(), width);
    }

    bool reads_step() const override { return true; }
    int64_t row_work() const override { return 64 * keys().width; }

    void run(Rows rows, const RunContext& at) const override {
        each_row(rows, [&](int row) {
            at.kernels.attention.write({&cache_->shape(layer_), cache_->layer(layer_), at.arena.f32(keys(), row),
                                        at.arena.f32(values(), row), at.step.slots[static_cast<size_t>(row)]});
        });
    }

private:
    Lanes keys() const { return inputs()[0]; }
    Lanes values() const { return inputs()[1]; }

    std::shared_ptr<KVCache> cache_;
    int layer_;
};

class Attend final : public Op {
public:
    Attend(Operands& operands, Recording& recording)
        : Op({operands.lanes("queries")}, operands.lanes("out")),
          cache_(recording.cache()),
          layer_(operands.integer("layer")),
          params_{.scale = operands.real("scale")} {
        if (operands.has("window")) params_.window = operands.integer("window");
        if (operands.has("softcap")) {
            params_.softcap = operands.real("softcap");
            need(params_.softcap > 0.0F, "a softcap is above 0");
        }
        if (operands.has("sinks")) sinks_ = recording.vector(operands.integer("sinks"));
        need(params_.window > 0, "a window holds at least the row's own position");
        need(cache_->has_layer(layer_), "there is no such layer in the KV cache");
        const int group_width = shape().num_kv_heads * shape().head_dim;
        need(queries().width > 0 && queries().width % group_width == 0, "query heads do not divide among the KV heads");
        const AttentionGeometry geometry{shape().num_kv_heads, queries().width / group_width, shape().head_dim, params_};
        schedule_ = recording.share_state<AttentionSchedule>(geometry);
    }

    void check(const Recording& recording) const override {
        recording.arena().check_f32(queries(), queries().width);
        recording.arena().check_f32(out(), queries().width);
        const auto num_heads = static_cast<size_t>(queries().width / shape().head_dim);
        need(sinks_ == nullptr || sinks_->size() == num_heads, "the sinks are not one for each query head");
    }

    Sharing sharing() const override { return Sharing::step; }
    bool reads_step() const override { return true; }
    int64_t row_work() const override { return 16 * queries().width; }

    void run(Rows, const RunContext& at) const override {
        schedule_->run(at.pool, at.kernels.attention,
                       [&](const AttentionTask& task, int kv_head) { return arguments(task, kv_head, at); });
    }

private:
    Lanes queries() const { return inputs()[0]; }
    const KVShape& shape() const { return cache_->shape(layer_); }

    AttendTask arguments(const AttentionTask& task, int kv_head, const RunContext& at) const {
        const int group = queries().width / (shape().num_kv_heads * shape().head_dim);
        const int head = kv_head * group + task.first_head;
        const int lane = head * shape().head_dim;
        return {
            .shape = &shape(),
            .layer = cache_->layer(layer_),
            .blocks = at.step.block_tables.data() + task.table_start,
            .kv_head = kv_head,
            .group_size = task.num_heads,
            .num_rows = task.num_rows,
            .first_position = at.step.positions[static_cast<size_t>(task.row)],
            .queries = at.arena.f32(queries(), task.row) + lane,
            .query_stride = at.arena.stride(queries()),
            .out = at.arena.f32(out(), task.row) + lane,
            .out_stride = at.arena.stride(out()),
            .params = params_,
            .sinks = sinks_ == nullptr ? nullptr : sinks_->data() + head,
        };
    }

    std::shared_ptr<KVCache> cache_;
    int layer_;
    AttendParams params_;
    std::shared_ptr<const std::vector<float>> sinks_;  // null: none
    std::shared_ptr<AttentionSchedule> schedule_;
};

const Registered<WriteKV> write_kv("write_kv");
const Registered<Attend> attend("attend");

}  // namespace
}  // namespace chairlift
