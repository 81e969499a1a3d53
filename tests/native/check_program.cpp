#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "check.h"
#include "isa.h"
#include "pack.h"
#include "program.h"
#include "recording.h"

namespace chairlift {

namespace {

constexpr int kHidden = 64;
constexpr int kHeadDim = 16;
constexpr int kVocab = 200;
constexpr int kMaxRows = 200;  // several blocks of rows for each of the threads below
constexpr int kNumBlocks = 72;

std::shared_ptr<PackedMatrix> random_matrix(int64_t rows, int64_t cols, Random& random) {
    std::vector<uint8_t> bytes(static_cast<size_t>(rows * source_row_bytes(SourceType::q4_0, cols)));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.bits());
    for (size_t at = 1; at < bytes.size(); at += 18) bytes[at] = 0x2C;  // scales of about 1/16
    const Source source{SourceType::q4_0, bytes.data(), rows};
    const ParallelFor in_turn = [](int n, const std::function<void(int)>& body) {
        for (int i = 0; i < n; ++i) body(i);
    };
    return std::make_shared<PackedMatrix>(pack({&source, 1}, cols, in_turn, false));
}

// One layer of a Llama: 4 query heads, 2 KV heads, all projections 4-bit.
std::unique_ptr<Program> make_program(Isa isa, int threads) {
    Random random(7);
    auto pool = std::make_shared<Pool>(threads);
    auto cache = std::make_shared<KVCache>(std::vector<KVShape>{kv_shape(KVType::int8, 2, kHeadDim)}, kNumBlocks, *pool);
    Recording recording(isa, pool, cache, kMaxRows, kVocab);
    const auto buffer = [&](int width, DType dtype) { return recording.arena().whole(recording.add_buffer(width, dtype)); };
    const auto matrix = [&](int64_t rows, int64_t cols) {
        return int64_t{recording.add_matrix(random_matrix(rows, cols, random))};
    };
    const auto part = [](Lanes whole, int offset, int width) { return Lanes{whole.buffer, offset, width}; };
    const Lanes x = buffer(kHidden, DType::f32);
    const Lanes rounded = buffer(kHidden, DType::int16);
    const Lanes coarse = buffer(kHidden, DType::int8);
    const Lanes qkv = buffer(128, DType::f32);
    const Lanes queries = part(qkv, 0, 64);
    const Lanes keys = part(qkv, 64, 32);
    const int64_t head = matrix(kVocab, kHidden);
    const int64_t norm = recording.add_vector(random.reals(kHidden));
    const std::vector<double> frequencies{1.0, 0.5, 0.25, 0.125, 0.06, 0.03, 0.01, 0.005};
    const auto rope = [&](Lanes lanes) {
        recording.record("rope", {{"x", lanes}, {"frequencies", frequencies}, {"style", std::string("halves")},
                                  {"head_dim", int64_t{kHeadDim}}, {"out", lanes}});
    };
    const auto rms_norm = [&](Lanes out) {
        recording.record("rms_norm", {{"x", x}, {"weight", norm}, {"eps", 1e-5}, {"out", out}});
    };
    recording.record("embed", {{"table", head}, {"out", x}});
    rms_norm(rounded);
    recording.record("linear", {{"x", rounded}, {"matrix", matrix(128, kHidden)}, {"out", qkv}});
    rope(queries);
    rope(keys);
    recording.record("write_kv", {{"keys", keys}, {"values", part(qkv, 96, 32)}, {"layer", int64_t{0}}});
    recording.record("attend", {{"queries", queries}, {"layer", int64_t{0}}, {"scale", 0.25}, {"out", queries}});
    recording.record("quantise", {{"x", queries}, {"out", coarse}});
    recording.record("linear", {{"x", coarse}, {"matrix", matrix(kHidden, 64)}, {"residual", x}, {"out", x}});
    rms_norm(coarse);
    const Lanes wide = buffer(192, DType::f32);
    const Lanes product = buffer(96, DType::int8);
    recording.record("linear", {{"x", coarse}, {"matrix", matrix(192, kHidden)}, {"out", wide}});
    recording.record("gated", {{"gate", part(wide, 0, 96)}, {"up", part(wide, 96, 96)},
                               {"activation", std::string("silu")}, {"out", product}});
    recording.record("linear", {{"x", product}, {"matrix", matrix(kHidden, 96)}, {"residual", x}, {"out", x}});
    recording.record("logits", {{"x", x}, {"norm", norm}, {"eps", 1e-5}, {"matrix", head}, {"input", std::string("int16")}});
    return recording.finish();
}

// Rows [begin, end) of one sequence in blocks 0, 1, ..., all of them with logits.
std::vector<float> run_rows(Program& program, int begin, int end) {
    const auto rows = static_cast<size_t>(end - begin);
    std::vector<int32_t> positions(rows);
    std::iota(positions.begin(), positions.end(), begin);
    std::vector<int32_t> tokens(rows);
    for (size_t i = 0; i < rows; ++i) tokens[i] = positions[i] * 37 % kVocab;
    std::vector<int32_t> index(rows);
    std::iota(index.begin(), index.end(), 0);
    std::vector<int32_t> blocks(static_cast<size_t>((end + kBlockTokens - 1) / kBlockTokens));
    std::iota(blocks.begin(), blocks.end(), 0);
    const std::vector<int32_t> seq_starts{0, end - begin};
    const std::vector<int32_t> table_starts{0, static_cast<int32_t>(blocks.size())};
    const std::vector<int32_t> no_entries(rows + 1);
    SampleParams params{};
    params.temperature = params.top_p = params.repetition_penalty = 1.0F;
    params.target = -1;
    params.num_top = 5;
    const std::vector<SampleParams> sample(rows, params);
    std::vector<int32_t> sampled(rows);
    std::vector<float> logprobs(rows);
    std::vector<int32_t> top_ids(rows * kMaxTop);
    std::vector<float> top_logprobs(rows * kMaxTop);
    const auto finite = std::make_unique<bool[]>(rows);
    std::vector<float> logits(rows * kVocab);
    // Slots equal positions, as the blocks are 0, 1, ...
    const Step step{tokens, positions,  positions, seq_starts, table_starts, blocks, index,
                    sample, no_entries, {},        {},         no_entries,   {},     {}};
    program.run(step, {sampled, logprobs, top_ids, top_logprobs, {finite.get(), rows}, logits});
    CHECK(std::all_of(finite.get(), finite.get() + rows, [](bool ok) { return ok; }));
    return logits;
}

// The first `rows` positions in chunks of `chunk`.
std::vector<float> run_chunks(Program& program, int rows, int chunk) {
    std::vector<float> all;
    for (int begin = 0; begin < rows; begin += chunk) {
        const std::vector<float> part = run_rows(program, begin, std::min(rows, begin + chunk));
        all.insert(all.end(), part.begin(), part.end());
    }
    return all;
}

// A few rows alone beyond two splits of attention, so that threads share one context.
std::vector<float> run_late(Program& program) {
    constexpr int kLate = 2 * kSplitPositions + 5;
    run_chunks(program, kLate, kMaxRows);
    std::vector<float> all;
    for (int row = kLate; row < kLate + 4; ++row) {
        const std::vector<float> one = run_rows(program, row, row + 1);
        all.insert(all.end(), one.begin(), one.end());
    }
    return all;
}

}  // namespace

void check_program() {
    for (const Isa isa : available_isas()) {
        const std::unique_ptr<Program> single = make_program(isa, 1);
        const std::vector<float> whole = run_rows(*single, 0, kMaxRows);
        const std::vector<float> late = run_late(*single);
        for (const int threads : {1, 2, 4}) {
            const std::unique_ptr<Program> program = make_program(isa, threads);
            for (const int chunk : {1, 5, 16, kMaxRows}) CHECK(run_chunks(*program, kMaxRows, chunk) == whole);
            CHECK(run_late(*program) == late);
        }
    }
}

}  // namespace chairlift
