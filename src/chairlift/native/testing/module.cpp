// Python's view of single kernels: chairlift._native_testing. For tests and measurements; no part of the production module.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "isa.h"
#include "pack.h"
#include "sample.h"
#include "testing/peak.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chairlift {

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using LevelRows = nb::ndarray<const int16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

// A new numpy array of zeros.
template <class T, class... Shape>
nb::ndarray<nb::numpy, T, nb::ndim<sizeof...(Shape)>> zeros(Shape... extents) {
    const size_t shape[] = {static_cast<size_t>(extents)...};
    size_t size = 1;
    for (const size_t extent : shape) size *= extent;
    auto data = std::make_unique<T[]>(size);
    T* raw = data.release();
    nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return {raw, sizeof...(Shape), shape, owner};
}

auto embed(const PackedMatrix& matrix, int64_t row) {
    require(row >= 0 && row < matrix.rows(), "row out of range");
    auto out = zeros<float>(matrix.cols());
    embed_row(matrix.view(), row, out.data());
    return out;
}

// Levels as the model's own quantiser leaves them: their bytes group by group, high ones first, and the sum of each group.
struct Rounded {
    Rounded(const LevelRows& levels, int bytes)
        : q(static_cast<size_t>(bytes) * levels.size()),
          offsets(levels.size() / kScaleLanes * 2),
          sums(levels.size() / kScaleLanes),
          half_sums(2 * sums.size()) {
        for (size_t group = 0; group < sums.size() && bytes == 1; ++group) {
            const int16_t* const lanes = levels.data() + group * kScaleLanes;
            const auto [least, most] = std::minmax_element(lanes, lanes + kScaleLanes);
            const int middle = (std::min<int>(*least, 0) + std::max<int>(*most, 0)) / 2;
            offsets[2 * group] = offsets[2 * group + 1] = static_cast<int16_t>(middle);
        }
        for (size_t i = 0; i < levels.size(); ++i) {
            const int level = levels.data()[i] - offsets[i / kScaleLanes * 2];
            const int high = bytes == 1 ? 0 : (level + 128) >> 8;
            int8_t* const to = q.data() + i / kScaleLanes * kScaleLanes * static_cast<size_t>(bytes);
            to[i % kScaleLanes] = static_cast<int8_t>(high);
            to[static_cast<size_t>(bytes - 1) * kScaleLanes + i % kScaleLanes] = static_cast<int8_t>(level - 256 * high);
        }
        for (size_t half = 0; half < half_sums.size(); ++half) {
            const int16_t* const lanes = levels.data() + half * kScaleLanes / 2;
            half_sums[half] = std::accumulate(lanes, lanes + kScaleLanes / 2, 0);
        }
        for (size_t group = 0; group < sums.size(); ++group) sums[group] = half_sums[2 * group] + half_sums[2 * group + 1];
    }

    std::vector<int8_t> q;
    std::vector<int16_t> offsets;
    std::vector<int32_t> sums;
    std::vector<int32_t> half_sums;
};

auto multiply(const std::string& isa, const PackedMatrix& matrix, const MatmulArgs& rows, std::optional<Floats> bias,
              std::optional<FloatRows> residual) {
    const int64_t cols = matrix.rows();
    auto out = zeros<float>(rows.num_rows, cols);
    MatmulArgs args = rows;
    args.weights = matrix.view();
    args.out = out.data();
    args.out_stride = args.residual_stride = cols;
    if (bias) {
        require(static_cast<int64_t>(bias->size()) == cols, "bias does not match the matrix");
        args.bias = bias->data();
    }
    if (residual) {
        require(residual->shape(0) == out.shape(0) && residual->shape(1) == out.shape(1), "residual has another shape");
        args.residual = residual->data();
    }
    kernels(isa_from_name(isa)).product(matrix.layout())(args, 0, matrix.num_panels());
    return out;
}

auto matmul_rounded(const std::string& isa, const PackedMatrix& matrix, const std::tuple<LevelRows, FloatRows>& x, int bits,
                    std::optional<Floats> bias, std::optional<FloatRows> residual) {
    const auto& [levels, scale] = x;
    require(bits == 8 || bits == 16, "levels have 8 or 16 bits");
    require(takes_levels(matrix.layout()), "this layout takes float activations");
    require(static_cast<int64_t>(levels.shape(1)) == matrix.cols(), "activations do not match the matrix");
    require(scale.shape(0) == levels.shape(0) && scale.shape(1) * kScaleLanes == levels.shape(1), "scales do not match the activations");
    const Rounded rounded(levels, bits / 8);
    MatmulArgs args{};
    args.num_rows = static_cast<int>(levels.shape(0));
    args.x = {.bytes = bits / 8,
              .q = rounded.q.data(),
              .scale = scale.data(),
              .offset = rounded.offsets.data(),
              .sum = rounded.sums.data(),
              .half_sum = rounded.half_sums.data()};
    return multiply(isa, matrix, args, bias, residual);
}

auto matmul_float(const std::string& isa, const PackedMatrix& matrix, FloatRows x, std::optional<Floats> bias,
                  std::optional<FloatRows> residual) {
    require(!takes_levels(matrix.layout()), "this layout takes rounded activations");
    require(static_cast<int64_t>(x.shape(1)) == matrix.cols(), "activations do not match the matrix");
    MatmulArgs args{};
    args.num_rows = static_cast<int>(x.shape(0));
    args.x = {.values = x.data(), .stride = matrix.cols()};
    const int64_t stride = (matrix.cols() + 15) / 16 * 16;  // round() writes whole 16s
    std::vector<float> rounded;
    if (matrix.layout() == Layout::bf16) {
        rounded.resize(x.shape(0) * static_cast<size_t>(stride));
        args.x = {.values = rounded.data(), .stride = stride};
        const auto round = kernels(isa_from_name(isa)).matmul_float.round;
        for (int row = 0; row < args.num_rows; ++row) {
            round(x.data() + row * matrix.cols(), 0, static_cast<int>(matrix.cols()), rounded.data() + row * stride);
        }
    }
    return multiply(isa, matrix, args, bias, residual);
}

void require_ids(const Ints& ids, size_t count, size_t vocab) {
    require(ids.size() == count, "ids and values differ in number");
    const bool within = std::all_of(ids.data(), ids.data() + ids.size(),
                                    [&](int32_t id) { return id >= 0 && static_cast<size_t>(id) < vocab; });
    require(within, "token id out of range");
}

nb::tuple reduce(const std::string& isa, Floats logits, Bytes record, const std::tuple<Ints, Floats>& bias,
                 const std::tuple<Ints, Ints>& seen) {
    const auto& [bias_ids, bias_values] = bias;
    const auto& [seen_ids, seen_counts] = seen;
    require(logits.size() > 0 && record.size() == sizeof(SampleParams), "expects logits and one sampling record");
    require_ids(bias_ids, bias_values.size(), logits.size());
    require_ids(seen_ids, seen_counts.size(), logits.size());
    SampleParams params;
    std::copy_n(record.data(), sizeof params, reinterpret_cast<uint8_t*>(&params));
    require(params.target < static_cast<int64_t>(logits.size()), "target out of range");
    const Adjustments adjustments{bias_ids.data(), bias_values.data(), static_cast<int32_t>(bias_ids.size()),
                                  seen_ids.data(), seen_counts.data(), static_cast<int32_t>(seen_ids.size())};
    std::vector<float> scratch(2 * logits.size());
    const SampleResult result = reduce_logits(kernels(isa_from_name(isa)).sample, logits.data(),
                                              static_cast<int64_t>(logits.size()), params, adjustments, scratch.data());
    auto top_ids = zeros<int32_t>(kMaxTop);
    auto top_logprobs = zeros<float>(kMaxTop);
    std::copy_n(result.top_ids, kMaxTop, top_ids.data());
    std::copy_n(result.top_logprobs, kMaxTop, top_logprobs.data());
    return nb::make_tuple(result.token, result.logprob, top_ids, top_logprobs, result.finite);
}

int64_t peak(const std::string& isa, const std::string& unit, int64_t rounds) {
    require(unit == "dot" || unit == "fma" || unit == "bf16", "the unit is dot, fma or bf16");
    const PeakKernels& peaks = peak_kernels(isa_from_name(isa));
    const nb::gil_scoped_release no_gil;
    return unit == "dot" ? peaks.dot(rounds) : unit == "fma" ? peaks.fma(rounds) : peaks.bf16(rounds);
}

void bind(nb::module_& module) {
    nb::module_::import_("chairlift._native");  // binds PackedMatrix
    module.doc() = "Kernels one by one, for tests and `chairlift bench kernels`; the server does not load this module.";
    module.def("embed_row", embed, "matrix"_a, "row"_a, "One row of a packed matrix as float32 (cols,).");
    module.def("matmul_rounded", matmul_rounded, "isa"_a, "matrix"_a, "x"_a, "bits"_a, "bias"_a = nb::none(),
                "residual"_a = nb::none(),
                "(rows, cols) levels in int16, within 254 and 254 wide a group (8 bits) or within 127 * 256 (16), and their scales -> (rows, matrix.rows).");
    module.def("matmul_float", matmul_float, "isa"_a, "matrix"_a, "x"_a, "bias"_a = nb::none(),
                "residual"_a = nb::none(), "(rows, cols) float32, rounded to bf16 for a bf16 matrix -> (rows, matrix.rows).");
    module.def("reduce_logits", reduce, "isa"_a, "logits"_a, "record"_a, "bias"_a, "seen"_a,
                "sampling.reduce_logits: (token, logprob, top_ids, top_logprobs, finite).");
    module.def("peak", peak, "isa"_a, "unit"_a, "rounds"_a,
                "Rounds of 8-bit (dot), f32 (fma) or bf16 multiply-adds that wait for nothing; returns their operations.");
    module.def("uniform", uniform, "seed"_a, "choice"_a, "index"_a, "sampling.uniform.");
}

}  // namespace
}  // namespace chairlift

NB_MODULE(_native_testing, module) { chairlift::bind(module); }
