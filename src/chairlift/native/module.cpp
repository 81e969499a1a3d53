// Python's view of the core: chairlift._native. Bindings only; kernels/native.py and emit.py use them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <string>
#include <tuple>

#include "isa.h"
#include "kv.h"
#include "pack.h"
#include "pool.h"
#include "program.h"
#include "recording.h"

namespace nb = nanobind;

namespace chairlift {
namespace {

template <class T>
using Flat = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// An operand as Python passes it: (buffer, offset, width), a number, a text, or a list of floats.
Operands::Value operand(nb::handle value) {
    if (nb::isinstance<nb::tuple>(value)) {
        const auto [buffer, offset, width] = nb::cast<std::tuple<int, int, int>>(value);
        return Lanes{buffer, offset, width};
    }
    if (nb::isinstance<nb::int_>(value)) return nb::cast<int64_t>(value);
    if (nb::isinstance<nb::float_>(value)) return nb::cast<double>(value);
    if (nb::isinstance<nb::str>(value)) return nb::cast<std::string>(value);
    return nb::cast<std::vector<double>>(value);
}

// Views of attributes of a Python object, which it keeps alive.
class Views {
public:
    explicit Views(nb::handle object) : object_(object) {}

    // Throws std::invalid_argument unless the attribute is a contiguous array of T with `num_dims` dimensions.
    template <class T>
    std::span<T> get(const char* name, size_t num_dims = 1) const {
        using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;
        Array array;
        if (!nb::try_cast<Array>(object_.attr(name), array, false) || array.ndim() != num_dims) {
            throw std::invalid_argument("malformed step: " + std::string(name) + " has another dtype, shape or layout");
        }
        return {array.data(), array.size()};
    }

private:
    nb::handle object_;
};

Step step_of(nb::handle arrays, const Flat<const uint8_t>& sample) {
    const Views views(arrays);
    const bool aligned = reinterpret_cast<uintptr_t>(sample.data()) % alignof(SampleParams) == 0;
    if (!aligned || sample.size() % sizeof(SampleParams) != 0) {
        throw std::invalid_argument("malformed step: sample is not an aligned array of sampling records");
    }
    Step step;
    step.tokens = views.get<const int32_t>("tokens");
    step.positions = views.get<const int32_t>("positions");
    step.slots = views.get<const int32_t>("slots");
    step.seq_starts = views.get<const int32_t>("seq_starts");
    step.table_starts = views.get<const int32_t>("table_starts");
    step.block_tables = views.get<const int32_t>("block_tables");
    step.logit_rows = views.get<const int32_t>("logit_rows");
    step.sample = {reinterpret_cast<const SampleParams*>(sample.data()), sample.size() / sizeof(SampleParams)};
    step.bias_starts = views.get<const int32_t>("bias_starts");
    step.bias_ids = views.get<const int32_t>("bias_ids");
    step.bias_values = views.get<const float>("bias_values");
    step.seen_starts = views.get<const int32_t>("seen_starts");
    step.seen_ids = views.get<const int32_t>("seen_ids");
    step.seen_counts = views.get<const int32_t>("seen_counts");
    return step;
}

StepResult result_of(nb::handle arrays) {
    const Views views(arrays);
    StepResult result;
    result.tokens = views.get<int32_t>("tokens");
    result.logprobs = views.get<float>("logprobs");
    result.top_ids = views.get<int32_t>("top_ids", 2);
    result.top_logprobs = views.get<float>("top_logprobs", 2);
    result.finite = views.get<bool>("finite");
    if (!arrays.attr("logits").is_none()) result.logits = views.get<float>("logits", 2);
    return result;
}

// Returns the seconds that the step itself took, without the wait for the interpreter's lock after it.
double run(Program& program, nb::handle arrays, const Flat<const uint8_t>& sample, nb::handle result) {
    const Step step = step_of(arrays, sample);
    const StepResult out = result_of(result);
    const nb::gil_scoped_release no_gil;
    const auto start = std::chrono::steady_clock::now();
    program.run(step, out);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

using Parts = std::vector<std::tuple<std::string, Flat<const uint8_t>, int64_t>>;  // type name, file bytes, rows

std::shared_ptr<PackedMatrix> pack_parts(const Parts& parts, int64_t cols, Pool& pool, bool release_pages) {
    std::vector<Source> sources;
    for (const auto& [type_name, bytes, rows] : parts) {
        const SourceType type = source_type(type_name);
        if (rows < 1 || cols < 1 || static_cast<int64_t>(bytes.size()) != rows * source_row_bytes(type, cols)) {
            throw std::invalid_argument("a weight's bytes are not rows x cols of its type");
        }
        sources.push_back({type, bytes.data(), rows});
    }
    const ParallelFor parallel = [&pool](int n, const std::function<void(int)>& body) { pool.run(n, body); };
    const nb::gil_scoped_release no_gil;
    return std::make_shared<PackedMatrix>(pack(sources, cols, parallel, release_pages));
}

std::shared_ptr<KVCache> make_cache(const std::string& type, int blocks, const std::vector<std::tuple<int, int>>& layers,
                                    Pool& pool) {
    if (type != "bf16" && type != "int8") throw std::invalid_argument("a KV cache is of bf16 or int8, not " + type);
    std::vector<KVShape> shapes;
    for (const auto& [kv_heads, head_dim] : layers) {
        shapes.push_back(kv_shape(type == "bf16" ? KVType::bf16 : KVType::int8, kv_heads, head_dim));
    }
    const nb::gil_scoped_release no_gil;
    return std::make_shared<KVCache>(std::move(shapes), blocks, pool);
}

void bind_isa(nb::module_& module) {
    module.def("available_isas", [] {
        std::vector<std::string> names;
        for (const Isa isa : available_isas()) names.emplace_back(isa_name(isa));
        return names;
    });
    module.def("best_isa", [] { return std::string(isa_name(best_isa())); });
    module.def("layout_of", [](std::string_view type_name) {
        return std::string(layout_name(layout_of(source_type(type_name))));
    });
}

void bind_storage(nb::module_& module) {
    nb::class_<Pool>(module, "Pool").def(nb::init<int>(), nb::arg("threads")).def_prop_ro("threads", &Pool::threads);
    nb::class_<PackedMatrix>(module, "PackedMatrix")
        .def_prop_ro("rows", &PackedMatrix::rows)
        .def_prop_ro("cols", &PackedMatrix::cols)
        .def_prop_ro("nbytes", &PackedMatrix::bytes)
        .def_prop_ro("layout", [](const PackedMatrix& matrix) { return std::string(layout_name(matrix.layout())); });
    module.def("pack", &pack_parts, nb::arg("parts"), nb::arg("cols"), nb::arg("pool"), nb::arg("release_pages"));
    nb::class_<KVCache>(module, "KVCache").def_prop_ro("nbytes", &KVCache::bytes);
    module.def("make_cache", &make_cache, nb::arg("dtype"), nb::arg("blocks"), nb::arg("layers"),
               nb::arg("pool"));
}

void bind_program(nb::module_& module) {
    nb::class_<Recording>(module, "Recording")
        .def("__init__",
             [](Recording* self, std::string_view isa, std::shared_ptr<Pool> pool, std::shared_ptr<KVCache> cache,
                int max_rows, int vocab) {
                 new (self) Recording(isa_from_name(isa), std::move(pool), std::move(cache), max_rows, vocab);
             })
        .def("add_buffer", [](Recording& self, int width, std::string_view dtype) {
            return self.add_buffer(width, dtype_from_name(dtype));
        })
        .def("add_matrix", &Recording::add_matrix)
        .def("add_vector", &Recording::add_vector)
        .def("record", [](Recording& self, std::string_view op, const nb::kwargs& operands) {
            std::map<std::string, Operands::Value> values;
            for (const auto [name, value] : operands) values.emplace(nb::cast<std::string>(name), operand(value));
            self.record(op, std::move(values));
        })
        .def("finish", &Recording::finish);
    nb::class_<Program>(module, "Program")
        .def("run", &run, nb::arg("step"), nb::arg("sample"), nb::arg("result"))
        .def_prop_ro("num_ops", &Program::num_ops)
        .def_prop_ro("weight_bytes", &Program::weight_bytes)
        .def_prop_ro("activation_bytes", &Program::activation_bytes);
}

}  // namespace
}  // namespace chairlift

NB_MODULE(_native, module) {
    nanobind::set_leak_warnings(false);  // a server ends with its model in use: that is no leak, and no news for a user
    module.doc() = "The compiled core: kernels for the instruction sets of this machine, and the Program they replay.";
    chairlift::bind_isa(module);
    chairlift::bind_storage(module);
    chairlift::bind_program(module);
    module.attr("MAX_TOP") = chairlift::kMaxTop;  // ops.MAX_TOP and
    module.attr("BLOCK_TOKENS") = chairlift::kBlockTokens;  // backend.BLOCK_SIZE must be the same
}
