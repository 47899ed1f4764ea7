#include "call.hpp"
#include "shape.hpp"
#include "tables.hpp"
#include "utils/json.hpp"

#include <iterator>
#include <stdexcept>

namespace deep_gemm_k3::checks {

namespace {

[[noreturn]] void fail(
    const Call& call, std::string_view name, std::string_view wanted, std::string_view given, std::string_view id) {
    throw std::runtime_error(
        std::string(entry_name(call.entry)) + ": " + message(name, wanted, given) + " [" + std::string(id) + "]");
}

// The checks made of every tensor, in this order. `id` is NAME.SUFFIX.
struct TensorFault {
    const char* suffix = nullptr;
    std::string wanted, given;
};

std::string shape_text(const TensorView& view) {
    std::string text = "[";
    for (int i = 0; i < view.rank; ++i)
        text += (i ? ", " : "") + (i < kMaxRank ? std::to_string(view.sizes[i]) : "...");
    return text + "]";
}

std::string wanted_shape(const TensorSpec& spec, const Call& call) {
    std::string sizes = "[", names = "[";
    for (int i = 0; i < spec.rank; ++i) {
        const DimText text = dim_text(spec.dims[i]);
        const std::string value = std::to_string(dim_value(spec.dims[i], call));
        sizes += (i ? ", " : "") + std::string(text.is_minimum ? ">= " : "") + value;
        names += (i ? ", " : "") + (*text.text ? std::string(text.text) : value);
    }
    return "shape " + sizes + "] = " + names + "]";
}

std::string device_text(bool on_cpu, int index) {
    return on_cpu ? "cpu" : "cuda:" + std::to_string(index);
}

bool shape_fits(const TensorSpec& spec, const TensorView& view, const Call& call) {
    for (int i = 0; i < spec.rank; ++i) {
        const int64_t wanted = dim_value(spec.dims[i], call);
        if (dim_text(spec.dims[i]).is_minimum ? view.sizes[i] < wanted : view.sizes[i] != wanted)
            return false;
    }
    return true;
}

bool applies(const TensorSpec& spec, Tensor tensor, const Call& call, ForTarget target) {
    return spec.tensor == tensor && (spec.entries & mask_of(call.entry)) != 0 &&
           (spec.target == ForTarget::kAny || spec.target == target);
}

ForTarget target_of(const Call& call) {
    return call.buffer->spec.target.starts_with("sm_90") ? ForTarget::kSM90 : ForTarget::kSM100;
}

// A layout that would fit another target: the transform was made for the wrong one.
bool made_for_another(const TensorSpec& spec, const TensorView& view, const Call& call) {
    if (spec.target == ForTarget::kAny || (view.dtype == spec.dtype && view.rank == spec.rank))
        return false;
    for (const TensorSpec& other : tensor_specs())
        if (other.tensor == spec.tensor && other.target != spec.target && view.dtype == other.dtype &&
            view.rank == other.rank && shape_fits(other, view, call))
            return true;
    return false;
}

TensorFault tensor_fault(const TensorSpec& spec, const TensorView& view, const Call& call) {
    if (made_for_another(spec, view, call))
        return {"target",
            "weights made by transform_weights_for_mega_moe(..., target='" + call.buffer->spec.target + "')",
            "ones made for " + std::string(spec.target == ForTarget::kSM90 ? "sm_100a" : "sm_90a") + ": " +
                dtype_name(view.dtype) + " " + shape_text(view)};
    if (view.dtype != spec.dtype)
        return {"dtype", std::string("dtype ") + dtype_name(spec.dtype), dtype_name(view.dtype)};
    if (view.rank != spec.rank)
        return {"rank", wanted_shape(spec, call), std::to_string(view.rank) + " dimensions " + shape_text(view)};
    if (!shape_fits(spec, view, call))
        return {"shape", wanted_shape(spec, call), shape_text(view)};
    if (!view.contiguous)
        return {"contiguous", "a contiguous tensor", "one with gaps or another order of strides"};
    const runtime::BufferSpec& home = call.buffer->spec;
    const bool same_device =
        view.on_cpu == call.buffer->on_cpu() && (view.on_cpu || view.device_index == home.device_index);
    if (!same_device)
        return {"device", "device " + device_text(call.buffer->on_cpu(), home.device_index) + " as the buffer",
            device_text(view.on_cpu, view.device_index)};
    if (view.address % spec.alignment != 0 && view.numel() > 0)
        return {"aligned", "an address that is a multiple of " + std::to_string(spec.alignment),
            std::to_string(view.address % spec.alignment) + " bytes past one"};
    return {};
}

void check_tensors(const Call& call, bool early) {
    const ForTarget target = target_of(call);
    for (const TensorSpec& spec : tensor_specs()) {
        if (spec.early != early || !applies(spec, spec.tensor, call, target))
            continue;
        const TensorView& view = call.tensor(spec.tensor);
        const char* name = tensor_name(spec.tensor);
        if (!view.present) {
            if (spec.optional)
                continue;
            fail(call, name, "a tensor", "None", std::string(name) + ".presence");
        }
        const TensorFault fault = tensor_fault(spec, view, call);
        if (fault.suffix)
            fail(call, name, fault.wanted, fault.given, std::string(name) + "." + fault.suffix);
    }
}

void check_absent(const Call& call) {
    const ForTarget target = target_of(call);
    for (int i = 0; i < kNumTensors; ++i) {
        if (!call.tensors[i].present)
            continue;
        const Tensor tensor = static_cast<Tensor>(i);
        bool known = false;
        for (const TensorSpec& spec : tensor_specs())
            known = known || applies(spec, tensor, call, target);
        if (!known)
            fail(call, tensor_name(tensor), std::string("None") + forbidden_hint(tensor), "a tensor",
                std::string(tensor_name(tensor)) + ".presence");
    }
}

// All rules of a stage, or those about one name.
void check_rules(const Call& call, Stage stage, std::string_view name = {}) {
    for (const Rule& rule : rules()) {
        if (rule.stage != stage || (rule.entries & mask_of(call.entry)) == 0 || (!name.empty() && rule.name != name))
            continue;
        if (const std::optional<std::string> given = rule.broken(call))
            fail(call, rule.name, rule.wanted, *given, rule.id);
    }
}

json::Value entries_json(EntryMask mask) {
    json::Array names;
    for (int i = 0; i < kNumEntries; ++i)
        if (mask & 1u << i)
            names.push_back(entry_name(static_cast<Entry>(i)));
    return names;
}

void list_tensor(json::Array& out, Tensor tensor) {
    EntryMask accepted = 0;
    bool per_target = false;
    const TensorSpec* first = nullptr;
    for (const TensorSpec& spec : tensor_specs()) {
        if (spec.tensor != tensor)
            continue;
        first = first ? first : &spec;
        accepted |= spec.entries;
        per_target = per_target || spec.target != ForTarget::kAny;
    }
    const std::string name = tensor_name(tensor);
    const auto add = [&](const char* suffix, const std::string& wanted, EntryMask entries) {
        out.push_back(json::Object{{"id", name + "." + suffix}, {"name", name}, {"wanted", wanted}, {"where", "host"},
            {"entries", entries_json(entries)}});
    };
    if (accepted != kEntriesAll) // the operator's schema has the others
        add("presence", "a tensor where it has a use, None elsewhere", kEntriesAll);
    if (per_target)
        add("target", "a layout made for the buffer's target", accepted);
    add("dtype", std::string("dtype ") + (per_target ? "of the target's layout" : dtype_name(first->dtype)), accepted);
    add("rank", "the number of dimensions of its shape", accepted);
    if (!has_free_shape(*first))
        add("shape", "the sizes that buffer and call imply", accepted);
    add("contiguous", "a contiguous tensor", accepted);
    add("device", "the buffer's device", accepted);
    add("aligned", "an address that loads and stores of its kind can use", accepted);
}

} // namespace

const char* entry_name(Entry entry) {
    constexpr const char* kNames[] = {"fp8_fp4_mega_moe", "fp8_fp4_mega_moe_bf16_shared",
        "fp8_fp4_mega_moe_bf16_shared_rs", "fp8_fp4_mega_moe_bf16_shared_sp_rs"};
    return kNames[static_cast<int>(entry)];
}

const char* dtype_name(Dtype dtype) {
    constexpr const char* kNames[] = {"another dtype", "uint8", "int8", "int32", "int64", "float32", "bfloat16",
        "float8_e4m3fn", "float16", "float64", "bool", "int16", "uint16", "uint32", "uint64", "complex64", "complex128",
        "float8_e5m2"};
    static_assert(std::size(kNames) == static_cast<size_t>(Dtype::kNumDtypes));
    return kNames[static_cast<int>(dtype)];
}

int64_t dtype_bytes(Dtype dtype) {
    constexpr int64_t kBytes[] = {1, 1, 1, 4, 8, 4, 2, 1, 2, 8, 1, 2, 2, 4, 8, 8, 16, 1};
    static_assert(std::size(kBytes) == static_cast<size_t>(Dtype::kNumDtypes));
    return kBytes[static_cast<int>(dtype)];
}

void check_call(const Call& call) {
    check_rules(call, Stage::kArguments);
    check_absent(call);
    check_tensors(call, true);
    check_rules(call, Stage::kWidths);
    check_tensors(call, false);
    check_rules(call, Stage::kWhole);
}

void check_activation(const Call& call) {
    check_rules(call, Stage::kArguments, "activation");
}

void check_values(const Call& call) {
    check_rules(call, Stage::kValues);
}

std::string list_checks() {
    json::Array out;
    for (int i = 0; i < kNumTensors; ++i)
        list_tensor(out, static_cast<Tensor>(i));
    for (const Rule& rule : rules()) {
        const char* where = rule.stage != Stage::kValues ? "host" : rule.in_kernel ? "values, kernel" : "values";
        out.push_back(json::Object{{"id", rule.id}, {"name", rule.name}, {"wanted", rule.wanted}, {"where", where},
            {"entries", entries_json(rule.entries)}});
    }
    for (const OtherCheck& check : other_checks())
        out.push_back(json::Object{{"id", check.id}, {"name", check.name}, {"wanted", check.wanted},
            {"where", check.where}, {"entries", entries_json(kEntriesAll)}});
    return json::Value(std::move(out)).dump();
}

} // namespace deep_gemm_k3::checks
